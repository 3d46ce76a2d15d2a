"""`ConversionReport`, the result of a conversion, and the start-up summary that it prints."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from torch_fp8.config import FP8Config
from torch_fp8.conversion.autotune import RecipeChoice
from torch_fp8.conversion.frozen_layers import NOTHING, FreezeReport
from torch_fp8.conversion.memory import expected_bytes_per_param
from torch_fp8.conversion.output_layers import loss_head_lines
from torch_fp8.nn.experts import expert_recipe
from torch_fp8.nn.frozen_storage import FrozenStorage
from torch_fp8.nn.layer_filter import (
    ADAPTER,
    QUANTIZED,
    expert_weights,
    experts_per_token,
    features,
    is_linear,
    stacked_weights,
)
from torch_fp8.nn.transformer_engine import version
from torch_fp8.ops.hardware import backend_name
from torch_fp8.optim.convert import OptimizerReport
from torch_fp8.quantization.recipe import Recipe
from torch_fp8.quantization.wording import by_reason, counted, first_of


class MatmulFlops(NamedTuple):
    """Multiply-adds per token of GEMMs with a weight, in forward and backward.

    Attributes:
        total: multiply-adds of all these GEMMs.
        fp8: multiply-adds of the GEMMs in FP8.
        experts: multiply-adds of fused experts that stay in high precision.
    """

    total: float
    fp8: float
    experts: float = 0.0


def matmul_flops(model: nn.Module) -> MatmulFlops:
    """Count the multiply-adds of a model: fprop and dgrad of each weight, wgrad if it is trained.

    Fused expert weights, with E first, count with the experts that compute a token if the module or
    the model's config gives their number (``top_k``, ``num_experts_per_tok``, ...), else with all.
    Attention's products have no weight and do not count.
    """
    total = fp8 = experts = 0.0
    for module in model.modules():
        in_fp8 = isinstance(module, FrozenStorage)
        for numel, trained, of_experts in _weights(model, module):
            total += (2 + trained) * numel
            if in_fp8:
                fp8 += (2 + (trained and module.fp8.recipe.wgrad is not None)) * numel
            elif of_experts:
                experts += (2 + trained) * numel
    return MatmulFlops(total, fp8, experts)


def _weights(model: nn.Module, module: nn.Module) -> Iterator[tuple[float, bool, bool]]:
    """Yield (multiply-adds per token, is trained, is of experts) of each weight of a module."""
    if is_linear(module):
        weight = module._parameters.get("weight")  # may be packed, or missing
        yield math.prod(features(module)), weight is not None and weight.requires_grad, False
        return
    of_experts = bool(expert_weights("", module))
    for key in stacked_weights("", module):
        parameter = module.get_parameter(key)
        active = experts_per_token(module, getattr(model, "config", None)) if of_experts else None
        share = min((active or len(parameter)) / len(parameter), 1.0)
        yield parameter.numel() * share, parameter.requires_grad, of_experts


_FASTER = 2.0
"""Largest speedup of an FP8 GEMM over a BF16 GEMM."""


_NEXT = (
    "  optimizer next: torch_fp8.convert_optimizer(optimizer, config, model=model) for 8-bit "
    "states and BF16 weights; until then both are unchanged"
)


class SkippedModule(NamedTuple):
    """A matrix product that stays in high precision: its qualified name and the reason."""

    name: str
    reason: str


@dataclass(frozen=True)
class ConversionReport:
    """The result of `torch_fp8.convert_to_float8`. ``str()`` of it is the start-up summary.

    Attributes:
        converted: qualified names of the linear layers that run in FP8.
        skipped: matrix products that stay in high precision, each with the reason.
        recipe: recipe of the converted modules; for ``auto``, the one that it chose.
        config: configuration that you passed.
        device: device on which the model will run.
        emulated: whether FP8 GEMMs run through the reference path on `device`.
        unused_skip: patterns of `config.skip` that match no module.
        flops: multiply-adds of the model's GEMMs, per token.
        producers: qualified names of the norms and gated MLPs that emit FP8.
        choice: measurement behind the recipe of ``auto``, or None for a named recipe.
        frozen: layers whose weights are stored as FP8 only.
        num_liger: number of modules that Liger Kernel computes, such as MLPs with GELU.
        num_liger_fused: number of its norms and gated MLPs that run as `producers` instead.
        overridden: recipes of the layers with `config.overrides`, by qualified name.
        unused_overrides: patterns of `config.overrides` that match no module.
        unfused: qualified names of norms and gated MLPs that return plain tensors because the
            layers that read them cast differently.
        smooth: qualified names of the layers whose input has one scale per channel (Smooth-SwiGLU).
        experts: qualified names of the fused expert weights that run in FP8.
        were_eager: whether these experts ran as a Python loop before the conversion.
        loss_heads: how the loss of output layers is computed without logits in memory, ``bf16``,
            ``fp8``, ``liger`` (Liger Kernel) or ``trl`` (TRL), by qualified name.
        groups: qualified names of the layers that read one input and share the products of their
            backward, one tuple for each group.
    """

    converted: tuple[str, ...]
    skipped: tuple[SkippedModule, ...]
    recipe: Recipe
    config: FP8Config
    device: torch.device
    emulated: bool
    unused_skip: tuple[str, ...]
    flops: MatmulFlops
    producers: tuple[str, ...] = ()
    choice: RecipeChoice | None = None
    frozen: FreezeReport = NOTHING
    num_liger: int = 0
    num_liger_fused: int = 0
    overridden: Mapping[str, Recipe] = field(default_factory=dict)
    unused_overrides: tuple[str, ...] = ()
    unfused: tuple[str, ...] = ()
    smooth: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    were_eager: bool = False
    loss_heads: Mapping[str, str] = field(default_factory=dict)
    groups: tuple[tuple[str, ...], ...] = ()

    @property
    def flops_share(self) -> float:
        """Share (0 to 1) of the FLOPs of GEMMs with a weight, forward and backward, in FP8."""
        return self.flops.fp8 / self.flops.total

    @property
    def delayed(self) -> bool:
        """Whether any layer computes its scales from amaxes of past steps."""
        delayed = any(recipe.delayed for recipe in (self.recipe, *self.overridden.values()))
        return delayed or self.config.graph_scales == "last_step"

    @property
    def adapters(self) -> tuple[str, ...]:
        """Qualified names of linear layers of adapters, which stay in high precision."""
        return tuple(name for name, reason in self.skipped if reason == ADAPTER)

    @property
    def num_layers(self) -> int:
        """Number of linear layers and fused expert weights in the model, without adapters."""
        return self.num_converted + len(self.skipped) - len(self.adapters)

    @property
    def num_converted(self) -> int:
        """Number of linear layers and fused expert weights that run in FP8."""
        return len(self.converted) + len(self.experts)

    def summary(
        self,
        model: nn.Module | None = None,
        optimizers: Iterable[torch.optim.Optimizer] = (),
        optimizer_reports: Iterable[OptimizerReport] | None = None,
        communication: object | None = None,
    ) -> str:
        """Return the start-up summary, a text of several lines.

        Args:
            model: model for the line about bytes per parameter, or None without such a line.
            optimizers: optimizers that train it, as far as they are known.
            optimizer_reports: reports of `torch_fp8.convert_optimizer`, or None if it was not
                called yet, which the summary mentions at O2 and O3.
            communication: report about traffic between ranks, from `torch_fp8.distributed`, or None
                in a single process.
        """
        lines = list(self._lines())
        if self.config.opt_level != "O1":
            if optimizer_reports is None:
                lines.append(_NEXT)
            lines += [f"  optimizer {report}" for report in optimizer_reports or ()]
        if communication is not None:
            lines.append(f"  ranks     {communication}")
        if self.config.monitor:
            c = self.config
            lines.append(f"  monitor   every {c.monitor} steps; on an alarm: {c.on_alarm}")
        if model is not None:
            lines.append(f"  memory    {expected_bytes_per_param(model, optimizers)}")
        return "\n".join(lines)

    def _lines(self) -> Iterator[str]:
        """Yield what runs in FP8, how, and what does not."""
        chosen = "auto -> " if self.config.recipe == "auto" else ""
        backend = backend_name(self.device, self.emulated)
        if self.config.backend == "transformer-engine":
            backend = backend.replace("torch scaled_mm", f"Transformer Engine {version()}")
        yield (
            f"FP8: {self.num_converted} of {counted(self.num_layers, 'linear layer')}, "
            f"{100 * self.flops_share:.1f} % of the matmul FLOPs, level {self.config.opt_level}"
        )
        yield f"  recipe    {chosen}{self.recipe}"
        if self.choice is not None:
            label = "measured" if self.choice.not_measured is None else "auto"
            yield f"  {label:<9} {self.choice}"
        overridden = ((name, str(recipe)) for name, recipe in self.overridden.items())
        for recipe, names in by_reason(overridden).items():
            yield f"  override  {first_of(names)}: {recipe}"
        yield f"  GEMMs     {backend}"
        yield from self._producer_lines()
        if self.experts:
            yield (
                f"  experts   {counted(len(self.experts), 'fused weight')} in FP8 grouped GEMMs, "
                f"{expert_recipe(self.config)}"
            )
        if self.experts and self.were_eager:
            yield "  experts   experts_implementation was 'eager' and is now 'grouped_mm'"
        yield from loss_head_lines(self.loss_heads, self.config)
        if self.frozen.frozen:
            yield f"  frozen    {self.frozen}"
        yield from self._high_precision_lines()
        skipped = [s for s in self.skipped if s.reason != ADAPTER and not _is_foreign(s.reason)]
        for reason, names in by_reason(skipped).items():
            yield f"  skipped   {first_of(names)}: {reason}"
        unused = {"skip pattern(s)": self.unused_skip}
        unused["pattern(s) of overrides"] = self.unused_overrides
        for noun, patterns in unused.items():
            if patterns:
                yield f"  warning   {noun} {', '.join(map(repr, patterns))} match no module"

    def _producer_lines(self) -> Iterator[str]:
        """Yield what norms and gated MLPs emit, and the layers with a scale for each channel."""
        if self.producers:
            number = len(self.producers)
            noun = "norm or gated MLP" if number == 1 else "norms and gated MLPs"
            storage = "in FP8" if self.config.save_activations == "fp8" else "unchanged"
            yield (
                f"  fused     {number} {noun} with FP8 outputs; tensors for backward are saved "
                f"{storage}"
            )
        if self.num_liger_fused:
            yield f"  liger     {self.num_liger_fused} of these run in place of Liger Kernel's"
        if self.groups:
            sizes = Counter(map(len, self.groups))
            groups = ", ".join(
                f"{counted(number, 'group')} of {size}" for size, number in sorted(sizes.items())
            )
            yield f"  grouped   {groups} layers that read one input: one dgrad, one wgrad each"
        if self.unfused:
            yield (
                f"  not fused {first_of(self.unfused)}: the layers that read it have different "
                "recipes, so each casts its own input"
            )
        if self.num_liger:
            yield (
                f"  liger     {counted(self.num_liger, 'module')} of Liger Kernel, whose outputs "
                "are in high precision; the linear layers cast them"
            )
        if self.smooth:
            yield (
                f"  smooth    {len(self.smooth)} down projections of gated MLPs, with one scale "
                "per channel; their weights are cast again in each forward"
            )
        elif self.config.smooth_swiglu:
            yield (
                "  warning   smooth_swiglu=True changes nothing: no gated MLP was found whose down "
                "projection runs in FP8"
            )

    def _high_precision_lines(self) -> Iterator[str]:
        """Describe layers that another library quantized, adapters, and fused experts that stay in
        high precision with their effect on speed; one line each.
        """
        libraries = Counter(r.removeprefix(QUANTIZED) for _, r in self.skipped if _is_foreign(r))
        for library, count in libraries.items():
            yield (
                f"  quantized {counted(count, 'layer')} by {library}, which runs them as it does "
                "without FP8; to run this base in FP8, load a checkpoint in BF16 or FP8 without "
                "this quantization"
            )
        if self.adapters:
            yield (
                f"  adapters  {counted(len(self.adapters), 'linear layer')} of LoRA or another "
                "adapter, in high precision"
            )
        if self.flops.experts:
            of_all = 100 * self.flops.experts / self.flops.total
            faster = 1 / (1 - self.flops_share * (1 - 1 / _FASTER))
            yield (
                f"  experts   {of_all:.1f} % of the matmul FLOPs are in fused experts that stay in "
                "high precision: even if FP8 doubles a GEMM's speed, all GEMMs together are only "
                f"{faster:.2f} times as fast"
            )

    __str__ = summary


def _is_foreign(reason: str) -> bool:
    return reason.startswith(QUANTIZED)
