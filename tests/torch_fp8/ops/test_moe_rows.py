import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernel_cases.experts import CHOICES, EXPERTS, ROWWISE, payload_of
from tests.waits import Waits
from torch_fp8.ops.moe_rows import combine_rows, gather_rows, moe_route, transpose_groups
from torch_fp8.ops.quantize import quantize

# torch's check of the schema multiplies the inputs, which FP8 on the CPU does not (torch 2.13).
CHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("name", CHOICES)
def test_tokens_transposed_at_once_are_those_gathered_first(name):
    route, count = moe_route(CHOICES[name], EXPERTS), len(CHOICES[name])
    x = payload_of(count, 48)
    at_once = transpose_groups(x, route.offs, route.token)
    after = transpose_groups(gather_rows(x, route.token), route.offs)
    for a, b in zip(at_once[:2], after[:2], strict=True):
        assert torch.equal(a.float().nan_to_num(-1), b.float().nan_to_num(-1))


def test_what_lies_behind_the_groups_is_zero():
    x = payload_of(77, 48)
    transposed = transpose_groups(x, torch.tensor([16, 16, 64], dtype=torch.int32))
    assert not transposed.qdata.float()[:, 64:].any()
    assert (transposed.scale[1] == 1).all(), "an empty group's scale is one"


def test_rows_are_rounded_once():
    rows = torch.tensor([[1.0], [2.0**-8], [2.0**-8]], dtype=torch.bfloat16)
    total = combine_rows(rows, torch.tensor([[0, 1, 2]]))
    assert total.item() == 1.0 + 2.0**-7, "one after the other, each half is lost"


def test_operators_keep_the_contract_of_torch_library():
    route = moe_route(CHOICES["random"], EXPERTS)
    x = quantize(torch.randn(61, 48), ROWWISE)
    ops = torch.ops.torch_fp8
    calls = [
        (ops.gather_payload.default, (x.qdata, x.scale, route.token)),
        (ops.transpose_payload.default, (x.qdata, x.scale, route.offs, route.token)),
        (ops.transpose_payload.default, (x.qdata, x.scale, route.offs, None)),
    ]
    for operator, args in calls:
        torch.library.opcheck(operator, args, test_utils=CHECKS)
    rows = torch.randn(len(route.slot), 48)
    torch.library.opcheck(ops.combine_rows.default, (rows, route.row))


def test_the_order_of_rows_is_found_without_a_wait():
    choice = CHOICES["random"]
    with Waits(lambda: []) as waits:
        route = moe_route(choice, EXPERTS)
    assert waits.count == 0
    with FakeTensorMode():
        fake = moe_route(torch.empty(choice.shape, dtype=torch.long), EXPERTS)
    assert [t.shape for t in fake] == [t.shape for t in route]
