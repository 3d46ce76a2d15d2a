"""`Float8Optimizer`: Adam and AdamW with 8-bit states and split master weights.

`torch_fp8.convert_optimizer` swaps the class of the user's object for one that derives from this
and from its own, with another ``step``, ``state_dict`` and ``load_state_dict``; groups, hooks and
the scheduler that holds it never notice.

A float32 weight becomes a BF16 Parameter, and the bits below it an 8-bit residual in the optimizer
(`torch_fp8.quantization.split_float`); both moments have 8 bits (`torch_fp8.ops.adamw`). With the
BF16 gradient a weight then takes 2 + 1 + 2 + 1 + 1 bytes and the scales, 7.06, where float32 takes
16.
"""

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torch_fp8.config import FP8Config
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.optim.checkpoint import (
    FORMAT_VERSION,
    GROUP_KEY,
    RESIDUALS_KEY,
    check_state_dict,
    entries,
    has_residual,
)
from torch_fp8.optim.grad_hooks import attach_hooks, finish_release, hook_of
from torch_fp8.optim.last_writes import LastWrites
from torch_fp8.optim.state import (
    SMALL_RESIDUAL_BITS,
    State,
    from_checkpoint,
    is_large,
    new_moments,
    residual_from_checkpoint,
    residual_to_checkpoint,
    settle_moments,
    settle_weight,
    to_checkpoint,
    zero_residual,
)
from torch_fp8.optim.step import Caches, new_small_state, settle_gradient, step_large, step_small
from torch_fp8.tensor.dtensor import local
from torch_fp8.tensor.float8_moment import Float8Moment
from torch_fp8.tensor.halves import EXACT_BITS
from torch_fp8.tensor.split_weight import SplitWeight, split_parameter, stored, stored_grad

_HOOKS = ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")


class Float8Optimizer(Optimizer):
    """The class that `convert_optimizer` puts in front of Adam and AdamW: methods, and no
    ``__init__``.

    Attributes:
        fp8_config: the configuration with which the optimizer was converted.
        fp8_layers: layers whose weights get 8-bit gradients.
        fp8_why_bf16_gradients: why at level O3 there are none of these; None where there are.
        fp8_hooks_restored: gradient hooks that were lost and put back so far.
        fp8_released: the parameters that were stepped in backward, since ``step``.
        fp8_caches: payload caches of the weights; a copy has none, its layers cast when they run.
        fp8_reducers: reducers of 8-bit gradients over ranks, one for each DDP module.
    """

    fp8_config: FP8Config
    fp8_layers: tuple["weakref.ref[Float8Layer]", ...]
    fp8_why_bf16_gradients: str | None
    fp8_hooks_restored: int
    fp8_released: set[Tensor]
    fp8_caches: Caches
    fp8_reducers: tuple[Any, ...] = ()
    _fp8_base: type[Optimizer]
    # Parameter -> residual as stored, until its first step moves it into the state.
    _fp8_residuals: dict[Tensor, Tensor]
    # Parameter -> the dtype it had before it became BF16.
    _fp8_dtypes: dict[Tensor, torch.dtype]
    _fp8_writes: LastWrites

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient, as torch.optim.AdamW does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.fp8_hooks_restored += attach_hooks(self)
        finish_release(self)
        self.step_parameters(self.indexed_parameters())
        return loss

    @property
    def fp8_gradients(self) -> set[Tensor]:
        """The weights that get 8-bit gradients, as their layers have them now."""
        return {layer.weight for ref in self.fp8_layers if (layer := ref()) is not None}

    def indexed_parameters(self) -> list[tuple[int, dict[str, Any], Tensor]]:
        """Return every parameter with its group and its index among all, which keys the random
        bits.
        """
        parameters = ((g, p) for g in self.param_groups for p in g["params"])
        return [(i, group, parameter) for i, (group, parameter) in enumerate(parameters)]

    def step_parameters(self, indexed: Iterable[tuple[int, dict[str, Any], Tensor]]) -> None:
        """Step those of some `indexed_parameters` that have a gradient."""
        large, small = [], []
        with_grads = [(*entry, stored_grad(entry[2])) for entry in indexed]
        with_grads = [entry for entry in with_grads if entry[3] is not None]
        parameters = [p for _, _, p, _ in with_grads]
        self.renew_residuals(parameters, in_step=True)
        # Kernels write past torch, and shards have versions of their own. A graph that needs the
        # old value shall notice; what is noted and kept of the new one comes after this.
        torch.autograd.graph.increment_version(parameters)
        for index, group, parameter, grad in with_grads:
            assert grad is not None
            if grad.is_sparse:
                raise RuntimeError(f"{self._fp8_base.__name__} does not support sparse gradients")
            settle_gradient(parameter)
            state = self._state_of(parameter)
            if isinstance(parameter, SplitWeight):
                parameter.halves.awaited = None
                settle_weight(parameter, self.fp8_config.seed, state, index)
            if state["exp_avg"].__class__ is Float8Moment or is_large(parameter):
                large.append((index, group, parameter, state))
            else:
                small.append((group, parameter, state))
        if large:
            torch._foreach_add_([state["step"] for *_, state in large], 1)
        step_large(large, self.fp8_config, self.fp8_caches)
        for group in self.param_groups:
            step_small(group, [(p, s) for g, p, s in small if g is group])
        stepped = [(p, s) for *_, p, s in large] + [(p, s) for _, p, s in small]
        self._fp8_writes.note([p for p, s in stepped if "residual" in s and not p.is_meta])

    def _state_of(self, parameter: Tensor) -> State:
        """Return a parameter's state, made at its first step and repaired after outside changes."""
        state: State = self.state[parameter]
        if "step" not in state:
            large = is_large(parameter)
            state.update(new_moments(parameter) if large else new_small_state(parameter))
            if not isinstance(parameter, SplitWeight):
                residual = self._fp8_residuals.pop(parameter, None)
                if residual is not None:
                    state["residual"] = residual
        if state["step"].device.type != "cpu":
            state["step"] = state["step"].cpu()
        first, second = state["exp_avg"], state["exp_avg_sq"]
        settled = first.__class__ is second.__class__ is Float8Moment  # the usual case, quickly
        settled = settled and parameter.dtype in (torch.float32, torch.bfloat16)
        if not settled or not first.shape == second.shape == parameter.shape:
            settle_moments(parameter, state)
        bits = self.residual_bits(parameter)
        if not bits:
            state.pop("residual", None)
        elif "residual" not in state:
            state["residual"] = zero_residual(parameter, bits)
        device = local(parameter).device
        for name, value in state.items():
            if name != "step" and value.device != device:
                state[name] = value.to(device)
        return state

    def set_config(self, config: FP8Config) -> None:
        """Take over a configuration; residuals change their bits with it."""
        old = self.__dict__.get("fp8_config", config)
        self.fp8_config = config
        self.__dict__.setdefault("_fp8_residuals", {})
        self.__dict__.setdefault("_fp8_dtypes", {})
        self.__dict__.setdefault("_fp8_writes", LastWrites())
        self.fp8_caches = {}
        self.__dict__.setdefault("fp8_layers", ())
        self.__dict__.setdefault("fp8_why_bf16_gradients", None)
        self.__dict__.setdefault("fp8_hooks_restored", 0)
        self.__dict__.setdefault("fp8_released", set())
        # GradScaler shall unscale and check the gradients itself, not leave it to a fused step;
        # only where they are gone by then does the step tell it that it cannot.
        self._step_supports_amp_scaling = config.gradient_release
        before, bits = old.residual_bits, config.residual_bits
        for _, _, parameter in self.indexed_parameters():
            residual = self.residual_of(parameter)
            if isinstance(parameter, SplitWeight):
                parameter.halves.step_bits = bits
            elif residual is not None and is_large(parameter) and before != bits:
                residual = residual_from_checkpoint(parameter, residual, before, bits)
                self.set_residual(parameter, residual)

    def residual_of(self, parameter: Tensor) -> Tensor | None:
        """Return the bits of a weight below BF16, as stored."""
        residual: Tensor | None = self.state.get(parameter, {}).get("residual")
        return self._fp8_residuals.get(parameter) if residual is None else residual

    def set_residual(self, parameter: Tensor, residual: Tensor | None) -> None:
        """Replace the residual; None: there is none."""
        self._fp8_writes.forget(parameter)
        self._fp8_residuals.pop(parameter, None)
        state = self.state.get(parameter, {})
        state.pop("residual", None)
        if residual is not None and state:
            state["residual"] = residual
        elif residual is not None:
            self._fp8_residuals[parameter] = residual

    def renew_residuals(self, parameters: Iterable[Tensor], *, in_step: bool = False) -> None:
        """Zero the residuals of weights that somebody else has written (`LastWrites`).

        Args:
            parameters: the weights to look at.
            in_step: whether a step is about to begin.
        """
        split = [p for p in parameters if p.dtype == torch.bfloat16]
        changed = self._fp8_writes.changed(split, in_step=in_step)
        for parameter in changed:
            residual = self.residual_of(parameter)
            if residual is not None:
                local(residual).zero_()
        self._fp8_writes.note(changed)

    def note_weights(self, parameters: Iterable[Tensor]) -> None:
        """Note that these weights, as they are, belong to their residuals."""
        self._fp8_writes.note(parameters)

    def residual_bits(self, parameter: Tensor) -> int:
        """Return k, the residual bits of a parameter: 0 where it is not BF16 (any more)."""
        if parameter.dtype != torch.bfloat16:
            return 0
        if not is_large(parameter):
            return SMALL_RESIDUAL_BITS
        return self.fp8_config.large_residual_bits or 0

    def original_dtype(self, parameter: Tensor) -> torch.dtype:
        """Return the dtype that a parameter had before it became BF16."""
        return self._fp8_dtypes.get(parameter, parameter.dtype)

    def has_fp8_gradient(self, parameter: Tensor) -> bool:
        """Return whether the gradient of a parameter is quantized as soon as it is there."""
        hook = hook_of(parameter)
        return hook is not None and hook.quantize

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch.optim.AdamW's format, on the CPU, plus ``residual``.

        Weights that have not been stepped yet have no state in that format; their residuals are
        under a key of their own beside ``state`` and ``param_groups``. Hooks run as in stock: post
        hooks see, and may change, what is returned.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        with self._without_hooks(), torch.no_grad():
            packed = self._to_checkpoint(super().state_dict())
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, packed)
            packed = packed if changed is None else changed
        return packed

    def _to_checkpoint(self, packed: dict[str, Any]) -> dict[str, Any]:
        parameters = {i: p for i, _, p in self.indexed_parameters()}
        self.renew_residuals(parameters.values())
        for i, state in packed["state"].items():
            if i in parameters:  # beside them may be what a hook has put there
                ours = "step" in state
                state = to_checkpoint(parameters[i], state) if ours else dict(state)
                packed["state"][i] = state
        for group in packed["param_groups"]:
            group[GROUP_KEY] = {
                "version": FORMAT_VERSION,
                "residual_bits": self.fp8_config.residual_bits,
                "seed": self.fp8_config.seed,
            }
        packed[RESIDUALS_KEY] = {
            i: residual_to_checkpoint(p, self._fp8_residuals[p])
            for i, p in parameters.items()
            if p in self._fp8_residuals and not isinstance(p, SplitWeight)
        }
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, of torch.optim.AdamW or Adam; ours goes on bit for bit.

        A state without residuals (a stock one) leaves the residuals that the weights have. The
        weights of a state with residuals may be loaded before it or after it. Hooks run as in
        stock: pre hooks may change what is loaded, post hooks see it loaded.

        Raises:
            ValueError: what is loaded is no state of these parameters, or of another version of the
                format (`torch_fp8.optim.checkpoint`); the entry is named, and nothing is
                loaded.
        """
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        bits = check_state_dict(state_dict, self.param_groups, self.fp8_config.residual_bits)
        with self._without_hooks(), torch.no_grad():
            self._from_checkpoint(state_dict, bits)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _from_checkpoint(self, state_dict: dict[str, Any], saved_bits: int) -> None:
        parameters = [p for _, _, p in self.indexed_parameters()]
        loaded = list(entries(state_dict, parameters))
        self.renew_residuals(parameters)
        states = ((p, self.state.get(p, {})) for p in parameters)
        self._fp8_residuals.update({p: s["residual"] for p, s in states if "residual" in s})
        ids = {saved_id for saved_id, _, _ in loaded}
        others = {i: value for i, value in state_dict["state"].items() if i not in ids}
        super().load_state_dict({**state_dict, "state": others})
        for group in self.param_groups:
            saved = group.pop(GROUP_KEY, None)
            if saved is not None:
                self.fp8_config = dataclasses.replace(self.fp8_config, seed=saved["seed"])
        for _, parameter, entry in loaded:
            bits = self.residual_bits(parameter)
            if isinstance(parameter, SplitWeight):
                parameter.halves.awaited = None
                if has_residual(entry):
                    residual = residual_from_checkpoint(
                        stored(parameter), entry["residual"], saved_bits, parameter.halves.step_bits
                    )
                    parameter.halves.adopt(residual)
            elif bits and has_residual(entry):
                saved_k = saved_bits if is_large(parameter) else bits
                self._fp8_residuals[parameter] = residual_from_checkpoint(
                    parameter, entry["residual"], saved_k, bits
                )
                self._fp8_writes.forget(parameter)  # its weight may be loaded after this
            if "step" not in entry:
                continue
            state = from_checkpoint(parameter, entry, is_large(parameter))
            if parameter in self._fp8_residuals and not isinstance(parameter, SplitWeight):
                state["residual"] = self._fp8_residuals.pop(parameter)
            self.state[parameter] = state

    @contextlib.contextmanager
    def _without_hooks(self) -> Iterator[None]:
        """Run no hooks in stock methods called within: ours run them on what is complete."""
        names = [f"_optimizer_{hook}_hooks" for hook in _HOOKS]
        kept = {name: self.__dict__[name] for name in names}
        self.__dict__.update({name: type(hooks)() for name, hooks in kept.items()})
        try:
            yield
        finally:
            self.__dict__.update(kept)

    def __getstate__(self) -> dict[str, Any]:
        ours = (
            "fp8_config",
            "fp8_why_bf16_gradients",
            "fp8_hooks_restored",
            "fp8_released",
            "_fp8_base",
            "_fp8_residuals",
            "_fp8_dtypes",
        )
        state = {**super().__getstate__(), **{name: self.__dict__[name] for name in ours}}
        indexed = self.indexed_parameters()
        split = [i for i, _, p in indexed if isinstance(p, SplitWeight)]  # copies are plain
        layers = [layer for ref in self.fp8_layers if (layer := ref())]
        return {**state, "fp8_layers": layers, "fp8_split": split}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "fp8_layers" in state:  # of a copy; load_state_dict calls this, too
            self.fp8_layers = tuple(map(weakref.ref, state["fp8_layers"]))
            split = self.__dict__.pop("fp8_split")
            for _, _, parameter in [self.indexed_parameters()[i] for i in split]:
                if not isinstance(parameter, SplitWeight):
                    split_parameter(parameter, EXACT_BITS, self.fp8_config.residual_bits)
        self.fp8_caches = self.__dict__.get("fp8_caches", {})
        self.__dict__.setdefault("_fp8_writes", LastWrites())
        self._step_supports_amp_scaling = self.fp8_config.gradient_release
        attach_hooks(self)  # the copied parameters have none

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made at run time; pickle and deepcopy rebuild it from the user's.
        return _rebuild, (self._fp8_base,), self.__getstate__()


@functools.cache
def float8_class(base: Any) -> type[Float8Optimizer]:
    """Return a subclass of `base` with `Float8Optimizer` in front, under its name, which hosts log
    learning rates by.
    """
    named = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (Float8Optimizer, base), {**named, "__doc__": base.__doc__})


def _rebuild(base: Any) -> Any:
    cls: Any = float8_class(base)
    return cls.__new__(cls)
