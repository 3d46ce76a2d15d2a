"""Sequences of any length run the same few binaries: each costs a second or two to compile."""

import contextlib
import itertools
from collections import Counter, defaultdict

import pytest
import torch

from tests.internals import (
    BackwardInputs,
    CastOptions,
    NormBackwardInputs,
    NormInputs,
    NormWithRstd,
    TileSums,
    quantize_beside,
    quantize_kernels,
    transpose,
)
from tests.internals import kernels_quantize as quantize
from tests.internals import kernels_rms_norm as rms_norm
from tests.internals import kernels_smooth as smooth
from tests.internals import kernels_swiglu as swiglu
from tests.internals import kernels_swiglu_backward as swiglu_backward

MODULES = (
    quantize,
    quantize_beside,
    quantize_kernels,
    rms_norm,
    smooth,
    swiglu,
    swiglu_backward,
    transpose,
)
LENGTHS = (33, 64, 100, 128, 200, 257, 384, 511, 640, 777, 1000, 1024, 1536, 2048, 4096)
"""Tokens of a batch: multiples of 128, of 16 and of neither, in up to 32 slabs and 1,024 tiles."""
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
GRANULARITIES = ("tensorwise", "rowwise", "block_1x128", "block_128x128", "block_1x32")
LAYOUTS = ((True, False), (False, True), (True, True))
WIDTHS = (512, 4096)


def tokens(rows, cols):
    return torch.empty(rows, cols, dtype=BF16)


def cast(how, each=(True, True), **more):
    return CastOptions(E4M3, how, how in ("block_1x128", "block_1x32"), *each, **more)


def raising():
    return cast("tensorwise", scale=torch.ones(()), amax=torch.zeros(()))


def quantizations():
    """Yield a name and a call of every cast of a matrix, for a number of rows and columns."""
    for how, each in itertools.product(GRANULARITIES, LAYOUTS):
        layouts = "+".join(itertools.compress(("row", "column"), each))
        made = cast(how, each)
        yield f"{how} {layouts}", lambda x, made=made: quantize.quantize_2d(x, made)
        yield (
            f"{how} {layouts} with sums",
            lambda x, made=made: quantize.quantize_2d(x, made, TileSums()),
        )
    for given in ("scale", "amax"):
        made = cast("tensorwise", **{given: torch.ones(())})
        yield f"tensorwise with {given}", lambda x, made=made: quantize.quantize_2d(x, made)
    for made in (cast("tensorwise"), raising()):
        yield (
            f"beside a transpose, {made.scale is not None}",
            lambda x, made=made: quantize_beside.quantize_2d_beside(x, made, x[:16].t().to(E4M3)),
        )
    yield "with a slot", lambda x: quantize.quantize_2d(x, raising())
    yield "with a slot and sums", lambda x: quantize.quantize_2d(x, raising(), TileSums())


def producers():
    """The same of norms, SwiGLU, their gradients, smoothing, sums and transposes."""
    for how in ("tensorwise", "block_1x128", "block_128x128", "block_1x32", "slot"):
        made = raising() if how == "slot" else cast(how)
        known = cast("tensorwise", amax=torch.ones(())) if how == "tensorwise" else made

        def norm(x, made=made):
            rms_norm.rms_norm_quantize_once(NormInputs(x, x[0], 1e-6, 0.0, BF16), made, True)

        def product(x, made=made):
            swiglu.swiglu_quantize(x, x, None, made, True)

        def gradients(x, made=made, known=known):
            inputs = BackwardInputs(x, x, None, x, None, BF16)
            if made is known:
                swiglu_backward.swiglu_backward_quantize(inputs, known)
            swiglu_backward.gate_up_backward_quantize(inputs, True, known)

        yield f"norm {how}", norm
        yield f"SwiGLU {how}", product
        yield f"gradients of SwiGLU {how}", gradients

    def norm_alone(x):
        rstd = torch.empty(x.shape[0])
        rms_norm.rms_norm(NormWithRstd(x, x[0], rstd, 1.0, BF16))
        rms_norm.rms_norm_backward(NormBackwardInputs(x, x, None, x[0], rstd, 1.0, BF16, True))

    yield "norm and its gradient", norm_alone
    yield "column amaxes", smooth.column_amax
    yield "smoothed", lambda x: smooth.quantize_columns(x, torch.empty(x.shape[1]), cast("rowwise"))
    yield "sums", lambda x: TileSums(0, torch.empty(-(-x.shape[0] // 128), 64)).total(x, BF16)
    yield "transposed", lambda x: transpose.transposed_bytes(x.to(E4M3), -(-x.shape[0] // 16) * 16)


CASES = {"casts": quantizations, "producers": producers}


def variants(call, cols, record_launches):
    """Return how many binaries of each kernel a call runs over all LENGTHS, for each launch."""
    made, launched = defaultdict(set), defaultdict(int)
    for rows in LENGTHS:
        with contextlib.ExitStack() as stack:
            recorded = [stack.enter_context(record_launches(module)) for module in MODULES]
            call(tokens(rows, cols))
        launches = [(launch.kernel.__name__, launch.key) for launch in itertools.chain(*recorded)]
        for kernel, key in launches:
            made[kernel].add(key)
        for kernel, count in Counter(kernel for kernel, _ in launches).items():
            launched[kernel] = max(launched[kernel], count)
    return {kernel: len(keys) / launched[kernel] for kernel, keys in made.items()}


@pytest.mark.parametrize("cols", WIDTHS)
@pytest.mark.parametrize("cases", CASES)
def test_sequences_of_fifteen_lengths_run_two_binaries_of_a_kernel(cases, cols, record_launches):
    """One where rows are a multiple of 16, one where they are not.

    1x128 has a third: where rows are a multiple of 128, too, nothing is padded.
    """
    counted = {name: variants(call, cols, record_launches) for name, call in CASES[cases]()}
    assert all(counted.values()), "every call launches something"
    for name, kernels in counted.items():
        most = 3 if name.startswith("block_1x128 ") else 2
        assert max(kernels.values()) <= most, (name, kernels)
