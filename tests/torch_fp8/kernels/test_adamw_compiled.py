import itertools
import re

import pytest
import torch

from tests.internals import Record, StepScalars, WeightPayload, stream_keys
from tests.internals import kernels_adamw as adamw
from tests.kernel_cases.optimizer import GRADS, WEIGHTS
from tests.kernel_cases.states import optimizer_matrix

LOW_BITS = ("bf16 with 8 bits",)
PAYLOADS = ("tensorwise", "block_128x128")
COLS = {"flat": 64, "rows": 48, "any": 33}
REGISTERS = 168  # 12 programs of a warp in a multiprocessor of 65536
SCALARS = StepScalars(0.1, 0.999, 0.001, 1e-3, 1.0, 1e-8, 1.0, 0.0, False, 1)


@pytest.fixture
def launch_of(record_launches):
    """`launch_of(weight, grad, layout)` -> the launches of a step and of the RMS, both decays."""

    def launch(weight, grad, layout):
        matrix = optimizer_matrix(4, COLS[layout], *WEIGHTS[weight], GRADS[grad])
        entries = [(matrix, SCALARS), (matrix, SCALARS._replace(weight_decay=0.1))]
        with record_launches(adamw) as launches:
            adamw.adamw_step(entries)
            adamw.update_rms(entries)
        return {launch.key: launch for launch in launches}.values()

    return launch


@pytest.mark.long
def test_every_class_compiles_without_spills(launch_of, compile_all):
    of_classes = [launch_of(*each) for each in itertools.product(WEIGHTS, GRADS, COLS)]
    for launches in of_classes:
        assert [launch.kernel.__name__ for launch in launches] == [
            "adamw_step_kernel",
            "update_squares_kernel",
            "update_rms_kernel",
            "update_squares_kernel",
        ]
    compile_all(itertools.chain(*of_classes), REGISTERS, shared=4096)


@pytest.mark.parametrize(("grad", "most"), [("bf16", 102), ("8-bit", 111)])
def test_a_step_takes_a_hundred_instructions_an_element(grad, most, launch_of, count_instructions):
    """At four a cycle, 132 multiprocessors and 1.9 GHz that is 3.2 ms for a billion elements."""
    step = next(iter(launch_of("bf16 with 8 bits", grad, "flat")))
    elements = dict(step.constants)["GROUPS"]  # of a thread: groups and a warp's threads are 32
    assert count_instructions(step, "sm_90") <= most * elements


@pytest.mark.parametrize("name", ["weight", "residual", "grad"])
def test_one_tensor_that_is_not_aligned_makes_elements_move_one_by_one(name):
    matrix = optimizer_matrix(4, 64, *WEIGHTS["bf16 with 8 bits"], torch.bfloat16)
    tensor = getattr(matrix, name)
    shifted = tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape)
    for each, layout in ((matrix, "flat"), (matrix._replace(**{name: shifted}), "any")):
        assert [kind.layout for kind in adamw._classes([(each, SCALARS)])] == [layout]


@pytest.mark.long
def test_a_step_with_the_amax_compiles_without_spills(record_launches, compile_all):
    classes = list(itertools.product(LOW_BITS, ("bf16", "8-bit"), COLS.values()))
    with record_launches(adamw) as launches:
        for weight, grad, cols in classes:
            matrix = optimizer_matrix(4, cols, *WEIGHTS[weight], GRADS[grad])
            adamw.adamw_step([(matrix._replace(amax=torch.zeros(())), SCALARS)])
    assert len(launches) == len(classes)
    compile_all(launches, REGISTERS)


def with_payload(matrix, granularity, power_of_two):
    qdata = torch.empty(matrix.weight.shape, dtype=torch.uint8)
    scale = torch.ones(()) if granularity == "tensorwise" else torch.ones(1, 1)
    payload = WeightPayload(granularity, power_of_two, qdata, scale)
    amax = torch.zeros(()) if granularity == "tensorwise" else None
    return matrix._replace(payload=payload, amax=amax)


@pytest.mark.long
def test_a_step_with_the_payload_compiles_without_spills(record_launches, compile_all):
    with record_launches(adamw) as launches:
        for weight, grad in itertools.product((*LOW_BITS, "fp32"), ("bf16", "8-bit")):
            for granularity, power_of_two in itertools.product(PAYLOADS, (False, True)):
                before = len(launches)
                matrix = optimizer_matrix(32, 64, *WEIGHTS[weight], GRADS[grad])
                adamw.adamw_step([(with_payload(matrix, granularity, power_of_two), SCALARS)])
                names = [launch.kernel.__name__ for launch in launches[before:]]
                assert names == ["adamw_step_kernel", "cast_weights_kernel"]
    for ptx in compile_all(launches, REGISTERS):
        # The payload leaves in 16 bytes at a time.
        narrow = set(re.findall(r"(?:ld|st)\.global\.b\d+", ptx.split(".section")[0]))
        assert "st.global.b16" not in narrow
        # One byte at a time, only the scales: a group's 32 elements have two, in a step.
        assert len(re.findall(r"st\.global\.b8", ptx)) <= 4


def step_of(launches, compile_for):
    """The step's instructions, as PTX."""
    step, *_ = launches
    ptx, _ = compile_for(step, "sm_90")
    return ptx.split(".section")[0]


@pytest.mark.parametrize("layout", ["flat", "rows"])
def test_step_moves_16_bytes_at_a_time(layout, launch_of, compile_for):
    """A thread has 16 elements: of 2 bytes in two accesses, of 1 byte in one."""
    ptx = step_of(launch_of("bf16 with 8 bits", "bf16", layout), compile_for)
    assert ptx.count("ld.global.v4.b32") == 2 + 2 + 1 + 1 + 1
    assert ptx.count("st.global.v4.b32") == 2 + 1 + 1 + 1
    narrow = set(re.findall(r"(?:ld|st)\.global\.b\d+", ptx))
    # Scales, and what is loaded of the table once.
    assert narrow == {"ld.global.b8", "st.global.b8", "ld.global.b32", "ld.global.b64"}


@pytest.mark.parametrize(("weight", "grad"), [*itertools.product(WEIGHTS, GRADS)])
def test_step_rounds_every_product_and_keeps_denormals(weight, grad, launch_of, compile_for):
    """Nothing is contracted but the residuals of a root and of a quotient, 16 elements each."""
    ptx = step_of(launch_of(weight, grad, "flat"), compile_for)
    assert ptx.count("fma.rn.f32") == 16 * (2 + 4)
    flushing = set(re.findall(r"\S+\.ftz\S*", ptx))
    assert flushing == {"rsqrt.approx.ftz.f32", "rcp.approx.ftz.f32"}
    assert "call" not in ptx


def test_what_follows_the_table_is_aligned_however_many_matrices():
    """Or Triton would compile each kernel twice, for even and odd numbers of them."""
    assert len(Record._fields) * 8 % 16 == 0


def test_one_launch_for_each_class(record_launches):
    shapes = ((64, 64), (128, 256), (3, 8192), (1, 32))
    kinds = [(WEIGHTS["bf16 with 8 bits"], torch.bfloat16), (WEIGHTS["fp32"], torch.float32)]
    entries = [
        (optimizer_matrix(*shape, *kind, dtype), SCALARS)
        for shape in shapes
        for kind, dtype in kinds
    ]
    with record_launches(adamw) as launches:
        adamw.adamw_step(entries)
        assert [launch.grid for launch in launches] == [(1 + 2 + 2 + 1,)] * 2
        adamw.adamw_step([])
        adamw.adamw_step([(optimizer_matrix(0, 64, *kinds[0][0], torch.bfloat16), SCALARS)])
    assert len(launches) == 2


@pytest.mark.parametrize("grad", ["bf16", "8-bit"])
def test_a_kept_table_takes_the_gradients_and_scalars_of_each_step(grad):
    entries = [
        (optimizer_matrix(rows, 64, *WEIGHTS["bf16 with 8 bits"], GRADS[grad]), SCALARS)
        for rows in (4, 600)
    ]
    memos = [[], []]
    for step in range(3):
        entries = [
            (
                matrix._replace(
                    grad=optimizer_matrix(
                        matrix.weight.shape[0], 64, *WEIGHTS["bf16 with 8 bits"], GRADS[grad]
                    ).grad,
                    number=i,
                ),
                scalars._replace(stream=step, step_size=1e-3 * (i + 1), maximize=step == 1),
            )
            for i, (matrix, scalars) in enumerate(entries)
        ]
        kept = [(m._replace(memo=memo), s) for (m, s), memo in zip(entries, memos, strict=True)]
        (kind,) = adamw._classes(entries)
        assert list(adamw._classes(kept)) == [kind]
        factors = [torch.ones(()), None]
        new, old = (
            adamw._tables(each, adamw._classes(each)[kind], kind, lr_multiplier=factors)
            for each in (entries, kept)
        )
        assert all(torch.equal(x, y) for x, y in zip(new[:2], old[:2], strict=True))
        key = Record._fields.index("key0")
        keys = [list(stream_keys(i, after=step)) for i in range(2)]
        assert old[0][:, key : key + 2].tolist() == keys
        sizes = old[0][:, Record._fields.index("step_size")].int().view(torch.float32)
        assert sizes.tolist() == pytest.approx([1e-3, 2e-3])
        assert new[2] == old[2] == 1 + 600 * 2 // adamw.CHUNK + 1
    assert adamw._template.cache_info().hits
