"""te.Linear, te.autocast, and the questions what a card can do."""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_engine.common.recipe import DelayedScaling, Recipe


class _Tracked(NamedTuple):
    """Delayed scaling of one layer in one direction: a column for each tensor."""

    amax_history: Tensor
    scale: Tensor
    recipe: DelayedScaling
    maximum: float


@dataclass
class _State:
    """What the original keeps in FP8GlobalStateManager."""

    enabled: bool = False
    recipe: Recipe | None = None
    depth: int = 0
    is_first_fp8_module: bool = False
    forward: list[_Tracked] = field(default_factory=list)
    backward: list[_Tracked] = field(default_factory=list)


_STATE = _State()


def _update(tracked: list[_Tracked]) -> None:
    """Move on the histories of all layers, and make scales of them."""
    for history, scale, recipe, maximum in tracked:
        latest = recipe.amax_compute_algo == "most_recent"
        amax = history[0].clone() if latest else history.amax(0)
        new = (maximum / amax) / 2**recipe.margin
        scale.copy_(torch.where((amax > 0) & amax.isfinite(), new, scale))
        history.copy_(history.roll(-1, 0))
        history[0].zero_()


class autocast:
    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
        _graph: bool = False,
    ) -> None:
        assert recipe is not None
        assert not isinstance(recipe, DelayedScaling) or not recipe.reduce_amax
        self._enabled, self._recipe = enabled, recipe
        self._before: Any = None

    def __enter__(self) -> "autocast":
        if self._before is not None:
            raise RuntimeError("autocast context manager cannot be entered more than once")
        self._before = (_STATE.enabled, _STATE.recipe, _STATE.is_first_fp8_module)
        _STATE.enabled, _STATE.recipe = self._enabled, self._recipe
        if _STATE.depth == 0:
            _STATE.is_first_fp8_module = True
        _STATE.depth += 1
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        _STATE.enabled, _STATE.recipe, _STATE.is_first_fp8_module = self._before
        self._before = None
        _STATE.depth -= 1
        if self._enabled and _STATE.depth == 0 and torch.is_grad_enabled():
            _update(_STATE.forward)


class Linear(nn.Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.fp8_meta: dict[str, _Tracked] = {}
        self.weight = nn.Parameter(
            torch.empty(out_features, in_features, device=device, dtype=params_dtype)
        )
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=params_dtype))
        else:
            self.bias = torch.empty(0, device=device, dtype=params_dtype)
        if device != "meta":
            nn.init.normal_(self.weight, std=0.023)

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Tensor:
        if not _STATE.enabled:
            raise AssertionError("te.Linear runs outside te.autocast")
        weight, bias = self.weight, self.bias if self.use_bias else None
        dtype = self._activation_dtype(inp)
        for x in (inp, weight):
            if math.prod(x.shape[:-1]) % 8 != 0 or x.shape[-1] % 16 != 0:
                raise ValueError(f"FP8 execution requires other dims than {list(x.size())}")
        if not isinstance(_STATE.recipe, DelayedScaling):
            return _Multiply.apply(weight, inp, bias, dtype, self, None)
        backward, first = self._record(inp, weight), False
        if torch.is_grad_enabled() and (inp.requires_grad or weight.requires_grad):
            first, _STATE.is_first_fp8_module = _STATE.is_first_fp8_module, False
        return _Multiply.apply(weight, inp, bias, dtype, self, (first, backward))

    def _activation_dtype(self, inp: Tensor) -> torch.dtype:
        if torch.is_autocast_enabled(inp.device.type):
            return torch.get_autocast_dtype(inp.device.type)
        for name, parameter in self.named_parameters():
            if parameter.dtype != inp.dtype:
                raise TypeError(
                    "Data types for parameters must match when outside of autocasted region. Found "
                    f"input dtype: {inp.dtype} and {name!r} dtype: {parameter.dtype}"
                )
        return inp.dtype

    @torch.no_grad()
    def _record(self, inp: Tensor, weight: Tensor) -> _Tracked:
        recipe, device = _STATE.recipe, inp.device
        assert isinstance(recipe, DelayedScaling)
        if not self.fp8_meta:
            for key, columns, tracked, maximum in (
                ("scaling_fwd", 3, _STATE.forward, recipe.fp8_format.value.max_fwd),
                ("scaling_bwd", 2, _STATE.backward, recipe.fp8_format.value.max_bwd),
            ):
                history = torch.zeros(recipe.amax_history_len, columns, device=device)
                scale = torch.ones(columns, device=device)
                self.fp8_meta[key] = _Tracked(history, scale, recipe, maximum)
                tracked.append(self.fp8_meta[key])
        forward, backward = self.fp8_meta["scaling_fwd"], self.fp8_meta["scaling_bwd"]
        for column, x in enumerate((inp, weight)):
            forward.amax_history[0, column] = x.abs().amax()
        return backward

    def get_fp8_meta_tensors(self) -> Any:
        if not self.fp8_meta:
            return None
        return {k: [v.scale.clone(), v.amax_history.clone()] for k, v in self.fp8_meta.items()}

    def reset_fp8_meta_tensors(self, fp8_meta_tensors: Any = None) -> None:
        for key, (scale, history) in fp8_meta_tensors.items():
            self.fp8_meta[key].scale.copy_(scale)
            self.fp8_meta[key].amax_history.copy_(history)

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None: ...


def _check_plain(x: Tensor) -> None:
    """The original hands it to C++, which asks for its storage."""
    if type(x) not in (Tensor, nn.Parameter):
        raise RuntimeError(f"Attempted to access the data pointer of a {type(x).__name__}")


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, inp: Tensor, bias: Any, dtype: Any, layer: Any, delayed: Any
    ) -> Tensor:
        _check_plain(inp)
        saved = inp if weight.requires_grad else inp.new_empty(0)
        ctx.save_for_backward(weight, saved)
        ctx.dtype, ctx.has_bias, ctx.delayed = dtype, bias is not None, delayed
        bias = None if bias is None else bias.to(dtype)
        with torch.autocast(inp.device.type, enabled=False):
            return F.linear(inp.to(dtype), weight.to(dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        weight, inp = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1])  # the original's first deed, too
        _check_plain(grad)
        if ctx.delayed is not None:
            first, tracked = ctx.delayed
            tracked.amax_history[0, 0] = grad.abs().amax()
            if first:
                _update(_STATE.backward)
        wants_weight, wants_input, wants_bias = ctx.needs_input_grad[:3]
        grad_weight = None
        if wants_weight:
            grad_weight = grad.flatten(0, -2).t() @ inp.to(ctx.dtype).flatten(0, -2)
        grad_input = grad @ weight.to(ctx.dtype) if wants_input else None
        return grad_weight, grad_input, grad.sum(0) if wants_bias else None, None, None, None


def is_fp8_available(return_reason: bool = False) -> Any:
    return (True, "") if return_reason else True


def is_mxfp8_available(return_reason: bool = False) -> Any:
    reason = "Device compute capability 10.0 or higher required for MXFP8 execution."
    return (False, reason) if return_reason else False


def is_fp8_block_scaling_available(return_reason: bool = False) -> Any:
    return (True, "") if return_reason else True
