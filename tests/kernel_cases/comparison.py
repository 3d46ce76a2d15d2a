"""Comparisons of a kernel's results with those of its reference."""

import torch
from torch import Tensor

NEIGHBOURS = 0.01
"""The share of 16-bit results that may be the neighbour of the reference's."""


class Mismatch(AssertionError):
    """A kernel's result differs from its reference's."""


def require(condition: object, message: str) -> None:
    """Raise `Mismatch` unless the condition holds; ``python -O`` keeps it."""
    if not condition:
        raise Mismatch(message)


def same_bits(got: Tensor | None, want: Tensor | None, what: str = "result") -> None:
    """Require the same shape, layout and bits; NaN equals NaN, whose bits are the platform's
    choice. What does not exist is None, or an empty tensor if the dispatcher was asked.

    Args:
        got: the kernel's result, on any device.
        want: the reference's result, on the CPU; or another one of the kernel's.
        what: it is, for the message.
    """
    if got is None or want is None:
        _both_absent(got, want, what)
        return
    _same_form(got, want, what)
    got, want = got.cpu(), want.cpu()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[want.dtype.itemsize]
    same = got.view(integer) == want.view(integer)
    same |= got.float().isnan() & want.float().isnan()
    _all(same, got, want, what)


def same_values(got: Tensor | None, want: Tensor | None, what: str = "result") -> None:
    """Require what `same_bits` does, but let zeros of either sign be equal."""
    if got is None or want is None:
        _both_absent(got, want, what)
        return
    _same_form(got, want, what)
    got, want = got.cpu(), want.cpu()
    same = (got.float() == want.float()) | (got.float().isnan() & want.float().isnan())
    _all(same, got, want, what)


def near(got: Tensor, want: Tensor, what: str = "result") -> None:
    """Require equal values or, rarely, neighbours, but for cancellation within the row."""
    got, want, dtype = got.cpu().float(), want.float(), want.dtype
    require((got.isfinite() == want.isfinite()).all(), f"{what}: not finite elsewhere")
    got, want = got.nan_to_num(0, 0, 0), want.nan_to_num(0, 0, 0)
    if not want.numel():
        return
    step = torch.finfo(dtype).eps if dtype != torch.float32 else 2.0**-14
    cancelled = want.abs().amax(-1, keepdim=True) * max(step * 2.0**-14, 2.0**-22)
    far = (got - want).abs() > step * want.abs() + cancelled
    require(not far.any(), f"{what}: {int(far.sum())} of {far.numel()} are too far off")
    if dtype != torch.float32:
        share = float((got != want).float().mean())
        require(share <= NEIGHBOURS + 2 / want.numel(), f"{what}: {share:.1%} are neighbours")


def close(got: Tensor, want: Tensor, rtol: float, what: str = "result") -> None:
    """Require values within a relative tolerance of the reference's; NaN equals NaN."""
    require(got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(want.shape)}")
    is_close = torch.isclose(got.cpu(), want.cpu(), rtol=rtol, atol=0, equal_nan=True)
    require(
        is_close.all(), f"{what}: {int((~is_close).sum())} of {is_close.numel()} are too far off"
    )


def _all(same: Tensor, got: Tensor, want: Tensor, what: str) -> None:
    if not same.all():
        place = tuple((~same).nonzero()[0].tolist())
        first = f"the first at {place}: {float(got[place])!r}, not {float(want[place])!r}"
        raise Mismatch(f"{what}: {int((~same).sum())} of {same.numel()} differ, {first}")


def _both_absent(got: Tensor | None, want: Tensor | None, what: str) -> None:
    absent = [t is None or t.shape == (0,) for t in (got, want)]
    require(all(absent), f"{what}: only one of the two exists")


def _same_form(got: Tensor, want: Tensor, what: str) -> None:
    require(got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(want.shape)}")
    require(got.dtype == want.dtype, f"{what}: {got.dtype}, not {want.dtype}")
    for a, b in ((got, want), (got.t(), want.t())) if got.ndim == 2 else ((got, want),):
        require(a.is_contiguous() == b.is_contiguous(), f"{what}: another layout")
