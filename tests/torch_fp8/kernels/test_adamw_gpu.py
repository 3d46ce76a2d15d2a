"""The optimizer's kernels on a card: bytes equal to the reference on the CPU."""

import pytest
import torch

from torch_fp8.adamw import (
    StepScalars,
    WeightPayload,
    adamw_step_reference,
    update_rms_reference,
)
from torch_fp8.formats import E4M3
from torch_fp8.quantize import quantize_layouts
from torch_fp8.random_bits import stream_keys
from torch_fp8.recipe import CastSpec

pytestmark = pytest.mark.gpu

WEIGHTS = {
    "bf16 with 8 bits": (torch.bfloat16, 8),
    "bf16 with 4 bits": (torch.bfloat16, 4),
    "bf16 alone": (torch.bfloat16, 0),
    "fp32": (torch.float32, 0),
}
GRADS = {"bf16": torch.bfloat16, "fp32": torch.float32, "8-bit": torch.uint8}
SHAPES = ((1000, 1024), (5, 48), (36, 33), (3, 7), (2, 70000), (17, 4304), (0, 64), (1, 1))


def scalars_of(step, i, **changes):
    """Of a step of the i-th matrix."""
    scalars = StepScalars(
        beta1_complement=1 - 0.9,
        beta2=0.999,
        beta2_complement=1 - 0.999,
        step_size=1e-3 * (i + 1) / (1 - 0.9**step),
        inv_sqrt_correction=(1 - 0.999**step) ** -0.5,
        eps=1e-8,
        decay=1 - 1e-3 * 0.1,
        weight_decay=0.0,
        maximize=False,
        keys=stream_keys(0, step, i),
    )
    return scalars._replace(**changes)


@pytest.mark.parametrize("exponent", [0, -30, 30], ids=["usual", "tiny", "huge"])
@pytest.mark.parametrize("grad", GRADS)
@pytest.mark.parametrize("weight", WEIGHTS)
def test_three_steps_equal_the_reference(
    weight, grad, exponent, make_matrix, move_matrix, differences_of
):
    from torch_fp8.kernels.adamw import adamw_step

    want = [
        make_matrix(*shape, *WEIGHTS[weight], GRADS[grad], seed=i, exponent=exponent)
        for i, shape in enumerate(SHAPES)
    ]
    for step in range(1, 4):
        got = [move_matrix(matrix, "cuda") for matrix in want]
        scalars = [scalars_of(step, i) for i in range(len(SHAPES))]
        adamw_step(list(zip(got, scalars, strict=True)))
        for matrix, expected, numbers in zip(got, want, scalars, strict=True):
            adamw_step_reference(expected, numbers)
            assert differences_of(matrix, expected) == [], tuple(expected.weight.shape)


@pytest.mark.parametrize(
    "changes",
    [{"weight_decay": 0.1, "decay": 1.0}, {"maximize": True}, {"eps": 0.01}],
    ids=["coupled", "maximize", "eps"],
)
def test_choices_equal_the_reference(changes, make_matrix, move_matrix, differences_of):
    from torch_fp8.kernels.adamw import adamw_step

    multiplier = torch.tensor(0.37)
    for kind in WEIGHTS.values():
        place = (2**20 + 1, 64, 2**14)  # a shard, with indices beyond 2^32
        want = make_matrix(300, 96, *kind, torch.float32, place=place)
        got, scalars = move_matrix(want, "cuda"), scalars_of(1, 0, **changes)
        adamw_step([(got, scalars)], [multiplier.cuda()])
        adamw_step_reference(want, scalars, multiplier)
        assert differences_of(got, want) == []


@pytest.mark.parametrize("wrong", [None, 0.5, float("nan")], ids=["kept", "grown", "nan"])
@pytest.mark.parametrize("transposed", [False, True], ids=["row", "both"])
@pytest.mark.parametrize("granularity", ["tensorwise", "block_128x128"])
@pytest.mark.parametrize("weight", ["bf16 with 8 bits", "bf16 with 4 bits", "fp32"])
def test_the_payload_is_a_cast_of_the_new_weight(
    weight, granularity, transposed, wrong, make_matrix, move_matrix, differences_of
):
    from torch_fp8.kernels.adamw import adamw_step

    spec = CastSpec(E4M3, granularity, power_of_two=True)
    want, got, payloads = [], [], []
    for i, shape in enumerate(((1024, 1024), (144, 160), (16, 32), (4304, 96))):
        matrix = make_matrix(*shape, *WEIGHTS[weight], torch.bfloat16, seed=i)
        row, col = quantize_layouts(matrix.weight.cuda(), spec, row=True, col=transposed)
        if wrong is not None:
            row.scale.view(-1)[::2] *= wrong
        blocks = granularity == "block_128x128"
        payload = WeightPayload(
            granularity,
            row.qdata,
            row.scale,
            row.scale if blocks else torch.zeros((), device="cuda"),
            None if col is None else col.qdata,
            None if col is None or not blocks else col.scale,
        )
        want.append(matrix._replace(amax=None if blocks else torch.zeros(())))
        got.append(move_matrix(want[-1], "cuda")._replace(payload=payload))
        payloads.append(payload)
    scalars = [scalars_of(1, i) for i in range(len(want))]
    adamw_step(list(zip(got, scalars, strict=True)))
    for matrix, expected, numbers, payload in zip(got, want, scalars, payloads, strict=True):
        adamw_step_reference(expected, numbers)
        assert differences_of(matrix, expected) == []
        row, col = quantize_layouts(expected.weight, spec, row=True, col=True)
        pairs = [(payload.qdata.view(torch.uint8), row.qdata.view(torch.uint8))]
        pairs.append((payload.new_scale, row.scale))
        if payload.qdata_t is not None:
            pairs.append((payload.qdata_t.view(torch.uint8), col.qdata.view(torch.uint8)))
        if payload.scale_t is not None:
            pairs.append((payload.scale_t, col.scale))
        assert all(torch.equal(mine.cpu(), reference) for mine, reference in pairs)


def test_two_runs_give_the_same_bits(make_matrix, move_matrix, differences_of):
    from torch_fp8.kernels.adamw import adamw_step, update_rms

    start = make_matrix(3000, 4096, torch.bfloat16, 8, torch.bfloat16)
    runs, norms = [], []
    for _ in range(2):
        matrix = move_matrix(start, "cuda")
        for step in range(1, 6):
            norms.append(update_rms([(matrix, scalars_of(step, 0))]).item())
            adamw_step([(matrix, scalars_of(step, 0))])
        runs.append(move_matrix(matrix, "cpu"))
    assert differences_of(*runs) == []
    assert norms[:5] == norms[5:]


@pytest.mark.parametrize("coupled", [0.0, 0.1], ids=["decoupled", "coupled"])
@pytest.mark.parametrize("grad", GRADS)
def test_update_rms_agrees_with_the_reference(grad, coupled, make_matrix, move_matrix):
    from torch_fp8.kernels.adamw import update_rms

    scalars = scalars_of(3, 0, weight_decay=coupled)
    matrices = [
        make_matrix(*shape, *kind, GRADS[grad], seed=i)
        for i, shape in enumerate(SHAPES)
        for kind in WEIGHTS.values()
    ]
    got = update_rms([(move_matrix(matrix, "cuda"), scalars) for matrix in matrices])
    want = torch.stack([update_rms_reference(matrix, scalars) for matrix in matrices])
    torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=0)


def test_weights_with_more_than_2_to_the_31_elements(make_matrix, move_matrix, differences_of):
    """The last rows of a matrix step as they do alone, with the indices that they have."""
    from torch_fp8.kernels.adamw import adamw_step

    rows, cols, last = 2**17 + 3, 2**14, 3
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.fail("needs 24 GiB of free device memory")
    alone = make_matrix(last, cols, torch.bfloat16, 8, torch.bfloat16, place=(rows - last, 0, None))

    def whole(part):
        if not isinstance(part, torch.Tensor):
            return type(part)(*map(whole, part)) if isinstance(part, tuple) else part
        full = torch.zeros(rows, part.shape[1], dtype=part.dtype, device="cuda")
        full[-last:] = part
        return full

    matrix = type(alone)(*map(whole, alone))._replace(row=0)
    adamw_step([(matrix, scalars_of(1, 0))])
    adamw_step_reference(alone, scalars_of(1, 0))

    def end(part):
        if not isinstance(part, torch.Tensor):
            return type(part)(*map(end, part)) if isinstance(part, tuple) else part
        return part[-last:]

    assert differences_of(type(alone)(*map(end, matrix)), alone) == []
