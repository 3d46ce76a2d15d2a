"""Cases of calls that are played: the bytes that the launcher makes and writes of the same tensors.

See `torch_fp8.kernels.launch_tape`. The first two calls go to the launcher, the third is played.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.internals import (
    E4M3,
    E5M2,
    REPLAYS,
    BackwardInputs,
    CastOptions,
    NormBackwardInputs,
    NormInputs,
    NormWithRstd,
    Replayed,
)
from tests.kernel_cases.comparison import require, same_bits

BF16 = torch.bfloat16
GRANULARITIES = ("tensorwise", "rowwise", "block_1x128", "block_128x128", "block_1x32")
ODD = (48, 40)
"""Columns that are moved one by one."""
SHAPES = ((3, 144), (80, 144), ODD)
"""One tile holds the first, not the second."""


class Call(NamedTuple):
    """A call of an operator's launcher.

    Attributes:
        name: of the case.
        launcher: as the operator calls it on CUDA.
        arguments: of the launcher; functions among them make a new one for each call.
    """

    name: str
    launcher: Callable[..., Any]
    arguments: tuple[Any, ...]

    def make(self) -> tuple[Any, ...]:
        return tuple(a() if callable(a) else a for a in self.arguments)


def cast(granularity: str, **how: Any) -> CastOptions:
    """Return options of a cast to E4M3, in both layouts unless told otherwise."""
    wanted = {"rowwise": True, "columnwise": True} | how
    return CastOptions(E4M3.dtype, granularity, granularity == "block_1x32", **wanted)


class Arguments:
    def __init__(self, rows: int, cols: int, device: str) -> None:
        self.rows, self.cols, self.device = rows, cols, device

    def x(self) -> Tensor:
        return torch.randn(self.rows, self.cols, device=self.device).to(BF16)

    def turned(self) -> Tensor:
        return self.x().t()

    def codes(self) -> Tensor:
        return self.x().to(E4M3.dtype)

    def positive(self, *shape: int) -> Tensor:
        return torch.rand(shape, device=self.device) + 4

    def channels(self) -> Tensor:
        return self.positive(self.cols)

    def scaled(self) -> CastOptions:
        return cast("tensorwise", scale=self.positive())._replace(dtype=E5M2.dtype)

    def known(self, *shape: int) -> CastOptions:
        return cast("tensorwise", amax=self.positive(*shape))

    def raising(self) -> CastOptions:
        """Return a cast whose slot is zero, or where it lies larger than any value."""
        return self.scaled()._replace(amax=100 * torch.rand((), device=self.device).round())

    def norm(self) -> NormInputs:
        return NormInputs(self.x(), self.channels().to(BF16), 1e-5, 0.0, BF16)

    def known_norm(self) -> NormWithRstd:
        return self.norm().with_rstd(self.positive(self.rows))

    def norm_backward(self) -> NormBackwardInputs:
        x, weight, rstd, offset, _ = self.known_norm()
        return NormBackwardInputs(self.x(), x, None, weight, rstd, offset, BF16, True)

    def backward(self, saved: bool) -> BackwardInputs:
        if not saved:
            return BackwardInputs(self.x(), self.x(), None, self.x(), None, BF16)
        from tests.internals import quantize_2d

        how = cast("block_1x128", columnwise=False)
        (gate, gate_scale, *_), (up, up_scale, *_) = (quantize_2d(self.x(), how) for _ in range(2))
        assert gate is not None
        assert up is not None
        return BackwardInputs(self.x(), gate, gate_scale, up, up_scale, BF16)


def calls(rows: int, cols: int, device: str) -> Iterator[Call]:
    made = Arguments(rows, cols, device)
    yield from _of_casts(made)
    yield from _of_norms(made)
    yield from _of_products(made)
    yield from _of_gradients(made)


def _of_casts(made: Arguments) -> Iterator[Call]:
    from tests.internals import quantize_2d, quantize_2d_beside, quantize_2d_sum, transposed_bytes

    for g in GRANULARITIES:
        yield Call(f"cast {g}", quantize_2d, (made.x, cast(g)))
        yield Call(f"cast {g}, rows", quantize_2d, (made.x, cast(g, columnwise=False)))
    yield Call("cast transposed", quantize_2d, (made.turned, cast("tensorwise")))
    yield Call("cast with a scale", quantize_2d, (made.x, made.scaled))
    yield Call("cast with a slot", quantize_2d, (made.x, made.raising))
    yield Call("cast with an amax", quantize_2d, (made.x, made.known))
    for g in ("tensorwise", "rowwise", "block_1x128"):
        yield Call(f"cast and sum {g}", quantize_2d_sum, (made.x, cast(g), BF16))
    yield Call("cast and sum with a slot", quantize_2d_sum, (made.x, made.raising, BF16))
    yield Call("transpose", transposed_bytes, (made.codes, -(-made.rows // 16) * 16))
    yield Call("cast beside a transpose", quantize_2d_beside, (made.x, made.raising, made.codes))


def _of_norms(made: Arguments) -> Iterator[Call]:
    from tests.internals import kernels_rms_norm as rms_norm

    once = rms_norm.rms_norm_quantize_once
    yield Call("norm", rms_norm.rms_norm, (made.known_norm,))
    for save in (True, False):
        yield Call(f"norm statistics, {save=}", rms_norm.rms_norm_statistics, (made.norm, save))
    yield Call("norm casts", rms_norm.rms_norm_quantize, (made.known_norm, made.known))
    for g in GRANULARITIES:
        yield Call(f"norm once {g}", once, (made.norm, cast(g), False))
    yield Call("norm once with a slot", once, (made.norm, made.raising, True))
    yield Call("norm once with a scale", once, (made.norm, made.scaled, False))
    yield Call("norm backward", rms_norm.rms_norm_backward, (made.norm_backward,))


def _of_products(made: Arguments) -> Iterator[Call]:
    from tests.internals import kernels_smooth as smooth
    from tests.internals import kernels_swiglu as swiglu

    pair, casts = (made.x, made.x), swiglu.swiglu_quantize
    yield Call("swiglu", swiglu.swiglu, (*pair, made.channels))
    yield Call("swiglu saves", swiglu.swiglu_save, (*pair, None, True))
    for g in GRANULARITIES:
        yield Call(f"swiglu casts {g}", casts, (*pair, None, cast(g), g == "block_1x128"))
    yield Call("swiglu casts with a slot", casts, (*pair, None, made.raising, True))
    yield Call("channels", smooth.column_amax, (made.x,))
    yield Call("channels, saving", smooth.swiglu_save_columns, (*pair, True))
    yield Call("factors", smooth.smooth_factors, (made.channels,))
    yield Call("smoothed cast", smooth.quantize_columns, (made.x, made.channels, made.known))


def _of_gradients(made: Arguments) -> Iterator[Call]:
    from tests.internals import kernels_swiglu_backward as backward

    casts, joined = backward.swiglu_backward_quantize, backward.gate_up_backward_quantize
    blocks = cast("block_1x128")
    known = functools.partial(made.known, 2)
    for saved in (False, True):
        inputs, how = functools.partial(made.backward, saved), f", {saved=}"
        yield Call(f"swiglu backward{how}", backward.swiglu_backward, (inputs,))
        yield Call(f"swiglu backward amax{how}", backward.swiglu_backward_amax, (inputs,))
        yield Call(f"swiglu backward casts with amaxes{how}", casts, (inputs, known, None, None))
        yield Call(f"swiglu backward casts blocks{how}", casts, (inputs, blocks, None, None))
        arguments = (inputs, made.raising, made.positive, made.positive)
        yield Call(f"swiglu backward casts with slots{how}", casts, arguments)
        yield Call(f"gate_up backward{how}", backward.gate_up_backward, (inputs, True))
        yield Call(f"gate_up backward amax{how}", backward.gate_up_backward_amax, (inputs,))
        yield Call(f"gate_up backward casts{how}", joined, (inputs, True, blocks))
        yield Call(f"gate_up backward casts with a slot{how}", joined, (inputs, True, made.raising))


def one_of_each(found: Iterable[Call]) -> list[Call]:
    first: dict[Any, Call] = {}
    for call in found:
        first.setdefault(call.launcher, call)
    return [*first.values()]


def check_played(call: Call) -> None:
    asked = []

    def counting(*args: Any) -> Any:
        asked.append(args)
        return call.launcher(*args)

    replayed = Replayed(counting)
    for number in range(3):
        args = call.make()
        twins = _copied(args)
        made, want = _parts((replayed(*args), args)), _parts((call.launcher(*twins), twins))
        require(len(made) == len(want), f"{call.name}, call {number}: other results")
        for got, expected in zip(made, want, strict=True):
            same_bits(got, expected, f"{call.name}, call {number}")
    times = 2 if REPLAYS else 3
    require(len(asked) == times, f"{call.name}: the launcher was called {len(asked)} times")


def _parts(value: Any) -> list[Tensor | None]:
    """Return tensors, and None for those that do not exist, in tuples of tuples."""
    if value is None or isinstance(value, Tensor):
        return [value]
    return [t for part in value if isinstance(part, tuple | Tensor | None) for t in _parts(part)]


def _copied(value: Any) -> Any:
    """Return arguments whose tensors are others, with the same elements and strides."""
    if isinstance(value, Tensor):
        how = {"dtype": value.dtype, "device": value.device}
        return torch.empty_strided(value.shape, value.stride(), **how).copy_(value)
    if isinstance(value, tuple):
        parts = [_copied(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value
