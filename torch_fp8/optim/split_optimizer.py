"""`SplitOptimizer`: any other optimizer with its own step and states, over split weights.

`torch_fp8.convert_optimizer` swaps the class of optimizers whose states it does not know. A float32
weight and its gradient then take 5 bytes instead of 8: 2 + 1 for the weight and 2 for the gradient.
States are unchanged in memory and in checkpoints, which have the optimizer's own format.

The step is the optimizer's own, closure included, on the Parameters themselves. Operators read and
write a split weight as float32, exactly with 16 residual bits (`torch_fp8.tensor.split_weight`).
After the step this class rounds each weight that was written to 8 residual bits. So at the end of a
step a weight takes 4 bytes, and one operand of an operator at a time exists in float32, too.

A write to ``p.grad`` is rounded to the gradient's precision. For the time of a step of another
library, 8-bit gradients therefore become BF16. ``torch.optim`` never writes gradients.

The count of a `SplitOptimizer` keys the rounding of its weights, so a resumed run needs it to use
the same random numbers. A folder stores it in the optimizer's parameter groups, as
``<optimizer>.param_groups.<i>.fp8_steps``. A load only reads the keys that the optimizer has before
its first step. The count is not among them, so folders of stock optimizers load, too.
"""

import contextlib
import gc
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torch_fp8.config import FP8Config
from torch_fp8.optim.checkpoint import OPTIONS_KEY, saved_options
from torch_fp8.optim.converted import ConvertedOptimizer, run_closure, stock_name, unhooked
from torch_fp8.optim.gradient_slot import attach_slots
from torch_fp8.optim.state import shard_origin
from torch_fp8.quantization.stochastic_rounding import stream_keys
from torch_fp8.tensor.dtensor import local, with_data
from torch_fp8.tensor.encoded import refused_addresses
from torch_fp8.tensor.exchange import stored_grad
from torch_fp8.tensor.float8_grad import Float8Grad
from torch_fp8.tensor.halves import Halves
from torch_fp8.tensor.readable import REFERRED, swappable
from torch_fp8.tensor.split_weight import SplitWeight, halves_of, join_parameter
from torch_fp8.tensor.wide_grad import WideGrad

STEPS = "fp8_steps"
"""The key in parameter groups that stores the step count in a checkpoint of sharded weights."""
_SEARCH_DEPTH = 4
_COMPILED = ("apex", "deepspeed", "torchao", "transformer_engine")
"""Packages whose optimizers pass weights to compiled code that operators don't see."""


class SplitOptimizer(ConvertedOptimizer):
    """The class that `convert_optimizer` puts in front of any optimizer but Adam and AdamW.

    Attributes:
        fp8_steps: the number of steps so far, which keys the rounding.
    """

    fp8_steps: int = 0

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Run the user's optimizer's step, then round the weights that it has written."""
        run_closure(self, None)
        self.fp8_hooks_restored += attach_slots(self)
        step = self._next_step()
        own_step = unhooked(self._fp8_base.step)
        if not own_step.__module__.startswith("torch.optim."):
            for _, _, parameter in self.indexed_parameters():
                widen_gradient(parameter)
        # Code in the closure may compare addresses, as between two steps.
        arguments = () if closure is None else (refused_addresses(None)(closure),)
        with self.rounded(step):
            result = own_step(self, *arguments, **options)
        self.fp8_steps = step
        return result

    def _next_step(self) -> int:
        """Return the step count after the current step."""
        # torch.distributed.checkpoint steps with a learning rate of 0 to create the states.
        return self.fp8_steps + any(group.get("lr", 1.0) != 0 for group in self.param_groups)

    @contextlib.contextmanager
    def rounded(self, step: int) -> Iterator[None]:
        """Round the weights that the optimizer writes in this context, with the keys of `step`."""
        before = {i: halves.version for i, halves in self._halves()}
        try:
            with refused_addresses(stock_name(self)):
                yield
        finally:
            origins = {i: shard_origin(parameter) for i, _, parameter in self.indexed_parameters()}
            for i, halves in self._halves():
                if halves.version != before.get(i):
                    halves.settle(stream_keys(self.fp8_config.seed, step, i), origins[i])

    def _halves(self) -> list[tuple[int, Halves]]:
        """Return (index, halves) for each split weight."""
        return [(i, h) for i, _, p in self.indexed_parameters() if (h := halves_of(p)) is not None]

    def set_config(self, config: FP8Config) -> None:
        """Set the parts of a configuration that apply to weights and gradients."""
        super().set_config(replace(config, gradient_release=False, update_clipping=False))

    def step_of(self, index: int) -> int:
        """Return the step count, which all parameters share."""
        return self.fp8_steps

    def state_dict(self) -> dict[str, Any]:
        """Return the user's optimizer's own state dict, with the options that key the rounding."""
        packed: dict[str, Any] = super().state_dict()
        packed[OPTIONS_KEY] = saved_options(self.fp8_config.seed, steps=self.fp8_steps)
        if self._meshes() and self.fp8_steps:
            # torch.distributed.checkpoint saves only states and groups. It loads an entry that an
            # optimizer does not have before its first step only if this is a 1-D tensor.
            for group in packed["param_groups"]:
                group[STEPS] = torch.tensor([self.fp8_steps], device="cpu", dtype=torch.int64)
        return packed

    def _meshes(self) -> set[DeviceMesh]:
        """Return the meshes of sharded parameters."""
        return {p.device_mesh for _, _, p in self.indexed_parameters() if isinstance(p, DTensor)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of the user's original optimizer."""
        options = state_dict.get(OPTIONS_KEY, {})
        super().load_state_dict({k: v for k, v in state_dict.items() if k != OPTIONS_KEY})
        counts = [int(group.pop(STEPS)) for group in self.param_groups if STEPS in group]
        self.fp8_steps = options.get("steps", max(counts, default=self.fp8_steps))
        for mesh in self._meshes():  # a whole checkpoint may be read by one rank
            count = torch.tensor(self.fp8_steps, dtype=torch.int64, device=mesh.device_type)
            for group in mesh.get_all_groups():
                dist.all_reduce(count, dist.ReduceOp.MAX, group)
            self.fp8_steps = int(count)
        self.fp8_config = replace(self.fp8_config, seed=options.get("seed", self.fp8_config.seed))


def reason_to_keep_weights(optimizer: Optimizer) -> str | None:
    """Explain why an optimizer cannot step weights in two halves, or None if it can."""
    libraries = {cls.__module__.partition(".")[0] for cls in type(optimizer).__mro__}
    if compiled := libraries.intersection(_COMPILED):
        return f"{compiled.pop()} passes them to compiled code"
    held = {p for group in optimizer.param_groups for p in group["params"]}
    places = {_address(p) for p in held} - {0}
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    attributes = {k: v for k, v in vars(optimizer).items() if k not in ("param_groups", "state")}
    for value in _within([attributes, groups, list(optimizer.state.values())], _SEARCH_DEPTH):
        if isinstance(value, Tensor) and value not in held and _address(value) in places:
            return "it holds a tensor that shares their memory"
    return None


def widen_gradient(parameter: Tensor) -> None:
    """Turn an 8-bit gradient into BF16."""
    grad = stored_grad(parameter)
    shard = None if grad is None else local(grad)
    if grad is None or not isinstance(shard, Float8Grad):
        return
    wide = shard.dequantize(torch.bfloat16)
    split = isinstance(local(parameter), SplitWeight)
    parameter.grad = with_data(grad, WideGrad(wide) if split else wide)


def _address(tensor: Tensor) -> int:
    shard = local(tensor)
    if shard.is_sparse or type(shard) not in (Tensor, nn.Parameter):
        return 0
    return shard.untyped_storage().data_ptr()


def _within(value: Any, depth: int) -> Iterator[Any]:
    """Yield the leaves of nested containers, down to `depth` levels."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple, set)):
        for item in value if depth else ():
            yield from _within(item, depth - 1)
    else:
        yield value


def join_parameters(parameters: Iterable[Tensor]) -> int:
    """Turn each `SplitWeight` back into a plain float32 Parameter, and return their number.

    A weight that torch cannot swap stays split, with one warning for all.
    """
    split = [parameter for parameter in parameters if isinstance(parameter, SplitWeight)]
    if not all(map(swappable, split)):
        gc.collect()  # a profiler that was deleted is part of a cycle
    joined = [parameter for parameter in split if swappable(parameter)]
    for parameter in joined:
        join_parameter(parameter)
    if len(joined) < len(split):
        warnings.warn(
            f"{len(split) - len(joined)} of {len(split)} weights stay stored in two halves, "
            f"because {REFERRED}, and torch then refuses to change their storage. They read and "
            "write as float32 weights. To make them plain, delete the profiler object and call "
            "torch_fp8.revert(model)",
            stacklevel=4,
        )
    return len(joined)


_KEY = re.compile(rf"(?:^|(?P<optimizer>.*)\.)param_groups\.\d+\.{STEPS}$")


def adopt_steps(path: str | Path, optimizers: Iterable[Optimizer]) -> int:
    """Give optimizers the step counts that a folder of shards has.

    Args:
        path: a folder written by torch.distributed.checkpoint, or a folder that contains such
            folders, as Accelerate's; a file changes nothing.
        optimizers: the optimizers in the order in which they were saved; only those that keep their
            own states have a count.
    Returns:
        The number of optimizers with a count.
    """
    path, counts = Path(path), dict[tuple[Path, str | None], int]()
    for metadata in (*path.glob(".metadata"), *sorted(path.glob("*/.metadata"))):
        reader = dcp.FileSystemReader(metadata.parent)
        keys = sorted(reader.read_metadata().state_dict_metadata)
        matches = [match for key in keys if (match := _KEY.search(key))]
        saved = {m.string: torch.zeros(1, device="cpu", dtype=torch.int64) for m in matches}
        if saved:
            dcp.load(saved, storage_reader=reader)
        counts |= {(metadata, m["optimizer"]): int(saved[m.string]) for m in matches}
    split = [optimizer for optimizer in optimizers if isinstance(optimizer, SplitOptimizer)]
    for optimizer, count in zip(split, counts.values(), strict=False):
        optimizer.fp8_steps = count
    return min(len(counts), len(split))
