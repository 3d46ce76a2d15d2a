"""The kernels of experts on a card: bits equal to the reference on the CPU, but for exp's."""

import pytest
import torch

from tests.kernel_cases import experts
from torch_fp8.ops import expert_gate, moe_rows

pytestmark = pytest.mark.gpu
COLUMNS = (*experts.COLUMNS, 2048)


def test_rows_are_gathered_and_added_up():
    experts.check_rows(moe_rows, "cuda", COLUMNS)


@pytest.mark.parametrize("gathers", [False, True])
def test_groups_are_transposed(gathers):
    experts.check_transposition(moe_rows, "cuda", gathers, COLUMNS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", experts.FORMS)
def test_gates_and_their_gradients(form, bias, dtype):
    experts.check_gate(expert_gate, "cuda", experts.FORMS[form], bias, dtype, COLUMNS)
