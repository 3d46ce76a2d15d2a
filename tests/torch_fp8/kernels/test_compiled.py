"""Every kernel that the host functions launch compiles for Hopper and Blackwell, without a card.

Triton is a development dependency; where it is missing these tests fail, they do not skip.
"""

import itertools

import pytest
import torch

from tests.internals import (
    CastOptions,
    TileSums,
    kernels_side_by_side,
    quantize_beside,
    quantize_kernels,
    transpose,
)
from tests.internals import kernels_quantize as quantize

GRANULARITIES = ("tensorwise", "rowwise", "block_1x128", "block_128x128", "block_1x32")
FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
LAYOUTS = ((True, False), (False, True), (True, True))
INPUTS = {
    "bf16": torch.empty(4096, 4096, dtype=torch.bfloat16),
    "fp16": torch.empty(4096, 4096, dtype=torch.float16),
    "fp32": torch.empty(2048, 4096),
    "bf16 odd rows": torch.empty(1001, 512, dtype=torch.bfloat16),
    "bf16 odd": torch.empty(1001, 515, dtype=torch.bfloat16),
    "bf16 long rows": torch.empty(64, 32768, dtype=torch.bfloat16),
    "bf16 one element": torch.empty(1, 1, dtype=torch.bfloat16),
    "bf16 14336": torch.empty(512, 14336, dtype=torch.bfloat16),
    "bf16 no unit stride": torch.empty(2048, 8192, dtype=torch.bfloat16)[:, ::2],
}
empty = torch.empty
"""`benchmarks.evidence.kernel_variants` takes values for it, and smaller `INPUTS`."""
# What a test compiles together covers its inputs together; the last group is that of --fast.
ONE = "bf16 no unit stride"
GROUPS = {"the others": [name for name in INPUTS if name != ONE], ONE: [ONE]}


def launch_everything(name):
    """Calls the host functions with every choice; the types of x vary with fewer choices."""
    x = INPUTS[name]
    full = name in ("bf16", "bf16 odd rows")
    layouts, formats = (LAYOUTS, FORMATS) if full else (LAYOUTS[2:], FORMATS[:1])
    for granularity in GRANULARITIES:
        for dtype, each in itertools.product(formats, layouts):
            quantize.quantize_2d(x, CastOptions(dtype, granularity, False, *each))
        quantize.quantize_2d(x, CastOptions(formats[0], granularity, full, True, True))
    scale, slot = torch.ones(()), torch.zeros(())
    for dtype, each in itertools.product(formats, layouts):
        options = CastOptions(dtype, "tensorwise", False, *each)
        quantize.quantize_2d(x, options._replace(amax=scale))
        for granularity in GRANULARITIES:
            quantize.quantize_2d(x, options._replace(granularity=granularity), TileSums())
        for raised, sums in itertools.product((None, slot), (None, TileSums())):
            quantize.quantize_2d(x, options._replace(scale=scale, amax=raised), sums)
    options = CastOptions(formats[0], "tensorwise", False, False, False, scale, slot)
    quantize.quantize_2d(x, options)


@pytest.mark.long
@pytest.mark.parametrize("names", GROUPS)
def test_every_kernel_compiles_without_spills(names, record_launches, compile_all):
    with record_launches(quantize) as launches:
        for name in GROUPS[names]:
            launch_everything(name)
    assert len({launch.kernel.__name__ for launch in launches}) == 5
    _compile(launches, compile_all)


WHOLE = ((128, 128), (17, 256), (1, 16384), (16, 1024), (1, 64))
"""Shapes of which one tile is all."""


def launch_whole_tiles(dtype):
    for shape, each in itertools.product(WHOLE, LAYOUTS):
        for format, power_of_two in ((FORMATS[0], False), (FORMATS[1], True)):
            options = CastOptions(format, "tensorwise", power_of_two, *each)
            quantize.quantize_2d(empty(shape, dtype=dtype), options)


def launch_sums(size):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        TileSums(0, empty(128, size)).total(empty(16384, size), dtype)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_whole_tiles_compile_without_spills(dtype, record_launches, compile_all):
    with record_launches(quantize) as launches:
        launch_whole_tiles(dtype)
    assert {dict(launch.constants).get("SCALE") for launch in launches} == {"whole", "tensor", None}
    _compile(launches, compile_all)


@pytest.mark.long
@pytest.mark.parametrize("size", [4096, 515])
def test_sums_compile_without_spills(size, record_launches, compile_all):
    with record_launches(quantize_kernels) as launches:
        launch_sums(size)
    _compile(launches, compile_all)


@pytest.mark.parametrize(("rows", "cols"), [(14336, 4096), (1000, 515)])
def test_transposes_compile_without_spills(rows, cols, record_launches, compile_all):
    with record_launches(transpose) as launches:
        transpose.transposed_bytes(torch.empty(rows, cols, dtype=FORMATS[0]), -(-rows // 16) * 16)
    _compile(launches, compile_all)
    (ptx,) = compile_all(launches)
    whole = "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx
    assert whole == (cols % 16 == 0), "lines of 16 bytes, where none is cut"


@pytest.mark.long
def test_weights_side_by_side_compile_without_spills(record_launches, compile_all):
    weights, one = (
        [torch.empty(n, 4096, dtype=torch.bfloat16) for n in (4096, 1024)],
        torch.ones(()),
    )
    with record_launches(kernels_side_by_side) as launches:
        for last, scale in ((weights[1], one), (None, None)):
            arguments = *weights, last, one, one, scale, FORMATS[0], one
            kernels_side_by_side.cast_side_by_side(*arguments)
        layouts = ((True, True), (True, False), (False, True))
        for format, each in itertools.product(FORMATS, layouts):
            options = CastOptions(format, "tensorwise", False, *each, one, one)
            kernels_side_by_side.quantize_joined(*weights[1:] * 3, options)
    _compile(launches, compile_all)


@pytest.mark.long
def test_casts_beside_transposes_compile_without_spills(record_launches, compile_all):
    payload = torch.empty(4096, 1024, dtype=FORMATS[0])
    with record_launches(quantize), record_launches(quantize_beside) as launches:
        for format, col in itertools.product(FORMATS, (True, False)):
            options = CastOptions(format, "tensorwise", False, True, col)
            known = options._replace(scale=torch.ones(()), amax=torch.zeros(()))
            for each in (options, options._replace(amax=torch.ones(())), known):
                quantize_beside.quantize_2d_beside(INPUTS["bf16"], each, payload)
            odd = payload[:512]
            quantize_beside.quantize_2d_beside(INPUTS["bf16 odd rows"], options, odd)
    assert {launch.kernel.__name__ for launch in launches} == {"cast_beside_kernel"}
    _compile(launches, compile_all)


@pytest.mark.parametrize(("row", "col"), [(True, True), (False, False)])
def test_a_cast_raises_its_slot_once_a_program(record_launches, compile_for, atomics_in, row, col):
    """A maximum in any order, of bits: no thread waits for another program's."""
    options = CastOptions(FORMATS[0], "tensorwise", False, row, col, torch.ones(()), torch.ones(()))
    with record_launches(quantize) as launches:
        quantize.quantize_2d(INPUTS["bf16"], options)
        quantize.quantize_2d(INPUTS["bf16"], options._replace(amax=None))
    ptx, _ = compile_for(launches[0], "sm_90")
    atomics = atomics_in(ptx)
    assert len(atomics) == 1, atomics
    assert ".relaxed." in atomics[0]
    assert ".max.s32" in atomics[0]
    assert len(launches) == 2 - (not row), "without a layout and a slot there is nothing to do"


def test_scales_and_slots_of_any_alignment_run_one_binary(record_launches):
    """They are elements of a few tensors that have those of all layers."""
    options = CastOptions(FORMATS[0], "tensorwise", False, True, True, torch.ones(()))
    with record_launches(quantize) as launches:
        quantize.quantize_2d(INPUTS["bf16"], options._replace(amax=torch.zeros(())))
    assert {"scale_ptr", "amax_ptr"}.isdisjoint(launches[0].divisible)
    assert "x_ptr" in launches[0].divisible


def _compile(launches, compile_all):
    for ptx in compile_all(launches):
        # triton-lang/triton#11111: next to these, transposed one-byte stores are corrupted.
        assert "min.NaN" not in ptx
        assert "max.NaN" not in ptx


def test_hardware_conversion_is_used(record_launches, compile_for):
    with record_launches(quantize) as launches:
        for dtype in FORMATS:
            options = CastOptions(dtype, "block_1x128", False, True, True)
            quantize.quantize_2d(INPUTS["bf16"], options)
    for launch, name in zip(launches, ("e4m3x2", "e5m2x2"), strict=True):
        ptx, _ = compile_for(launch, "sm_90")
        assert f"cvt.rn.satfinite.{name}.f32" in ptx


@pytest.mark.parametrize("granularity", ["tensorwise", "block_1x128", "block_1x32"])
@pytest.mark.parametrize("name", ["bf16", "bf16 odd rows"])
def test_tile_is_moved_in_whole_sectors(record_launches, compile_for, name, granularity):
    """Whatever the number of rows: 8 elements of a row to a thread, 16 bytes of a column."""
    with record_launches(quantize) as launches:
        options = CastOptions(FORMATS[0], granularity, True, True, True)
        quantize.quantize_2d(INPUTS[name], options)
    ptx, _ = compile_for(launches[-1], "sm_90")
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v2.b32" in ptx
    assert "st.global.v4.b32" in ptx
    assert "st.global.b8" not in ptx


def test_a_cast_of_any_rows_that_raises_its_slot_stores_16_bytes(record_launches, compile_for):
    options = CastOptions(
        FORMATS[0], "tensorwise", False, True, True, torch.ones(()), torch.ones(())
    )
    with record_launches(quantize) as launches:
        quantize.quantize_2d(INPUTS["bf16 odd rows"], options)
    ptx, _ = compile_for(launches[0], "sm_90")
    assert ptx.count("st.global.v4.b32") >= 2
    assert "st.global.b8" not in ptx


@pytest.mark.parametrize(
    ("granularity", "known", "bytes_per_element"),
    [
        ("tensorwise", (torch.ones(()),), 4),
        ("tensorwise", (torch.ones(()), torch.ones(())), 4),
        ("block_1x128", (), 4),
        ("block_128x128", (), 4),
        ("block_1x32", (), 4),
        ("tensorwise", (), 6),
        ("rowwise", (), 8),
    ],
)
def test_reads_and_writes_per_element(record_launches, granularity, known, bytes_per_element):
    """Payload traffic of a bf16 matrix in both layouts: the reads are those of the launches."""
    reads = {"amax": 1, "column_amax": 1, "cast": 1, "quantize_rows": 1, "quantize_blocks": 1}
    with record_launches(quantize) as launches:
        options = CastOptions(FORMATS[0], granularity, False, True, True, *known)
        quantize.quantize_2d(INPUTS["bf16"], options)
    names = [launch.kernel.__name__.strip("_").removesuffix("_kernel") for launch in launches]
    assert 2 * sum(reads[name] for name in names) + 2 == bytes_per_element
