import pytest
import torch

from tests.kernel_cases import optimizer
from tests.kernel_cases.optimizer import GRADS, WEIGHTS
from tests.kernel_cases.states import matrix_differences, moved, optimizer_matrix
from torch_fp8.ops.adamw import adamw_step_reference

pytestmark = pytest.mark.gpu
EXPONENTS = {"usual": 0, "tiny": -30, "huge": 30}


@pytest.fixture
def step():
    return optimizer.kernel()


@pytest.mark.parametrize("exponent", EXPONENTS.values(), ids=EXPONENTS)
@pytest.mark.parametrize("grad", GRADS)
@pytest.mark.parametrize("weight", WEIGHTS)
def test_three_steps_equal_the_reference(step, weight, grad, exponent):
    optimizer.check_steps(step, "cuda", weight, grad, exponent)


def test_choices_and_values_equal_the_reference(step):
    optimizer.check_choices(step, "cuda", (300, 96))
    optimizer.check_values(step, "cuda")


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("granularity", ["tensorwise", "block_128x128"])
@pytest.mark.parametrize("weight", ["bf16 with 8 bits", "bf16 alone", "fp32"])
def test_the_payload_is_a_cast_of_the_new_weight(step, weight, granularity, power_of_two):
    optimizer.check_payload(step, "cuda", weight, granularity, power_of_two)


def test_two_runs_give_the_same_bits(step):
    start = optimizer_matrix(3000, 4096, torch.bfloat16, 8, torch.bfloat16)
    runs = []
    for _ in range(2):
        matrix = moved(start, "cuda")
        for number in range(1, 6):
            step([(matrix, optimizer.scalars_of(number, 0))])
        runs.append(moved(matrix, "cpu"))
    assert matrix_differences(*runs) == []


@pytest.mark.parametrize("coupled", [0.0, 0.1], ids=["decoupled", "coupled"])
@pytest.mark.parametrize("grad", GRADS)
def test_update_rms_agrees_with_the_reference_and_repeats(grad, coupled):
    from tests.internals import update_rms

    optimizer.check_update_rms(update_rms, "cuda", grad, coupled)


def test_weights_with_more_than_2_to_the_31_elements(step):
    rows, cols, last = 2**17 + 3, 2**14, 3
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.fail("needs 24 GiB of free device memory")
    alone = optimizer_matrix(
        last, cols, torch.bfloat16, 8, torch.bfloat16, place=(rows - last, 0, None)
    )

    def whole(part):
        if not isinstance(part, torch.Tensor):
            return type(part)(*map(whole, part)) if isinstance(part, tuple) else part
        full = torch.zeros(rows, part.shape[1], dtype=part.dtype, device="cuda")
        full[-last:] = part
        return full

    matrix = type(alone)(*map(whole, alone))._replace(row=0)
    step([(matrix, optimizer.scalars_of(1, 0))])
    adamw_step_reference(alone, optimizer.scalars_of(1, 0))

    def end(part):
        if not isinstance(part, torch.Tensor):
            return type(part)(*map(end, part)) if isinstance(part, tuple) else part
        return part[-last:]

    assert matrix_differences(type(alone)(*map(end, matrix)), alone) == []
