"""`SplitOptimizer`: any other optimizer with its own step and states, over split weights.

`torch_fp8.convert_optimizer` swaps the class of optimizers whose states it does not know. A float32
weight and its gradient then take 5 bytes instead of 8: 2 + 1 for the weight and 2 for the gradient.
States are unchanged in memory and in checkpoints, which have the optimizer's own format.

The step is the optimizer's own, on float32 copies of the weights (`torch_fp8.optim.lent_weights`).
Optimizers of `torch.optim` collect all weights before they step any. They step each weight
independently, so this class calls their step on one bucket of weights after another.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torch_fp8.config import FP8Config
from torch_fp8.optim.bitsandbytes_overrides import placed_overrides
from torch_fp8.optim.checkpoint import FORMAT_VERSION, OPTIONS_KEY
from torch_fp8.optim.converted import ConvertedOptimizer, begin_step, unhooked
from torch_fp8.optim.grad_hooks import attach_hooks
from torch_fp8.optim.lent_weights import Lending, lent
from torch_fp8.tensor.dtensor import local

STEPS = "fp8_steps"
"""The key in parameter groups that stores the step count in a checkpoint of sharded weights."""
BUCKET_NUMEL = 1 << 25
"""The number of elements of which a `torch.optim` optimizer gets float32 copies at a time; a larger
weight is a bucket of its own.
"""
_SEARCH_DEPTH = 4


class SplitOptimizer(ConvertedOptimizer):
    """The class that `convert_optimizer` puts in front of any optimizer but Adam and AdamW.

    Attributes:
        fp8_steps: the number of steps so far, which keys the rounding.
    """

    fp8_steps: int = 0
    _fp8_attributes = (*ConvertedOptimizer._fp8_attributes, "fp8_steps")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Run the user's optimizer's step; a closure runs once, before it."""
        loss = begin_step(self, closure)
        self.fp8_hooks_restored += attach_hooks(self)
        # torch.distributed.checkpoint steps with a learning rate of 0 to create the states.
        self.fp8_steps += any(group.get("lr", 1.0) != 0 for group in self.param_groups)
        stepped = self._step_apart()
        step, result = unhooked(self._fp8_base.step), None
        parameters = [p for _, _, p in self.indexed_parameters() if p not in stepped]
        torchs = str(step.__module__).startswith("torch.optim.")
        buckets = _buckets(parameters) if torchs else [set(parameters)]
        with placed_overrides(self):
            for bucket in buckets:
                with lent(self, self._lending(self.fp8_steps), bucket):
                    result = step(self, **options)
        return result if closure is None else loss

    def _step_apart(self) -> set[Tensor]:
        """Step weights that the user's step must skip; return all weights already stepped."""
        return set()

    def _lending(self, step: int) -> Lending:
        indices = {parameter: i for i, _, parameter in self.indexed_parameters()}
        return Lending(self.fp8_config.seed, step, indices)

    def set_config(self, config: FP8Config) -> None:
        """Set the parts of a configuration that apply to weights and gradients."""
        super().set_config(replace(config, gradient_release=False, update_clipping=False))

    def step_of(self, parameter: Tensor) -> int:
        """Return the step count, which all parameters share."""
        return self.fp8_steps

    def state_dict(self) -> dict[str, Any]:
        """Return the user's optimizer's own state dict, with the options that key the rounding."""
        packed: dict[str, Any] = super().state_dict()
        packed[OPTIONS_KEY] = {
            "version": FORMAT_VERSION,
            "residual_bits": self.fp8_config.residual_bits,
            "seed": self.fp8_config.seed,
            "steps": self.fp8_steps,
        }
        if self._meshes() and self.fp8_steps:
            # torch.distributed.checkpoint saves only states and groups. Of what an optimizer does
            # not have before its first step, it loads 1-D tensors alone.
            for group in packed["param_groups"]:
                group[STEPS] = torch.tensor([self.fp8_steps], device="cpu", dtype=torch.int64)
        return packed

    def _meshes(self) -> set[DeviceMesh]:
        """Return the meshes of sharded parameters."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        return {p.device_mesh for p in parameters if isinstance(p, DTensor)}

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
        seed = options.get("seed", self.fp8_config.seed)
        self.fp8_config = replace(self.fp8_config, seed=seed)


def reason_to_keep_weights(optimizer: Optimizer) -> str | None:
    """Explain why an optimizer cannot step copies of its weights; None if it can."""
    parameters = inspect.signature(unhooked(type(optimizer).step)).parameters
    closure = parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return "its step runs the closure itself"
    held = {p for group in optimizer.param_groups for p in group["params"]}
    places = {_address(p) for p in held} - {0}
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    attributes = {k: v for k, v in vars(optimizer).items() if k not in ("param_groups", "state")}
    for value in _within([attributes, groups, list(optimizer.state.values())], _SEARCH_DEPTH):
        if isinstance(value, (Optimizer, nn.Module)):
            return f"it contains {type(value).__name__}, which may write its weights"
        if isinstance(value, Tensor) and (value in held or _address(value) in places):
            return "it references its weights outside its parameter groups"
    return None


def _buckets(parameters: list[Tensor]) -> Iterator[set[Tensor]]:
    """Yield all parameters in buckets of about `BUCKET_NUMEL` elements."""
    bucket: set[Tensor] = set()
    numel = 0
    for parameter in parameters:
        if bucket and numel + local(parameter).numel() > BUCKET_NUMEL:
            yield bucket
            bucket, numel = set(), 0
        bucket.add(parameter)
        numel += local(parameter).numel()
    if bucket:
        yield bucket


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
