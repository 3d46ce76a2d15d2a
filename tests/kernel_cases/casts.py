"""Cases of casts: bytes and scales equal to the reference's, in both layouts.

A `CastKernel` is `torch_fp8.kernels.quantize.quantize_2d`, or what stands for it.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from tests.internals import E4M3, CastOptions, Granularity, Layouts, tensor_amax
from tests.kernel_cases.comparison import require, same_bits, same_values
from torch_fp8.ops.quantize import quantize_2d, quantize_layouts_and_sum
from torch_fp8.ops.side_by_side import cast_side_by_side
from torch_fp8.ops.transpose import transposed_bytes

CastKernel = Callable[..., Any]
Shape = tuple[int, int]

FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
GRANULARITIES: tuple[Granularity, ...] = (
    "tensorwise",
    "rowwise",
    "block_1x128",
    "block_128x128",
    "block_1x32",
)
SHAPES = ((1, 1), (37, 131), (129, 4096), (512, 272), (3, 20000), (0, 48), (17, 272))
ALL_LAYOUTS_OF = (129, 4096)
"""The shape with which each single layout and each input dtype is tried: each is a compilation."""
CHOICES = ((torch.float8_e4m3fn, False), (torch.float8_e4m3fn, True), (torch.float8_e5m2, False))
KNOWN_SCALES = (0.37, 2.0**-120, float("inf"))
BOTH = ((True, True),)
EACH = ((True, True), (True, False), (False, True))
KINDS = (
    "gaussian",
    "row spread",
    "zeros",
    "denormal",
    "tiny",
    "huge",
    "inf",
    "nan",
    "range",
    "boundaries",
)


def kernel() -> CastKernel:
    from tests.internals import kernels_quantize as quantize

    return quantize.quantize_2d


def transpose_kernel() -> CastKernel:
    from tests.internals import transpose

    return transpose.transposed_bytes


def side_by_side_kernel() -> CastKernel:
    """Return the kernel that casts weights into one transposed payload."""
    from tests.internals import kernels_side_by_side

    return kernels_side_by_side.cast_side_by_side


def joining_kernel() -> CastKernel:
    """Return the kernel that casts gradients side by side."""
    from tests.internals import kernels_side_by_side

    return kernels_side_by_side.quantize_joined


def beside_kernel() -> CastKernel:
    from tests.internals import quantize_beside

    return quantize_beside.quantize_2d_beside


def matrix(kind: str, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Return rows of every size, edges of float32, and values on the rounding boundaries of FP8."""
    generator = torch.Generator().manual_seed(
        KINDS.index(kind) * 1000 + SHAPES.index(shape) if shape in SHAPES else 1
    )
    x = torch.randn(shape, generator=generator)
    if kind == "row spread":
        x *= 2.0 ** torch.randint(-8, 9, (shape[0], 1), generator=generator)
    elif kind == "zeros":
        x[:, : shape[1] // 2] = 0
        x[: shape[0] // 3] = -0.0
    elif kind == "denormal":
        x *= 1e-40
    elif kind == "tiny":
        x *= 1e-33
    elif kind == "huge":
        x *= 1e37
    elif kind == "range":  # quotients that underflow float32
        x *= 10.0 ** torch.randint(-40, 38, shape, generator=generator)
    elif kind in ("inf", "nan") and x.numel():
        x[-1, -1] = float(kind)
    elif kind == "boundaries":
        steps = torch.randint(-480, 481, shape, generator=generator) / 16.0
        x = steps * 2.0 ** torch.randint(-6, 4, shape, generator=generator)
        if x.numel():
            x[..., 0], x[0] = E4M3.max, E4M3.max
    return x.to(dtype)


def reference(x: Tensor, options: CastOptions) -> Layouts:
    power_of_two = options.power_of_two or options.granularity == "block_1x32"
    return quantize_2d.reference(x, options._replace(power_of_two=power_of_two))


def check_cast(
    cast: CastKernel,
    device: str,
    granularity: str,
    kind: str,
    shapes: Iterable[Shape] = SHAPES,
    choices: Iterable[tuple[torch.dtype, bool]] = CHOICES,
    thorough: Shape = ALL_LAYOUTS_OF,
) -> None:
    """Check bit for bit; every dtype and both single layouts with the shape `thorough`."""
    shapes = tuple(shapes)
    sources = [(shape, torch.bfloat16) for shape in shapes]
    if thorough in shapes:
        sources += [(thorough, torch.float16), (thorough, torch.float32)]
    for (shape, source), (dtype, power_of_two) in itertools.product(sources, choices):
        x = matrix(kind, shape, source)
        layouts = EACH if source == torch.bfloat16 and shape == thorough else BOTH
        both = CastOptions(dtype, granularity, power_of_two, True, True)
        want, by_tensor = reference(x, both), granularity == "tensorwise"
        for row, col in layouts:
            made = cast(x.to(device), both._replace(rowwise=row, columnwise=col))
            for got, expected, wanted in zip(
                made, want, (row, row or by_tensor, col, col), strict=True
            ):
                what = f"{granularity} {dtype} of {shape} {source}, {kind}"
                if wanted and kind == "range":  # a last bit of a denormal decides a zero's sign
                    same_values(got, expected, what)
                elif wanted:
                    same_bits(got, expected, what)
                else:
                    require(got is None, f"{what}: made what was not asked for")


def check_transpose(transpose: CastKernel, device: str, shapes: Iterable[Shape] = SHAPES) -> None:
    """Check that the bytes of a payload are transposed, with zeros behind them."""
    for rows, cols in shapes:
        generator = torch.Generator().manual_seed(rows)
        codes = torch.randint(0, 256, (rows, cols), generator=generator).to(torch.uint8)
        for columns in {rows, -(-rows // 16) * 16}:
            made = transpose(codes.to(device).view(torch.float8_e4m3fn), columns)
            expected = transposed_bytes.reference(codes, columns)
            same_bits(made.view(torch.uint8), expected, f"transpose of {(rows, cols)}")


BESIDE = ((144, 272, 160), (137, 272, 160), (16, 48, 400), (37, 131, 16), (16, 16, 24))
"""Rows and columns of a gradient, and of columns of the weight: one launch, or two of odd sizes."""


def check_side_by_side(cast: CastKernel, device: str) -> None:
    """Check up to three matrices of other sizes, whichever of them has the largest scale."""
    sizes = (144, 128, 16)
    for number, dtype, first in itertools.product((1, 2, 3), FORMATS, range(3)):
        weights = [matrix("range", (rows, 272), torch.bfloat16) for rows in sizes[:number]]
        scales = [torch.tensor(0.37 + (i == first)) for i in range(number)]
        more = [None] * (3 - number)
        arguments = [*weights, *more, *scales, *more]
        want, scale = cast_side_by_side.reference(*arguments, dtype, None)
        moved = [None if t is None else t.to(device) for t in arguments]
        got, used = cast(*moved, dtype, None)
        same_bits(used, scale, f"scale of {number}")
        same_bits(got, want, f"{dtype} of {number} matrices")


def check_joined(cast: CastKernel, device: str) -> None:
    """Check two and three matrices of other widths, in each layout, and the slot."""
    for number, dtype, layouts in itertools.product(
        (2, 3), FORMATS, ((True, True), (True, False), (False, True))
    ):
        parts = [matrix("range", (150, cols), torch.bfloat16) for cols in (144, 128, 16)[:number]]
        options = CastOptions(dtype, "tensorwise", False, *layouts, torch.tensor(0.37))
        slot = torch.tensor(0.01).to(device)
        on_card = options._replace(scale=torch.tensor(0.37).to(device), amax=slot)
        made = cast(*(x.to(device) for x in parts), *[None] * (3 - number), on_card)
        for got, want in zip(made, reference(torch.cat(parts, 1), options), strict=True):
            if got is not None or want is not None:
                same_bits(got, want, f"{dtype} of {number} matrices side by side")
        same_bits(slot, tensor_amax(torch.cat(parts, 1)), "slot of matrices side by side")


def check_beside(beside: CastKernel, device: str) -> None:
    """Check a cast, with each source of its scale, and the transpose of a payload beside it."""
    for (rows, cols, width), dtype, col in itertools.product(BESIDE, FORMATS, (True, False)):
        x = matrix("row spread", (rows, cols), torch.bfloat16)
        codes = torch.arange(cols * width).view(cols, width).remainder(251).to(torch.uint8)
        plain = CastOptions(dtype, "tensorwise", False, True, col)
        given, slot = torch.tensor(0.37), torch.tensor(0.01)
        for options in (plain, plain._replace(amax=tensor_amax(x)), plain._replace(scale=given)):
            what = f"{dtype} of {(rows, cols)} beside {(cols, width)}, {options.scale}"
            raised = options if options.scale is None else options._replace(amax=slot.clone())
            moved = (None if t is None else t.to(device) for t in (raised.scale, raised.amax))
            on_card = CastOptions(*raised[:5], *moved)
            payload = codes.to(device).view(torch.float8_e4m3fn)
            *made, transposed = beside(x.to(device), on_card, payload)
            for got, want in zip(made, reference(x, options), strict=True):
                require((got is None) == (want is None), f"{what}: another layout")
                if got is not None:
                    same_bits(got, want, what)
            same_bits(transposed.view(torch.uint8), codes.t().contiguous(), f"{what}: transpose")
            if options.scale is not None:
                same_bits(on_card.amax, tensor_amax(x), f"{what}: slot")


def check_known_scale(
    cast: CastKernel, device: str, kind: str, shapes: Iterable[Shape] = SHAPES
) -> None:
    """Check a tensorwise cast with a given scale, also beside a slot, and with a given amax."""
    for shape, dtype, value in itertools.product(shapes, FORMATS, KNOWN_SCALES):
        x, scale = matrix(kind, shape, torch.bfloat16), torch.tensor(value)
        what = f"{dtype} of {shape} with scale {value}, {kind}"
        options = CastOptions(dtype, "tensorwise", False, True, True)
        want = reference(x, options._replace(scale=scale))
        made = cast(x.to(device), options._replace(scale=scale.to(device)))
        same_bits(made[0], want[0], what)
        same_bits(made[2], want[2], what)
        if value == 0.37:
            check_slot(cast, x, options._replace(scale=scale), device, what)
        made = cast(x.to(device), options._replace(amax=tensor_amax(x).to(device)))
        for got, expected in zip(made, reference(x, options), strict=True):
            same_bits(got, expected, f"{what}, with amax")


def check_slot(cast: CastKernel, x: Tensor, options: CastOptions, device: str, what: str) -> None:
    """Check that a cast raises its slot to the amax of x, and makes the bytes that it makes without
    one.

    Args:
        options: with a scale.
    """
    scale, want = options.scale, reference(x, options)
    assert scale is not None
    for before in (0.0, 1e30, float("nan")):
        slot = torch.tensor(before, device=device)
        made = cast(x.to(device), options._replace(scale=scale.to(device), amax=slot))
        for got, expected in zip(made, want, strict=True):
            same_bits(got, expected, f"{what}, beside a slot of {before}")
        expected = torch.maximum(torch.tensor(before), tensor_amax(x))
        same_bits(slot, expected, f"{what}: slot of {before}")


def check_sums(
    device: str,
    granularity: Granularity,
    shape: Shape = (5000, 1040),
    kind: str = "row spread",
    transposed: bool = False,
) -> None:
    """Check the bias gradient that a cast adds up: exact but for float32, and repeatable."""
    x = matrix(kind, shape, torch.bfloat16)
    x = x.t() if transposed else x
    options, slot = CastOptions(E4M3.dtype, granularity, False, True, True), torch.tensor(0.0)
    _check_sums(x, options, device)
    if granularity == "tensorwise":
        options, slot = options._replace(scale=torch.tensor(0.37)), slot.to(device)
        _check_sums(x, options._replace(amax=slot), device)
        same_bits(slot, tensor_amax(x), "slot of a cast with sums")


def _check_sums(x: Tensor, options: CastOptions, device: str) -> None:
    scale = None if options.scale is None else options.scale.to(device)
    moved, how = x.to(device), options._replace(scale=scale)
    (payloads, first), (_, second) = (
        quantize_layouts_and_sum(moved, how, torch.float32) for _ in range(2)
    )
    granularity, without = options.granularity, options._replace(amax=None)
    same_bits(first, second.cpu(), f"{granularity}: sums from run to run")
    require_sums(first, x, granularity)
    for made, want in zip(payloads, reference(x, without)[::2], strict=True):
        assert made is not None
        same_bits(made.qdata, want, f"{granularity} payload beside its sums")


def require_sums(sums: Tensor, x: Tensor, what: str) -> None:
    """Require sums over the rows of x within float32's error; NaN where x has one."""
    exact, size = x.double().sum(0), x.double().abs().sum(0)
    right = (sums.cpu() - exact).abs() <= size * len(x) * 2.0**-24
    require((right | (sums.cpu().isnan() & exact.isnan())).all(), f"{what}: sums are too far off")


def check_total(device: str) -> None:
    from tests.internals import TileSums

    x, sums = matrix("row spread", (200, 33), torch.float32), TileSums()
    sums.allocate(x.to(device), len(x)).copy_(x)
    require_sums(sums.total(x.to(device), torch.float32), x, "sums of many tiles")


def check_strides(cast: CastKernel, device: str, granularity: str) -> None:
    base = matrix("row spread", (150, 260), torch.bfloat16)
    on_device = base.to(device)
    for x in (base.t(), base[::2, 1:130], base[:, ::3], base[:1].expand(40, 260)):
        moved = on_device.as_strided(x.shape, x.stride(), x.storage_offset())
        options = CastOptions(E4M3.dtype, granularity, False, True, True)
        for got, expected in zip(cast(moved, options), reference(x, options), strict=True):
            same_bits(got, expected, f"{granularity} of strides {x.stride()}")
