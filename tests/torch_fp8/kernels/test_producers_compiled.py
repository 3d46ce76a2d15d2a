import itertools

import pytest
import torch

from tests.internals import (
    BackwardInputs,
    CastOptions,
    NormBackwardInputs,
    NormInputs,
    NormWithRstd,
    padded_rows,
)
from tests.internals import kernels_quantize as quantize
from tests.internals import kernels_rms_norm as rms_norm
from tests.internals import kernels_smooth as smooth
from tests.internals import kernels_swiglu as swiglu
from tests.internals import kernels_swiglu_backward as swiglu_backward

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
EPS = 1e-5
# (what is known of the scale, format, granularity, power_of_two, row, col)
CASTS = (
    ("amax", E4M3, "tensorwise", False, True, True),
    ("amax", E5M2, "tensorwise", True, True, True),
    ("scale", E4M3, "tensorwise", False, True, True),
    ("scale", E5M2, "tensorwise", False, True, True),
    ("scale", E4M3, "tensorwise", False, True, False),
    ("slot", E4M3, "tensorwise", False, True, True),
    ("slot", E4M3, "tensorwise", False, True, False),
    ("slot", E5M2, "tensorwise", False, True, True),
    ("slot", E5M2, "tensorwise", False, False, True),
    (None, E4M3, "block_1x128", True, True, True),
    (None, E4M3, "block_1x128", True, True, False),
    (None, E4M3, "block_1x128", True, False, True),
    (None, E5M2, "block_1x128", False, True, True),
    (None, E4M3, "block_128x128", False, True, True),
    (None, E4M3, "block_1x32", True, True, True),
)
FORWARD = (E4M3,)  # E5M2 is for gradients, in all recipes
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "bf16, odd rows": torch.bfloat16}
ODD = {
    "odd": torch.empty(1001, 515, dtype=torch.bfloat16),
    "transposed": torch.empty(8192, 2048, dtype=torch.bfloat16).t(),
    "no unit stride": torch.empty(2048, 8192, dtype=torch.bfloat16)[:, ::2],
    "short rows": torch.empty(4096, 48, dtype=torch.bfloat16),
    "8192 columns": torch.empty(64, 8192, dtype=torch.bfloat16),
    "14336 columns": torch.empty(64, 14336, dtype=torch.bfloat16),
    "long rows": torch.empty(64, 32768, dtype=torch.bfloat16),
    "one element": torch.empty(1, 1, dtype=torch.bfloat16),
}
ROWS = {"norm": 8192, "narrow norm": 33792, "SwiGLU": 2048, "plain": 4096}
empty = torch.empty
"""`benchmarks.evidence.kernel_variants` takes values for it, and fewer `ROWS` and `ODD` shapes."""
# What a test compiles together covers its inputs together; the last group is that of --fast.
GROUPS = {"casts": list(DTYPES), "odd shapes": list(ODD)[:-1], "one element": ["one element"]}


def casts(*shape, formats=(E4M3, E5M2)):
    for known, *rest in CASTS:
        if rest[0] in formats:
            scale = torch.ones(()) if known in ("scale", "slot") else None
            amax = {"amax": torch.ones(shape), "slot": torch.zeros(())}.get(known)
            yield CastOptions(*rest, scale, amax)


def raising(dtype=E4M3):
    return CastOptions(dtype, "tensorwise", False, True, True, torch.ones(()), torch.zeros(()))


def of_dup(cast):
    return (
        ()
        if cast.scale is None
        else (cast.scale.clone(), None if cast.amax is None else cast.amax.clone())
    )


def saved(x):
    rows, cols = x.shape
    return empty((rows, cols), dtype=E4M3), empty(-(-cols // 128), rows).t()


def input_of(name):
    return empty(ROWS["plain"], 4096, dtype=DTYPES[name]) if name in DTYPES else ODD[name]


WHOLE = ((128, 128), (17, 256), (1, 16384), (16, 1024), (1, 64))
"""Shapes of which one tile is all."""


def launch_norms(x):
    weight, rstd = empty(x.shape[1]), empty(x.shape[0])
    for save in (True, False):
        rms_norm.rms_norm_statistics(NormInputs(x, weight, EPS, 1.0, x.dtype), save)
        inputs = saved(x) if save else (x, None)
        for weight_grad in (True, False):
            rms_norm.rms_norm_backward(
                NormBackwardInputs(x, *inputs, weight, rstd, 1.0, x.dtype, weight_grad)
            )
    rms_norm.rms_norm(NormWithRstd(x, weight, rstd, 1.0, x.dtype))


def launch_norm_casts(dtype, more):
    x, weight = empty(ROWS["norm"] + more, 2048, dtype=dtype), empty(2048, dtype=dtype)
    narrow = empty(ROWS["narrow norm"] + more, 512, dtype=dtype)
    rstd = empty(ROWS["norm"] + more)
    for cast in casts(formats=FORWARD):
        rms_norm.rms_norm_quantize(NormWithRstd(x, weight, rstd, 0.0, dtype), cast)
        if cast.scale is not None or cast.amax is None:
            bands = narrow if cast.scale is None else x
            inputs = NormInputs(bands, weight[: bands.shape[1]], EPS, 0.0, dtype)
            for save in (True, False):
                rms_norm.rms_norm_quantize_once(inputs, cast, save)


def launch_norms_of_sums(dtype):
    x, weight = empty(ROWS["norm"], 2048, dtype=dtype), empty(2048, dtype=dtype)
    given = (cast for cast in casts(formats=FORWARD) if cast.scale is not None)
    for cast, save in itertools.product(given, (True, False)):
        inputs = NormInputs(x, weight, EPS, 0.0, dtype)
        rms_norm.sum_norm_quantize_once(inputs, x.flip(0), cast, save)


def launch_swiglu(x):
    smooth = empty(x.shape[1])
    swiglu.swiglu(x, x, smooth)
    for save in (True, False):
        swiglu.swiglu_save(x, x, None, save)
    for inputs in ((x, None, x, None), saved(x) * 2):
        inputs = BackwardInputs(x, *inputs, x.dtype)
        swiglu_backward.swiglu_backward(inputs)
        swiglu_backward.swiglu_backward_amax(inputs)
        swiglu_backward.gate_up_backward(inputs, True)
        swiglu_backward.gate_up_backward_amax(inputs)


def launch_swiglu_casts(dtype, more):
    x, smooth = empty(ROWS["SwiGLU"] + more, 4096, dtype=dtype), empty(4096)
    for cast in casts(formats=FORWARD):
        for save in (True, False):
            swiglu.swiglu_quantize(x, x, smooth, cast, save)
    backward = [BackwardInputs(x, *inputs, dtype) for inputs in ((x, None, x, None), saved(x) * 2)]
    for cast, inputs in itertools.product(casts(2), backward):
        swiglu_backward.swiglu_backward_quantize(inputs, cast, *of_dup(cast))
    for cast, inputs in itertools.product(casts(), backward):
        swiglu_backward.gate_up_backward_quantize(inputs, True, cast)


def launch_smoothing(x):
    smooth.column_amax(x)
    for save in (True, False):
        smooth.swiglu_save_columns(x, x, save)
    smooth.smooth_factors(empty(x.shape[1]))
    known = {"tensorwise": torch.ones(())}
    for how in ("tensorwise", "block_1x128", "block_128x128"):
        cast = CastOptions(E4M3, how, True, True, how != "block_128x128", amax=known.get(how))
        smooth.quantize_columns(x, empty(x.shape[1]), cast)
    smooth.quantize_columns(x, empty(x.shape[1]), raising())


def launch_whole_tiles(dtype):
    layouts = ((True, False), (False, True), (True, True))
    for shape, each, save in itertools.product(WHOLE, layouts, (True, False)):
        x, smooth = empty(shape, dtype=dtype), empty(shape[1])
        for power_of_two in (True, False):
            cast = CastOptions(E4M3, "tensorwise", power_of_two, *each)
            inputs = NormInputs(x, smooth, EPS, 0.0, dtype)
            rms_norm.rms_norm_quantize_once(inputs, cast, save)
            swiglu.swiglu_quantize(x, x, smooth, cast, save)


def assert_fits(launches, compile_all):
    for ptx in compile_all(launches):
        # triton-lang/triton#11111: next to these, transposed one-byte stores are corrupted.
        assert "min.NaN" not in ptx
        assert "max.NaN" not in ptx


@pytest.mark.long
@pytest.mark.parametrize("group", GROUPS)
def test_norm_compiles_and_fits(record_launches, compile_all, group):
    with record_launches(quantize), record_launches(rms_norm) as launches:
        for name in GROUPS[group]:
            if name in DTYPES:
                launch_norm_casts(DTYPES[name], 1 if "odd" in name else 0)
                launch_norms_of_sums(DTYPES[name])
            launch_norms(input_of(name))
    assert_fits(launches, compile_all)


@pytest.mark.long
@pytest.mark.parametrize("group", GROUPS)
def test_swiglu_compiles_and_fits(record_launches, compile_all, group):
    with (
        record_launches(quantize),
        record_launches(swiglu) as forward,
        record_launches(swiglu_backward) as backward,
    ):
        for name in GROUPS[group]:
            if name in DTYPES:
                launch_swiglu_casts(DTYPES[name], 1 if "odd" in name else 0)
            launch_swiglu(input_of(name))
    assert_fits(forward + backward, compile_all)


@pytest.mark.long
def test_smoothing_compiles_and_fits(record_launches, compile_all):
    with (
        record_launches(quantize) as columns,
        record_launches(swiglu) as saves,
        record_launches(smooth) as launches,
    ):
        launch_smoothing(input_of("bf16"))
    assert_fits(columns + saves + launches, compile_all)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_whole_tiles_compile_and_fit(record_launches, compile_all, dtype):
    with record_launches(rms_norm) as norms, record_launches(swiglu) as products:
        launch_whole_tiles(dtype)
    whole = [made for made in norms + products if dict(made.constants).get("SCALE") == "whole"]
    assert set(names(whole)) == {"norm_cast_once", "swiglu_cast"}
    assert_fits(whole, compile_all)


def names(launches):
    return [launch.kernel.__name__.strip("_").removesuffix("_kernel") for launch in launches]


def test_launches_of_a_norm(record_launches):
    """Each reads x once; between a norm and the casts there is no memory traffic of y."""
    x, weight = torch.empty(8192, 4096, dtype=torch.bfloat16), torch.empty(4096)
    for cast in casts():
        with record_launches(rms_norm) as launches:
            rstd = rms_norm.rms_norm_statistics(NormInputs(x, weight, EPS, 0.0, x.dtype), True)[0]
            rms_norm.rms_norm_quantize(NormWithRstd(x, weight, rstd, 0.0, x.dtype), cast)
        assert names(launches) == ["statistics", "norm_cast"]


@pytest.mark.parametrize(
    ("shape", "granularity", "once"),
    [
        ((8192, 4096), "tensorwise", True),
        ((4096, 4096), "tensorwise", False),  # 128 bands for 132 multiprocessors
        ((8192, 8192), "tensorwise", False),  # 66 MiB at work, more than the L2 cache
        ((32768, 1024), "block_1x128", True),
        ((32768, 4096), "block_1x128", False),
        ((8192, 4096), "rowwise", False),
        ((8193, 4096), "tensorwise", True),
    ],
    ids=str,
)
def test_one_launch_where_bands_fill_the_card_and_stay_in_its_cache(
    record_launches, shape, granularity, once
):
    x = torch.empty(shape, dtype=torch.bfloat16)
    scale = torch.ones(()) if granularity == "tensorwise" else None
    cast = CastOptions(E4M3, granularity, True, True, True, scale)
    with record_launches(rms_norm) as launches, record_launches(quantize):
        rms_norm.rms_norm_quantize_once(
            NormInputs(x, torch.empty(shape[1]), EPS, 0.0, x.dtype), cast, True
        )
    assert (names(launches) == ["norm_cast_once"]) == once


def test_launches_of_a_gated_mlp(record_launches):
    """Forward 1, or 2 with the amax of the tensor at hand; backward likewise."""
    x = torch.empty(2048, 4096, dtype=torch.bfloat16)
    for cast in casts():
        if cast.granularity == "block_1x128" and not (cast.power_of_two and cast.rowwise):
            continue  # see is_fused
        with record_launches(swiglu) as launches:
            swiglu.swiglu_quantize(x, x, None, cast, True)
        assert names(launches) == ["swiglu_cast"]
    for cast in casts(2):
        if swiglu.tile_of(cast).rows == 128:
            continue  # see casts_at_once
        with record_launches(swiglu_backward) as launches:
            inputs = BackwardInputs(x, *saved(x) * 2, x.dtype)
            swiglu_backward.swiglu_backward_quantize(inputs, cast, *of_dup(cast))
        assert names(launches) == ["swiglu_backward_cast"]
    for cast in casts():
        if swiglu.tile_of(cast).rows == 128:
            continue  # see casts_at_once
        with record_launches(swiglu_backward) as launches:
            inputs = BackwardInputs(x, *saved(x) * 2, x.dtype)
            swiglu_backward.gate_up_backward_quantize(inputs, True, cast)
        assert names(launches) == ["swiglu_backward_cast"]


@pytest.mark.parametrize(
    ("shape", "columnwise", "whole"),
    [
        ((16, 1024), False, True),  # 16,384 elements
        ((17, 1024), False, False),
        ((16, 1040), False, False),  # 2,048 with those beside the last
        ((1, 16384), False, True),
        ((1, 16384), True, False),  # the column layout has 16 rows
        ((1, 1024), True, True),
        ((128, 128), True, True),
        ((16, 1000), False, False),  # moved one element at a time
        ((0, 128), False, False),
    ],
    ids=str,
)
def test_one_launch_finds_the_amax_of_what_a_tile_holds(record_launches, shape, columnwise, whole):
    x = torch.empty(shape, dtype=torch.bfloat16)
    cast = CastOptions(E4M3, "tensorwise", True, True, columnwise)
    with record_launches(quantize) as casts_of_it:
        quantize.quantize_2d(x, cast)
    with record_launches(quantize), record_launches(rms_norm) as norm:
        made = rms_norm.rms_norm_quantize_once(
            NormInputs(x, torch.empty(shape[1]), EPS, 0.0, x.dtype), cast, False
        )
    with record_launches(quantize), record_launches(swiglu) as product:
        others = swiglu.swiglu_quantize(x, x, None, cast, False)
    assert [t.shape for t in made[:2]] == [t.shape for t in others[:2]] == [shape, ()]
    if whole:
        assert names(casts_of_it) == ["cast"]
        assert names(norm) == ["norm_cast_once"]
        assert names(product) == ["swiglu_cast"]
        assert {dict(made.constants)["SCALE"] for made in casts_of_it + norm + product} == {"whole"}
        assert {made.grid for made in casts_of_it + norm + product} == {(1,)}
    elif x.numel():
        assert names(casts_of_it) == ["amax", "cast"]
        assert names(norm)[0] == "statistics"
        assert len(product) == 2


@pytest.mark.parametrize("rows", [33792, 33791])
def test_casts_that_raise_slots_are_one_launch_for_any_number_of_rows(record_launches, rows):
    x, how = torch.empty(rows, 512, dtype=torch.bfloat16), raising()
    with (
        record_launches(quantize) as casts_after,
        record_launches(rms_norm) as norm,
        record_launches(swiglu) as forward,
        record_launches(swiglu_backward) as backward,
    ):
        made = rms_norm.rms_norm_quantize_once(NormInputs(x, x[0], EPS, 0.0, x.dtype), how, True)
        swiglu.swiglu_quantize(x, x, None, how, True)
        inputs = BackwardInputs(x, *saved(x) * 2, x.dtype)
        swiglu_backward.swiglu_backward_quantize(inputs, how, *of_dup(how))
        swiglu_backward.gate_up_backward_quantize(inputs, True, how)
    assert [t.shape for t in (made[0], made[2])] == [(rows, 512), (512, 33792)]
    assert casts_after == []
    assert names(norm) == ["norm_cast_once"]
    assert names(forward) == ["swiglu_cast"]
    assert names(backward) == ["swiglu_backward_cast"] * 2
    for launch in (*norm, *forward, *backward):
        assert dict(launch.constants)["AMAX"] in (True, "tensor", "both")


@pytest.mark.parametrize(
    ("shape", "granularity", "fused"),
    [
        ((2048, 4096), "block_1x32", True),
        ((2048, 4096), "block_1x128", False),  # 128 rows of both gradients
        ((2048, 4112), "block_1x32", False),  # a block with a part of gate's and of up's gradient
        ((2048, 4160), "block_1x32", False),
        ((2048, 4112), "tensorwise", True),
        ((2048, 4100), "tensorwise", False),
        ((2040, 4096), "tensorwise", True),
        ((2048, 4096), "rowwise", False),
    ],
    ids=str,
)
def test_one_gradient_is_cast_in_one_launch_by_rule(record_launches, shape, granularity, fused):
    x = torch.empty(shape, dtype=torch.bfloat16)
    scale = torch.ones(()) if granularity == "tensorwise" else None
    cast = CastOptions(E4M3, granularity, True, True, True, scale)
    with record_launches(swiglu_backward) as launches, record_launches(quantize) as casts_after:
        inputs = BackwardInputs(x, *saved(x) * 2, x.dtype)
        q, _, qt, *_ = swiglu_backward.gate_up_backward_quantize(inputs, True, cast)
    assert q.shape == (shape[0], 2 * shape[1])
    assert qt.shape == (2 * shape[1], padded_rows(shape[0], granularity))
    (launch,) = launches
    assert names(launches) == ["swiglu_backward_cast"]
    assert dict(launch.constants)["COL"] == fused
    assert bool(casts_after) == (not fused)


def test_tiles_move_in_16_byte_accesses(record_launches, compile_for):
    x = torch.empty(2048, 4096, dtype=torch.bfloat16)
    cast = CastOptions(E4M3, "block_1x128", True, True, True)
    with record_launches(swiglu) as forward, record_launches(swiglu_backward) as backward:
        swiglu.swiglu_quantize(x, x, None, cast, True)
        inputs = BackwardInputs(x, *saved(x) * 2, x.dtype)
        groups = cast._replace(granularity="block_1x32")
        swiglu_backward.swiglu_backward_quantize(inputs, groups)
    with record_launches(rms_norm) as norms:
        rms_norm.rms_norm_quantize(NormWithRstd(x, x[0], torch.empty(2048), 0.0, x.dtype), cast)
    for launch in (*forward, *backward, *norms):
        ptx, _ = compile_for(launch, "sm_90")
        assert "ld.global.v4.b32" in ptx
        assert "st.global.b8" not in ptx


@pytest.mark.parametrize("module", [rms_norm, swiglu, swiglu_backward], ids=lambda m: m.__name__)
def test_a_program_raises_one_slot_once(record_launches, compile_for, atomics_in, module):
    x, how = torch.empty(8192, 2048, dtype=torch.bfloat16), raising()
    with record_launches(module) as launches:
        if module is rms_norm:
            rms_norm.rms_norm_quantize_once(NormInputs(x, x[0], EPS, 0.0, x.dtype), how, True)
        elif module is swiglu:
            swiglu.swiglu_quantize(x, x, None, how, True)
        else:
            inputs = BackwardInputs(x, *saved(x) * 2, x.dtype)
            swiglu_backward.swiglu_backward_quantize(inputs, how, *of_dup(how))
    ptx, _ = compile_for(launches[0], "sm_90")
    atomics = atomics_in(ptx)
    assert len(atomics) == (2 if module is swiglu_backward else 1), atomics
    for atomic in atomics:
        assert ".relaxed." in atomic
        assert ".max.s32" in atomic
