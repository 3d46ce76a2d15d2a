"""Recipes: format, granularity and scaling of both operands of the three GEMMs.

A linear layer with input x (M, K), weight w (N, K) and gradient g (M, N) runs three GEMMs, all with
both operands contracted along their last dimension, as Hopper's FP8 tensor cores want them:

    fprop   y  = x   w^T      contracts K: x (M, K) and w (N, K)
    dgrad   dx = g   (w^T)^T  contracts N: g (M, N) and w^T (K, N)
    wgrad   dw = g^T (x^T)^T  contracts M: g^T (N, M) and x^T (K, M)

So each tensor is needed in two layouts. Both have the same cast, so that one read serves both.

Granularity, the elements that share a scale:

    tensorwise      the tensor
    rowwise         a row along the contraction dimension
    block_1x128     128 elements along the contraction dimension
    block_128x128   a square of 128 rows by 128 columns
    block_1x32      32 elements along the contraction dimension, scale a power of two (E8M0)
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch_fp8.quantization.formats import E4M3, E5M2, FORMATS, Format

Granularity = Literal["tensorwise", "rowwise", "block_1x128", "block_128x128", "block_1x32"]
GEMMS = ("fprop", "dgrad", "wgrad")


class CastSpec(NamedTuple):
    """The cast of one operand to FP8.

    Attributes:
        format: E4M3 or E5M2.
        granularity: elements that share a scale.
        delayed: whether the scale comes from a history of amaxes instead of the current tensor.
        power_of_two: whether the scale is rounded up to a power of two.
    """

    format: Format
    granularity: Granularity
    delayed: bool = False
    power_of_two: bool = False

    def __str__(self) -> str:
        return f"{self.format.name} {self.granularity}{' delayed' if self.delayed else ''}"


@dataclass(frozen=True)
class Gemm:
    """One FP8 GEMM: the casts of operands a and b, and whether it uses fast accumulation.

    `fast_accum` lets Hopper keep partial sums in the tensor core's own, narrower accumulator.
    """

    a: CastSpec
    b: CastSpec
    fast_accum: bool = False


@dataclass(frozen=True)
class Recipe:
    """The three GEMMs of a linear layer; `wgrad` None runs in high precision (SwitchBack).

    fprop: a = input, b = weight. dgrad: a = grad_output, b = weight. wgrad: a = grad_output,
    b = input. With `smooth`, fprop's input and weight are cast with one scale per channel, computed
    from the current tokens (`torch_fp8.ops.smooth`). With `bf16_forward`, fprop runs in BF16, and
    its casts are those of backward (`torch_fp8.nn.bf16_forward`).
    """

    name: str
    fprop: Gemm
    dgrad: Gemm
    wgrad: Gemm | None
    smooth: bool = False
    bf16_forward: bool = False

    @property
    def input(self) -> CastSpec:
        return self.fprop.a

    @property
    def weight(self) -> CastSpec:
        return self.fprop.b

    @property
    def grad_output(self) -> CastSpec:
        return self.dgrad.a

    @property
    def delayed(self) -> bool:
        return self.fprop.a.delayed

    @property
    def gemms(self) -> tuple[Gemm, ...]:
        return tuple(g for g in (self.fprop, self.dgrad, self.wgrad) if g is not None)

    def __str__(self) -> str:
        casts = f"input {self.input}, weight {self.weight}, grad_output {self.grad_output}"
        smooth = ", smooth input" if self.smooth else ""
        forward = ", forward bf16" if self.bf16_forward else ""
        wgrad = ", wgrad bf16" if self.wgrad is None else ""
        return f"{self.name}: {casts}{wgrad}{smooth}{forward}"


_TENSOR = CastSpec(E4M3, "tensorwise")
_DELAYED = CastSpec(E4M3, "tensorwise", delayed=True)
_ROW = CastSpec(E4M3, "rowwise", power_of_two=True)
_BLOCK = CastSpec(E4M3, "block_1x128", power_of_two=True)
_SQUARE = CastSpec(E4M3, "block_128x128", power_of_two=True)
_MX = CastSpec(E4M3, "block_1x32", power_of_two=True)

# name -> casts of (input, weight, grad_output). The sources, in order: torchao's float8 tensorwise;
# Transformer Engine's DelayedScaling (HYBRID); torchao's rowwise, whose power-of-two scales make
# the same value in two layouts differ less; DeepSeek-V3 (arXiv 2412.19437) with Transformer
# Engine's power-of-two scales; OCP MX with the scale's exponent rounded up (arXiv 2506.08027).
_PRESETS: dict[str, tuple[CastSpec, CastSpec, CastSpec]] = {
    "tensorwise": (_TENSOR, _TENSOR, _TENSOR._replace(format=E5M2)),
    "delayed": (_DELAYED, _DELAYED, _DELAYED._replace(format=E5M2)),
    "rowwise": (_ROW, _ROW, _ROW),
    "blockwise": (_BLOCK, _SQUARE, _BLOCK),
    "mxfp8": (_MX, _MX, _MX),
}
RECIPES = tuple(_PRESETS)
E4M3_ONLY = ("blockwise", "mxfp8")
"""Recipes without E5M2 gradients: block-scaled GEMMs multiply E4M3 with E4M3."""

SAVE_FORMATS = {
    "fine-grained": ("blockwise",),
    "compressed-tensors": ("tensorwise", "rowwise", "blockwise", "mxfp8"),
    "modelopt": ("delayed",),
}
"""Formats of exported FP8 checkpoints, with the recipes that each can express."""


def make_recipe(
    name: str,
    *,
    wgrad: str = "fp8",
    grad_format: str | None = None,
    fast_accum: tuple[str, ...] = ("fprop",),
    power_of_two_weights: bool = False,
) -> Recipe:
    """Return the recipe of this name, with its options applied.

    Args:
        name: one of `RECIPES`.
        wgrad: ``"fp8"``, or ``"bf16"`` for the weight gradient in high precision, because its
            inner dimension, tokens, is the longest (SwitchBack, arXiv 2304.13013).
        grad_format: ``"e4m3"`` or ``"e5m2"`` for grad_output, or None for that of the recipe.
        fast_accum: names of the GEMMs that accumulate fast.
        power_of_two_weights: whether to round the scales of weights up to powers of two, as the
            finer recipes do, so that they rarely change in an optimizer step.
    """
    input, weight, grad_output = _PRESETS[name]
    if power_of_two_weights:
        weight = weight._replace(power_of_two=True)
    if grad_format is not None:
        grad_output = grad_output._replace(format=FORMATS[grad_format])
    if input.granularity.startswith("block_"):
        fast_accum = ()  # promoted to float32 after every block
    return Recipe(
        name,
        fprop=Gemm(input, weight, "fprop" in fast_accum),
        dgrad=Gemm(grad_output, weight, "dgrad" in fast_accum),
        wgrad=Gemm(grad_output, input, "wgrad" in fast_accum) if wgrad == "fp8" else None,
    )
