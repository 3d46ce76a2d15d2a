"""`Float8Optimizer`: Adam and AdamW with 8-bit states and split master weights.

`torch_fp8.convert_optimizer` gives the user's optimizer a class that inherits from this one and
from the original class. It replaces ``step``, ``state_dict`` and ``load_state_dict``; the object,
its groups, its hooks and its scheduler stay the same.

A float32 weight is stored as a BF16 half and an 8-bit residual (`torch_fp8.tensor.split_weight`);
both moments have 8 bits (`torch_fp8.ops.adamw`). With its BF16 gradient a weight then takes 2 + 1 +
2 + 1 + 1 bytes and the scales, 7.06 in all, instead of 16 in float32.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_fp8.config import FP8Config
from torch_fp8.optim.checkpoint import (
    OPTIONS_KEY,
    RESIDUALS_KEY,
    check_state_dict,
    entries,
    has_residual,
    saved_options,
)
from torch_fp8.optim.converted import ConvertedOptimizer, run_closure
from torch_fp8.optim.gradient_slot import attach_slots, finish_release
from torch_fp8.optim.residual import (
    loaded_residual,
    residual_bits,
    residual_to_checkpoint,
    set_residual,
    shard_of,
)
from torch_fp8.optim.state import (
    FORMATS_KEY,
    STATE_FORMATS,
    from_checkpoint,
    is_large,
    settle_state,
    to_checkpoint,
)
from torch_fp8.optim.step import (
    Entry,
    Prepared,
    current_matrix,
    settle_weight,
    settled_gradient,
    step_large,
    step_small,
)
from torch_fp8.tensor.dtensor import local
from torch_fp8.tensor.exchange import stored_grad
from torch_fp8.tensor.split_weight import SplitWeight, halves_of


class Float8Optimizer(ConvertedOptimizer):
    """The class that `convert_optimizer` puts in front of Adam and AdamW.

    Attributes:
        fp8_payloads: whether weights keep their payloads under ``cache_weights="auto"``, decided
            once, or None if not yet.
    """

    fp8_payloads: bool | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient, as torch.optim.AdamW does."""
        loss = run_closure(self, closure)
        self.fp8_hooks_restored += attach_slots(self)
        finish_release(self)
        self.step_parameters(self.indexed_parameters())
        return loss

    def step_parameters(self, indexed: list[tuple[int, dict[str, Any], Tensor]]) -> None:
        """Step the parameters of some `indexed_parameters` that have a gradient."""
        stepped, prepared = list[Tensor](), list[Prepared]()
        large, small = list[Entry](), list[Entry]()
        # By identity, because torch computes the hash of a tensor in Python.
        several = self.state if len(indexed) > 1 else {}
        states = dict(zip(map(id, several), several.values(), strict=True))
        for index, group, parameter in indexed:
            grad, key = stored_grad(parameter), id(parameter)
            if grad is None:
                continue
            if grad.is_sparse:
                raise RuntimeError(f"{self._fp8_base.__name__} does not support sparse gradients")
            grad = grad if type(grad) is Tensor else settled_gradient(parameter, grad)
            state = states[key] if key in states else self.state[parameter]
            halves = parameter.halves if type(parameter) is SplitWeight else halves_of(parameter)
            stepped.append(parameter)
            matrix = None if halves is None else current_matrix(index, halves, state, grad)
            if matrix is not None:
                prepared.append((matrix, group, state, None, halves))
                continue
            settle_state(parameter, state)
            if halves is not None:
                settle_weight(parameter, halves, self.fp8_config.seed, state, index)
            entry = Entry(index, group, parameter, state, grad, halves)
            (large if is_large(parameter) else small).append(entry)
        # Kernels write without torch's knowledge, and shards have their own version counters.
        # Increment the versions so that a graph which saved the old value raises an error. Payloads
        # of the new value are kept after this.
        torch.autograd.graph.increment_version(stepped)
        counts = [entry.state["step"] for entry in large] + [p[2]["step"] for p in prepared]
        if counts:
            one = torch.ones((), dtype=torch.float32, device="cpu")  # not one for each
            torch._foreach_add_(counts, one, alpha=1)
        step_large(prepared, large, self.fp8_config)
        for group in self.param_groups:
            step_small(group, [entry for entry in small if entry.group is group])

    def set_config(self, config: FP8Config) -> None:
        """Set the configuration."""
        super().set_config(config)
        # GradScaler should unscale and check the gradients itself instead of leaving it to a fused
        # step. With gradient release no gradients are left by then, and the step raises an error.
        self._step_supports_amp_scaling = config.gradient_release

    def keeps_residual(self, parameter: Tensor) -> bool:
        """Return whether a step keeps the bits below BF16 of a BF16 parameter."""
        is_bf16 = parameter.dtype == torch.bfloat16
        return is_bf16 and (self.fp8_config.keeps_residuals or not is_large(parameter))

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch.optim.AdamW's format, on the CPU.

        With ``checkpoint_states="fp8"`` 8-bit moments stay encoded. A weight that the user holds in
        BF16 has its ``residual`` in its state. Besides ``state`` and ``param_groups`` the dict has
        this package's options, and the residuals of weights that were not stepped yet. State dict
        hooks run as in a stock optimizer: post hooks see the returned dict and can change it.
        """
        with self.register_state_dict_post_hook(type(self)._to_checkpoint, prepend=True):
            return super().state_dict()

    @torch.no_grad()
    def _to_checkpoint(self, packed: dict[str, Any]) -> None:
        parameters = {i: p for i, _, p in self.indexed_parameters()}
        encoded = self.fp8_config.checkpoint_states == "fp8"
        saved = {
            i: residual_to_checkpoint(p) for i, p in parameters.items() if self.keeps_residual(p)
        }
        residuals = {i: residual for i, residual in saved.items() if residual is not None}
        for i, state in packed["state"].items():
            if i not in parameters:  # a hook has added it
                continue
            packed["state"][i] = dict(state)
            if "step" in state:
                own = {"residual": residuals.pop(i)} if i in residuals else {}
                packed["state"][i] = to_checkpoint(parameters[i], state, encoded=encoded) | own
        # Not in state or param_groups: torch.distributed.checkpoint needs each of their keys in
        # the file that it loads.
        formats = {FORMATS_KEY: STATE_FORMATS} if encoded else {}
        packed[OPTIONS_KEY] = saved_options(self.fp8_config.seed, **formats)
        packed[RESIDUALS_KEY] = residuals  # of weights that were not stepped yet

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, of torch.optim.AdamW or of Adam.

        A run continues bit for bit from a state of this class. A state without residuals (a stock
        one) leaves the weights' current residuals. You can load the weights before or after a state
        with residuals. Hooks run as in a stock optimizer: pre hooks can change the dict, post hooks
        see it loaded.

        Raises:
            ValueError: the dict does not fit these parameters, or has another format version
                (`torch_fp8.optim.checkpoint`). The error names the entry, and nothing is loaded.
        """
        ours: list[Any] = []

        def without_ours(_: Any, given: dict[str, Any]) -> dict[str, Any]:
            bits = check_state_dict(given, self.param_groups)
            loaded = list(entries(given, [p for _, _, p in self.indexed_parameters()]))
            ours.extend((given, bits, loaded))
            ids = {saved_id for saved_id, _, _ in loaded}
            return {**given, "state": {i: s for i, s in given["state"].items() if i not in ids}}

        def with_ours(_: Any) -> None:
            self._from_checkpoint(*ours)

        before = self.register_load_state_dict_pre_hook(without_ours)
        with before, self.register_load_state_dict_post_hook(with_ours, prepend=True):
            super().load_state_dict(state_dict)

    @torch.no_grad()
    def _from_checkpoint(
        self,
        state_dict: dict[str, Any],
        saved_bits: int,
        loaded: list[tuple[Any, Tensor, dict[str, Any]]],
    ) -> None:
        options = state_dict.get(OPTIONS_KEY)
        if options is not None:
            self.fp8_config = dataclasses.replace(self.fp8_config, seed=options["seed"])
        for _, parameter, entry in loaded:
            if self.keeps_residual(parameter) and has_residual(entry):
                saved = shard_of(parameter, entry["residual"])
                bits = saved_bits if is_large(parameter) else residual_bits(parameter)
                set_residual(parameter, loaded_residual(local(parameter), saved, bits))
            elif options is not None and "residual" not in entry:
                set_residual(parameter, None)
            if "step" not in entry:
                continue
            self.state[parameter] = from_checkpoint(parameter, entry)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for name in ("fp8_caches", "fp8_ratio_layers"):  # of 0.1.0
            self.__dict__.pop(name, None)
        self._step_supports_amp_scaling = self.fp8_config.gradient_release
