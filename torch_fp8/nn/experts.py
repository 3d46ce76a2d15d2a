"""`Float8Experts`: a module of fused expert weights whose GEMMs run in FP8.

transformers stores the weights of all experts of a block in 3-D parameters, with flags on the
module for the layout: ``gate_up_proj`` (E, 2I, H), or ``up_proj`` (E, I, H) without a gate, and
``down_proj`` (E, H, I). Both are transposed if ``is_transposed``. There may be biases, and gate and
up may be interleaved, which the module's own ``_apply_gate`` handles. The module keeps its forward,
which transformers dispatches (`torch_fp8.nn.experts_dispatch`), and its Parameters.

The six GEMMs run in FP8. The router, its biases, and everything computed from its logits stay as
they are. A block whose gated activation has kernels is one autograd function
(`torch_fp8.nn.expert_block`). Other blocks, and blocks with adapters, have a function for each
layer (`torch_fp8.nn.grouped_linear_function`): backward recomputes the activation instead of saving
it, and the router's weights are multiplied in before the second GEMM. Autograd then saves one
payload per token and, for each of its experts, the first GEMM's output and the second's payload.

Legend: T tokens, k experts per token, R rows of all experts, E experts, H hidden, I expert width.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from torch_fp8.autograd.current_pass import is_transformed, saves_nothing
from torch_fp8.config import FP8Config
from torch_fp8.kernels.arguments import GateForm
from torch_fp8.nn import experts_dispatch
from torch_fp8.nn.expert_adapters import (
    Factors,
    multiply_factors,
    weight_and_factors,
    whole_weights,
)
from torch_fp8.nn.expert_block import expert_block
from torch_fp8.nn.expert_storage import ExpertsFP8
from torch_fp8.nn.frozen_storage import FrozenStorage
from torch_fp8.nn.grouped_linear_function import (
    GroupedOptions,
    RouteFunction,
    grouped_linear,
)
from torch_fp8.nn.trial_reads import Found, Recorder, computes_alike
from torch_fp8.ops.expert_gate import activation, split_gate
from torch_fp8.ops.moe_rows import Route, group_of_rows, moe_route
from torch_fp8.quantization.formats import GEMM_ALIGNMENT
from torch_fp8.quantization.recipe import Recipe, make_recipe
from torch_fp8.tensor.frozen_payload import FrozenPayload
from torch_fp8.tensor.lazy_quantized import plain
from torch_fp8.tensor.payload_cache import PayloadCache

OWN = ("fp8", "fp8_was_eager", "fp8_factors", "fp8_gate")
"""Attributes that conversion adds to a module of experts."""
_FLAGS = ("has_gate", "has_post_expert_norm")


def expert_recipe(config: FP8Config) -> Recipe:
    """Return the recipe of experts: E4M3 with a power-of-two scale for each row.

    The recipe of other layers does not matter, because the grouped GEMM takes no other scales.
    """
    return make_recipe("rowwise", wgrad=config.wgrad, fast_accum=config.fast_accum)


def fused_names(module: Any) -> tuple[str, str]:
    """Return the names of the two fused weights of a module of experts."""
    return "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj", "down_proj"


class Float8Experts(FrozenStorage):
    """Mixin of an expert module that runs its GEMMs in FP8; transformers calls it.

    Shapes: hidden_states (T, H), top_k_index and top_k_weights (T, k), output (T, H).
    """

    num_experts: int
    has_gate: bool
    has_bias: bool
    has_post_expert_norm: bool = False
    """Attribute that transformers 5.17 and earlier do not set."""
    is_transposed: bool
    act_fn: Any
    post_expert_norm: Any
    fp8_was_eager: bool
    fp8_factors: Mapping[str, Sequence[Factors]] | None = None
    """Adapters that are active in this forward, by the name of the weight."""
    fp8_gate: Found | None = None
    """Gated activation as a `GateForm`, with the attributes that the trial read, if kernels compute
    it; None if the module computes its own."""

    def configure(self, name: str, config: FP8Config, emulate: bool) -> None:
        """Run in FP8 from now on.

        Args:
            name: qualified name, for errors.
            config: configuration of the model, or of this module.
            emulate: whether GEMMs run through the reference path.
        """
        frozen = self.fp8.frozen if "fp8" in vars(self) else None
        caches = {key: PayloadCache(config.keep_eval_weights) for key in self.fp8_weight_names}
        self.fp8 = ExpertsFP8(name, config, expert_recipe(config), emulate, frozen, caches=caches)
        self.fp8_gate = find_gate(self)
        experts_dispatch.add(self)

    def run_recipe(self, recipe: Recipe, emulate: bool) -> None:
        """Set `emulate`; experts have only one recipe, frozen or not."""
        self.fp8.emulate = emulate

    def run_forward(self, recipe: Recipe) -> None:
        """Run `recipe`, which differs only in `bf16_forward`."""
        self._forget_caches()
        self.fp8.recipe = recipe

    @property
    def fp8_weight_names(self) -> tuple[str, str]:  # type: ignore[override]
        return fused_names(self)

    def fp8_experts_forward(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor | None:
        """Return the output (T, H), or None if this forward does not run in FP8."""
        if not self.runs_fp8 or (not torch.compiler.is_compiling() and is_transformed()):
            return None
        if self._counts():
            self.fp8.tokens.add(top_k_index)
        route = moe_route(top_k_index, self.num_experts)
        block = self._block(hidden_states, top_k_index, top_k_weights, route)
        if block is not None:
            return block
        first, second = self.fp8_weight_names
        rows = self._product(hidden_states, first, route, gather=True)
        score = F.pad(top_k_weights.reshape(-1), (0, 1))[route.slot][:, None]  # (R, 1)
        if self.has_post_expert_norm:
            rows = self._product(self._activated(rows, None), second, route)
            rows = self.post_expert_norm(rows) * score
        else:
            rows = self._product(self._activated(rows, score), second, route, score)
        rows = RouteFunction.apply(rows, route.token, route.row, False)  # (T, H)
        return rows.to(hidden_states.dtype)

    def _block(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, route: Route
    ) -> Tensor | None:
        """Return the output of `expert_block`, or None if it cannot compute this module.

        It needs a known gate, unchanged since the trial, FP8 wgrad, and no adapters.
        """
        gate, names = self.fp8_gate, self.fp8_weight_names
        if gate is None or self.fp8.recipe.wgrad is None or any((self.fp8_factors or {}).values()):
            return None
        are_whole = all(name in self._parameters for name in names)
        if not (are_whole and gate.reads.hold(self, self.fp8.name)):
            return None
        weights = [getattr(self, name) for name in names]
        biases = [getattr(self, f"{name}_bias") for name in names] if self.has_bias else None
        y = expert_block(
            *(hidden_states, weights, biases, route, top_k_weights, top_k_index),
            *(self._options(""), gate.spec),
        )
        return y.to(hidden_states.dtype)

    def _options(self, name: str) -> GroupedOptions:
        options = self.fp8.recipe, self.is_transposed, self.fp8.emulate
        if torch.compiler.is_compiling():
            return GroupedOptions("", *options)
        with_gradients = torch.is_grad_enabled()
        # The first pass of a reentrant checkpoint has no gradients but belongs to training.
        in_rollout = any(cache.in_scope for cache in self.fp8.caches.values())
        trains = with_gradients or (self.training and not in_rollout)
        caches = tuple(c for key, c in self.fp8.caches.items() if name in ("", key))
        observers = (self.fp8.observers or {}).items() if with_gradients else ()
        seen_by = tuple(observer for key, observer in observers if name in ("", key))
        shown = f"{self.fp8.name}.{name}".rstrip(".")
        return GroupedOptions(shown, *options, seen_by, caches, trains)

    def _counts(self) -> bool:
        """Return whether a monitor counts this forward's tokens; a checkpoint may run it twice."""
        if torch.compiler.is_compiling() or self.fp8.tokens is None:
            return False
        return torch.is_grad_enabled() and not saves_nothing()

    def _product(
        self,
        x: Tensor,
        name: str,
        route: Route,
        score: Tensor | None = None,
        *,
        gather: bool = False,
    ) -> Tensor:
        """Multiply by a weight, and add its bias (times `score`) if it has one: (R, N)."""
        y = self._grouped(x, name, route.offs, route if gather else None)
        if not self.has_bias:
            return y
        group = group_of_rows(route.offs, y.shape[0]).clamp(max=self.num_experts - 1)
        bias = getattr(self, f"{name}_bias")[group]
        return (y + (bias if score is None else bias * score)).to(y.dtype)

    def _grouped(self, x: Tensor, name: str, offs: Tensor, route: Route | None) -> Tensor:
        weight, adapters = weight_and_factors(self, name)
        y = grouped_linear(x, weight, offs, route, self._options(name))
        if not adapters:
            return y
        rows = plain(x).to(y.dtype)
        if route is not None:
            rows = RouteFunction.apply(rows, route.token, route.row, True)
        for factors in adapters:
            y = y + multiply_factors(rows, offs, factors, self.is_transposed)
        return y

    def _activated(self, rows: Tensor, score: Tensor | None) -> Tensor:
        """Apply the activation, times `score`; eager code recomputes it in backward."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return self._activate(rows, score)
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        return checkpoint(self._activate, rows, score, **options)

    def _activate(self, rows: Tensor, score: Tensor | None) -> Tensor:
        activated = self._apply_gate(rows) if self.has_gate else self.act_fn(rows)
        return activated if score is None else (activated * score).to(activated.dtype)

    def _hold(self, name: str, payload: FrozenPayload) -> None:
        self._forget_caches(name)
        super()._hold(name, payload)

    def _forget_caches(self, *names: str) -> None:
        for name, cache in self.fp8.caches.items():
            if name in names or not names:
                cache.forget()

    def train(self, mode: bool = True) -> "Float8Experts":
        for cache in self.fp8.caches.values() if mode else ():
            cache.forget()
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._forget_caches()  # device or dtype may change now
        return super()._apply(fn, recurse)

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        experts_dispatch.add(self)  # a copy or an unpickled module

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fp8={self.fp8.recipe}".removeprefix(", ")


class Float8BatchedExperts(Float8Experts):
    """Llama-4's experts, each of which computes every token; transformers does not dispatch them.

    Shapes: hidden_states (E * T, H), one expert's tokens after another's; output (E * T, H).
    """

    is_transposed = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        if not self.runs_fp8 or (not torch.compiler.is_compiling() and is_transformed()):
            with whole_weights(self):
                return super().forward(plain(hidden_states))
        first, second = self.fp8_weight_names
        num_experts, hidden = getattr(self, first).shape[0], hidden_states.shape[-1]
        x = hidden_states.reshape(num_experts, -1, hidden)  # (E, T, H)
        if self._counts():
            self.fp8.tokens.add_rows(x)
        tokens = x.shape[1]
        padded = -(-tokens // GEMM_ALIGNMENT) * GEMM_ALIGNMENT
        # (E, T, H) -> (E * T', H), T' a multiple of 16
        rows = F.pad(x, (0, 0, 0, padded - tokens)).reshape(-1, hidden)
        offs = torch.arange(1, num_experts + 1, device=x.device, dtype=torch.int32) * padded
        rows = self._activated(self._grouped(rows, first, offs, None), None)
        rows = self._grouped(rows, second, offs, None)
        rows = rows.view(num_experts, padded, rows.shape[-1])[:, :tokens]  # (E, T, H)
        return rows.reshape(-1, rows.shape[-1]).to(hidden_states.dtype)

    def _activate(self, rows: Tensor, score: Tensor | None) -> Tensor:
        gate, up = rows.chunk(2, dim=-1)
        return up * self.act_fn(gate)


def find_gate(module: Any) -> Found | None:
    """Return a module's gated activation, a `GateForm`, or None if it is unknown, or not gated.

    Args:
        module: module of experts whose `_apply_gate` maps (R, 2I) to (R, I).
    """
    if not getattr(module, "has_gate", False) or module.has_post_expert_norm:
        return None
    try:
        recorder = _recorder(module)
    except Exception:  # a class whose reads cannot be recorded
        return None
    form = next((form for form in _forms(module) if _agrees(recorder, form)), None)
    return None if form is None else recorder.found(form)


def _recorder(module: nn.Module) -> Recorder:
    children = {k: Recorder(child, {"training": True}) for k, child in module.named_children()}
    recorder = Recorder(module, {"training": True, **children})
    for name in _FLAGS:  # transformers 5.17 sets only the first
        if name in vars(module) or hasattr(recorder.cls, name):
            getattr(recorder.twin, name)
    return recorder


def _agrees(recorder: Recorder, form: GateForm) -> bool:
    """Return whether the module's own `_apply_gate` has this form, training or not."""

    def want(h: Tensor) -> Tensor:
        return activation(*split_gate(h, form), form)

    try:
        with _disable_current_modes():
            for training in (True, False):
                recorder.give("training", training)
                if not computes_alike(recorder.twin._apply_gate, want):
                    return False
    except Exception:  # it needs more than h
        return False
    return True


def _forms(module: Any) -> list[GateForm]:
    forms = [GateForm(interleaved) for interleaved in (False, True)]
    alpha, limit = getattr(module, "alpha", 1.0), getattr(module, "limit", None)
    if isinstance(limit, float | int) and isinstance(alpha, float | int) and limit > 0:
        forms += [GateForm(inter, True, float(alpha), float(limit)) for inter in (False, True)]
    return forms
