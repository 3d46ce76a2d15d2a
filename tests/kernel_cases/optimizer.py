"""Cases of the optimizer's step on 8-bit states: bytes equal to the reference's.

A `Step` is `torch_fp8.kernels.adamw.adamw_step`, or what stands for it.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.internals import E4M3, CastOptions, CastSpec, StepScalars, WeightPayload, stream_state
from tests.kernel_cases.comparison import close, require
from tests.kernel_cases.states import matrix_differences, moved, optimizer_matrix
from torch_fp8.ops.adamw import adamw_step_reference, update_rms_reference
from torch_fp8.ops.quantize import quantize_layouts

Step = Callable[..., Any]

WEIGHTS = {
    "bf16 with 8 bits": (torch.bfloat16, 8),
    "bf16 alone": (torch.bfloat16, 0),
    "fp32": (torch.float32, 0),
}
GRADS = {"bf16": torch.bfloat16, "fp32": torch.float32, "8-bit": torch.uint8}
SHAPES = ((1000, 1024), (5, 48), (36, 33), (3, 7), (2, 70000), (17, 4304), (0, 64), (1, 1))
CHOICES: dict[str, dict[str, Any]] = {
    "coupled": {"weight_decay": 0.1, "decay": 1.0},
    "maximize": {"maximize": True},
    "eps": {"eps": 0.01},
}
PAYLOAD_SHAPES = ((1024, 1024), (144, 160), (16, 32), (4304, 96))


def kernel() -> Step:
    from tests.internals import adamw_step

    return adamw_step


def scalars_of(step: int, i: int, **changes: Any) -> StepScalars:
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
        stream=stream_state(0, step, i),
    )
    return scalars._replace(**changes)


def check_steps(
    step: Step,
    device: str,
    weight: str,
    grad: str,
    exponent: int = 0,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    finds_amax: bool = False,
    steps: int = 3,
) -> None:
    """Check steps of matrices of all shapes at once.

    Args:
        finds_amax: whether the amaxes of the new weights are asked for.
    """
    want = [
        optimizer_matrix(*(*shape, *WEIGHTS[weight], GRADS[grad]), seed=i, exponent=exponent)
        for i, shape in enumerate(shapes)
    ]
    if finds_amax:
        want = [matrix._replace(amax=torch.zeros(())) for matrix in want]
    for number in range(1, steps + 1):
        got = [moved(matrix, device) for matrix in want]
        scalars = [scalars_of(number, i) for i in range(len(shapes))]
        step(list(zip(got, scalars, strict=True)))
        for matrix, expected, numbers in zip(got, want, scalars, strict=True):
            adamw_step_reference(expected, numbers)
            shape = tuple(expected.weight.shape)
            _same(matrix, expected, f"{weight}, gradient {grad}, {shape}")


def check_choices(step: Step, device: str, shape: tuple[int, int]) -> None:
    """Check other scalars, a multiplier of the learning rate, and a shard far into its weight."""
    multiplier, place = torch.tensor(0.37), (2**20 + 1, 64, 2**14)  # indices beyond 2^32
    for (name, changes), (weight, kind) in itertools.product(CHOICES.items(), WEIGHTS.items()):
        want = optimizer_matrix(*shape, *kind, torch.float32, place=place)
        got, scalars = moved(want, device), scalars_of(1, 0, **changes)
        step([(got, scalars)], [multiplier.to(device)])
        adamw_step_reference(want, scalars, multiplier)
        _same(got, want, f"{weight}, {name}")


def check_values(step: Step, device: str) -> None:
    """Check zeros, what is not finite and has an amax, and an address of an odd element."""
    zeros, bad, odd = (
        optimizer_matrix(9, 64, torch.bfloat16, 8, torch.bfloat16, seed=i) for i in range(3)
    )
    for tensor in (zeros.grad, zeros.exp_avg.qdata, zeros.exp_avg_sq.qdata):
        tensor[:, 5:50], tensor[4] = 0, 0
    zeros.weight[:, :20] = 0
    bad.grad[1, 3], bad.grad[5, 60] = float("nan"), float("inf")
    bad.weight[2, 2], bad.weight[3, 3] = float("inf"), float("nan")
    # What overflows when squared is NaN in this step, in the reference in the next.
    overflow = optimizer_matrix(1, 32, torch.bfloat16, 8, torch.float32)
    overflow.grad[0, 7] = 1e25
    want = [zeros, bad._replace(amax=torch.tensor(0.3)), odd, overflow]
    got, scalars = [moved(matrix, device) for matrix in want], scalars_of(3, 0)
    memory = torch.empty(odd.weight.numel() + 1, dtype=odd.weight.dtype, device=device)
    got[2] = got[2]._replace(weight=memory[1:].view(9, 64).copy_(odd.weight))
    step([(matrix, scalars) for matrix in got])
    for matrix, expected, what in zip(got, want[:3], ("zeros", "not finite", "odd"), strict=False):
        adamw_step_reference(expected, scalars)
        _same(matrix, expected, what)
    spoiled = got[3].weight.isnan().nonzero().tolist()
    require(spoiled == [[0, 7]], f"g^2 overflows: NaN at {spoiled}")


def check_payload(
    step: Step,
    device: str,
    weight: str,
    granularity: Any,
    power_of_two: bool,
    shapes: Sequence[tuple[int, int]] = PAYLOAD_SHAPES,
    grad: str = "bf16",
) -> None:
    spec = CastSpec(E4M3, granularity, power_of_two=power_of_two)
    options = CastOptions.of(spec, rowwise=True, columnwise=False)
    want, got, payloads = [], [], []
    for i, shape in enumerate(shapes):
        matrix = optimizer_matrix(*shape, *WEIGHTS[weight], GRADS[grad], seed=i)
        row, _ = quantize_layouts(matrix.weight.to(device), options)
        assert row is not None
        row.scale.fill_(float("nan"))
        row.qdata.view(torch.uint8).fill_(1)
        payload = WeightPayload(granularity, power_of_two, row.qdata, row.scale)
        blocks = granularity == "block_128x128"
        want.append(matrix._replace(amax=None if blocks else torch.zeros(())))
        got.append(moved(want[-1], device)._replace(payload=payload))
        payloads.append(payload)
    scalars = [scalars_of(1, i) for i in range(len(want))]
    step(list(zip(got, scalars, strict=True)))
    for matrix, expected, numbers, payload in zip(got, want, scalars, payloads, strict=True):
        adamw_step_reference(expected, numbers)
        what = f"{weight}, payload {granularity}, {tuple(expected.weight.shape)}"
        _same(matrix, expected, what)
        row, _ = quantize_layouts(expected.weight, options)
        assert row is not None
        equal = torch.equal(payload.qdata.cpu().view(torch.uint8), row.qdata.view(torch.uint8))
        equal = equal and torch.equal(payload.scale.cpu(), row.scale)
        require(equal, f"{what}: not a cast of the new weight")


def check_update_rms(
    update_rms: Callable[..., Any],
    device: str,
    grad: str,
    coupled: float,
    shapes: Sequence[tuple[int, int]] = SHAPES,
) -> None:
    """Check the size of an update by `torch_fp8.kernels.adamw.update_rms`, the same each time."""
    scalars = scalars_of(3, 0, weight_decay=coupled)
    matrices = [
        optimizer_matrix(*shape, *kind, GRADS[grad], seed=i)
        for i, shape in enumerate(shapes)
        for kind in WEIGHTS.values()
    ]
    pairs = [(moved(matrix, device), scalars) for matrix in matrices]
    got, again = update_rms(pairs), update_rms(pairs)
    want = torch.stack([update_rms_reference(matrix, scalars) for matrix in matrices])
    close(got, want, 1e-5, f"update_rms, gradient {grad}")
    require(torch.equal(got, again), f"update_rms, gradient {grad}: differs from run to run")


def _same(got: Any, want: Any, what: str) -> None:
    found = matrix_differences(got, want)
    require(not found, f"{what}: {', '.join(found)}")
