"""What launching functions return, compared with their references while a case calls them.

Casts are compared bit for bit; so are casts of what RMSNorm and SwiGLU compute, with the reference
of the cast of their plain result, which is compared as the GPU tests do
(`tests.kernel_cases.producers`).
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tests.emulator.faults import Fault
from tests.emulator.place import on_card
from tests.internals import CastOptions, TileSums, recording, tensor_amax
from tests.internals import kernels_adamw as adamw
from tests.internals import kernels_quantize as quantize
from tests.internals import kernels_rms_norm as rms_norm
from tests.internals import kernels_smooth as smooth
from tests.internals import kernels_swiglu as swiglu
from tests.internals import kernels_swiglu_backward as swiglu_backward
from tests.kernel_cases import casts
from tests.kernel_cases.comparison import Mismatch, close, near, require, same_bits, same_values
from tests.kernel_cases.states import matrix_differences
from torch_fp8.ops import rms_norm as norm_ops
from torch_fp8.ops import smooth as smooth_ops
from torch_fp8.ops import swiglu as swiglu_ops
from torch_fp8.ops import swiglu_backward as backward_ops
from torch_fp8.ops.adamw import adamw_step_reference
from torch_fp8.ops.quantize import quantize_2d


class Comparison:
    """Results of launching functions, compared as they come.

    Args:
        launches: the emulation's list of launches, which grows.

    Attributes:
        compared: number of calls.
        unequal: number of each launch that a faulty result needed -> what is wrong with it.
    """

    def __init__(self, launches: list[Any]) -> None:
        self._launches, self._inside = launches, False
        self.compared, self.unequal = 0, dict[int, str]()

    @contextlib.contextmanager
    def all_functions(self) -> Iterator[None]:
        """Compare what is called within of the functions that launch casts and producers."""
        with contextlib.ExitStack() as stack:
            for (owner, name), check in _CHECKS.items():
                stub = self._compared(getattr(owner, name), check)
                stack.enter_context(mock.patch.object(owner, name, stub))
            yield

    def _compared(self, function: Callable[..., Any], check: Callable[..., None]) -> Any:
        def call(*args: Any) -> Any:
            if self._inside or recording() is not None:  # what is recorded is played later
                return function(*args)
            self._inside, start = True, len(self._launches)
            self.compared += 1
            copies = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, args)
            results = None
            try:
                results = function(*args)
                with on_card(False):
                    check(results, args, copies)
            except (Mismatch, Fault) as error:
                for number in range(start, len(self._launches)):
                    self.unequal[number] = f"{function.__name__}: {error}"
            finally:
                self._inside = False
            return results

        return call


def _all_same(results: Any, expected: Any, what: str) -> None:
    for got, want in zip(results, expected, strict=True):
        same_values(got, want, what)


def _quantize_2d(results: Any, args: Any, copies: Any) -> None:
    x, options, *sums = copies
    for got, want in zip(results, casts.reference(x, options), strict=True):
        same_bits(got, want, "cast")
    _same_slot(args[1], options, "cast")
    if sums and sums[0] is not None:
        _tile_sums(sums[0], x)


def _same_slot(given: CastOptions, want: CastOptions, what: str) -> None:
    """Compare the slot that a cast has raised with the one that the reference has."""
    if given.raises_amax:
        same_values(given.amax, want.amax, f"slot of {what}")


def _tile_sums(sums: TileSums, x: Tensor) -> None:
    if sums.partial is None:
        return
    exact, size = (v.double().sum(sums.axis) for v in (x, x.abs()))
    bound = size * x.shape[sums.axis] * 2.0**-24
    total = sums.total(x, torch.float32)
    require(((total - exact).abs() <= bound).all(), "sums beside a cast are too far off")


def _total(result: Tensor, args: Any, copies: Any) -> None:
    sums, _, dtype = args
    exact, size = (x.double().sum(0) for x in (sums.partial, sums.partial.abs()))
    bound = size * len(sums.partial) * 2.0**-24 + exact.abs() * torch.finfo(dtype).eps / 2
    require(((result - exact).abs() <= bound).all(), "sums of partial sums are too far off")


def _statistics(results: Any, args: Any, copies: Any) -> None:
    inputs, save = copies
    want = norm_ops.rms_norm_statistics(inputs, save)
    close(results[0], want[0], 1e-6, "rstd")
    _all_same(results[2:], want[2:], "saved")
    y = norm_ops.rms_norm(inputs.with_rstd(results[0]))
    same_values(results[1], tensor_amax(y), "amax of a norm")


def _norm(result: Tensor, args: Any, copies: Any) -> None:
    same_values(result, norm_ops.rms_norm(copies[0]), "norm")


def _norm_quantize(results: Any, args: Any, copies: Any) -> None:
    norm, cast = copies
    _cast(results, norm_ops.rms_norm(norm), cast, args[1], "norm")


def _norm_quantize_once(results: Any, args: Any, copies: Any) -> None:
    inputs, cast, save = copies
    *layouts, rstd, saved, saved_scale = results
    want = norm_ops.rms_norm_statistics(inputs, save)
    close(rstd, want[0], 1e-6, "rstd of a norm in one launch")
    _all_same((saved, saved_scale), want[2:], "saved by a norm in one launch")
    y = norm_ops.rms_norm(inputs.with_rstd(rstd))
    _cast(layouts, y, cast, args[1], "norm in one launch")


def _norm_of_sum(results: Any, args: Any, copies: Any) -> None:
    inputs, addend, *how = copies
    *of_norm, total = results
    same_bits(total, inputs.x + addend, "sum before a norm")
    _norm_quantize_once(of_norm, (args[0], args[2]), (inputs._replace(x=total), *how))


def _norm_backward(results: Any, args: Any, copies: Any) -> None:
    want = norm_ops.rms_norm_backward(*copies)
    near(results[0], want[0], "gradient of a norm's input")
    near(results[1][None], want[1][None], "gradient of a norm's weight")


def _cast(results: Any, y: Tensor, cast: CastOptions, given: CastOptions, what: str) -> None:
    """Compare layouts and slot with the cast of a plain result."""
    _all_same(results, quantize_2d(y, cast), f"cast of {what}")
    _same_slot(given, cast, what)


def _swiglu(result: Tensor, args: Any, copies: Any) -> None:
    near(result, swiglu_ops.swiglu(*copies), "SwiGLU")


def _swiglu_save(results: Any, args: Any, copies: Any) -> None:
    _all_same(results[:4], swiglu_ops.swiglu_save(*copies)[:4], "saved by SwiGLU")
    same_values(results[4], tensor_amax(swiglu.swiglu(*args[:3])), "amax of SwiGLU")


def _swiglu_quantize(results: Any, args: Any, copies: Any) -> None:
    gate, up, factors, cast, save = copies
    want = swiglu_ops.swiglu_save(gate, up, factors, save)[:4]
    _all_same(results[4:], want, "saved beside a cast of SwiGLU")
    y = swiglu.swiglu(gate, up, factors)
    _cast(results[:4], y, cast, args[3], "SwiGLU")


def _swiglu_backward(results: Any, args: Any, copies: Any) -> None:
    for got, want in zip(results, backward_ops.swiglu_backward(*copies), strict=True):
        near(got, want, "SwiGLU backward")


def _swiglu_backward_amax(result: Tensor, args: Any, copies: Any) -> None:
    gradients = swiglu_backward.swiglu_backward(*copies)
    same_values(result, torch.stack([tensor_amax(d) for d in gradients]), "amaxes backward")


def _swiglu_backward_quantize(results: Any, args: Any, copies: Any) -> None:
    inputs, options, *of_dup = copies
    gradients = swiglu_backward.swiglu_backward(inputs)
    casts = options.of_gradients(*of_dup), args[1].of_gradients(*args[2:])
    for i, (d, cast, given) in enumerate(zip(gradients, *casts, strict=True)):
        _cast(results[4 * i : 4 * i + 4], d, cast, given, "SwiGLU backward")


def _gate_up(result: Tensor, args: Any, copies: Any) -> None:
    inputs, gate_first = copies
    dgate, dup = swiglu_backward.swiglu_backward(inputs)
    same_values(result, torch.cat([dgate, dup] if gate_first else [dup, dgate], 1), "gate_up")


def _gate_up_amax(result: Tensor, args: Any, copies: Any) -> None:
    same_values(
        result, tensor_amax(swiglu_backward.gate_up_backward(*copies, True)), "amax of gate_up"
    )


def _gate_up_quantize(results: Any, args: Any, copies: Any) -> None:
    inputs, gate_first, cast = copies
    y = swiglu_backward.gate_up_backward(inputs, gate_first)
    _cast(results, y, cast, args[2], "gate_up backward")


def _column_amax(result: Tensor, args: Any, copies: Any) -> None:
    same_values(result, smooth_ops.column_amax.reference(*copies), "amaxes of columns")


def _save_columns(results: Any, args: Any, copies: Any) -> None:
    gate, up, save = copies
    _all_same(results[:4], swiglu_ops.swiglu_save(gate, up, None, save)[:4], "saved by columns")
    want = smooth_ops.column_amax.reference(swiglu.swiglu(gate, up, None))
    same_values(results[4], want, "amaxes of SwiGLU's columns")


def _factors(results: Any, args: Any, copies: Any) -> None:
    _all_same(results, smooth_ops.smooth_factors.reference(*copies), "factors of channels")


def _quantize_columns(results: Any, args: Any, copies: Any) -> None:
    x, factors, cast = copies
    _cast(results, x.float() * factors, cast, args[2], "columns times factors")


def _adamw_step(result: Any, args: Any, copies: Any) -> None:
    entries, *rest = copies
    multipliers = rest[0] if rest and rest[0] else [None] * len(entries)
    for (got, _), (want, scalars), multiplier in zip(args[0], entries, multipliers, strict=True):
        adamw_step_reference(want, scalars, multiplier)
        differences = matrix_differences(got, want)
        require(not differences, f"AdamW of {tuple(want.weight.shape)}: {differences}")


_CHECKS: dict[tuple[Any, str], Callable[..., None]] = {
    (quantize, "quantize_2d"): _quantize_2d,
    (TileSums, "total"): _total,
    (rms_norm, "rms_norm_statistics"): _statistics,
    (rms_norm, "rms_norm"): _norm,
    (rms_norm, "rms_norm_quantize"): _norm_quantize,
    (rms_norm, "rms_norm_quantize_once"): _norm_quantize_once,
    (rms_norm, "sum_norm_quantize_once"): _norm_of_sum,
    (rms_norm, "rms_norm_backward"): _norm_backward,
    (swiglu, "swiglu"): _swiglu,
    (swiglu, "swiglu_save"): _swiglu_save,
    (swiglu, "swiglu_quantize"): _swiglu_quantize,
    (swiglu_backward, "swiglu_backward"): _swiglu_backward,
    (swiglu_backward, "swiglu_backward_amax"): _swiglu_backward_amax,
    (swiglu_backward, "swiglu_backward_quantize"): _swiglu_backward_quantize,
    (swiglu_backward, "gate_up_backward"): _gate_up,
    (swiglu_backward, "gate_up_backward_amax"): _gate_up_amax,
    (swiglu_backward, "gate_up_backward_quantize"): _gate_up_quantize,
    (smooth, "column_amax"): _column_amax,
    (smooth, "swiglu_save_columns"): _save_columns,
    (smooth, "smooth_factors"): _factors,
    (smooth, "quantize_columns"): _quantize_columns,
    (adamw, "adamw_step"): _adamw_step,
}
"""Owner and name of a function -> what compares its results, given its arguments and copies of
these from before the call.
"""
