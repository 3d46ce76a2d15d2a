"""Fused experts on two ranks against one process."""

import pytest

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def cases(run_parallel_cases):
    return run_parallel_cases("moe_cases", 2)


def test_experts_under_ddp_have_8_bit_gradients(cases):
    for want, losses, agreement, eight_bit in cases["ddp"]:
        assert losses == pytest.approx(want, rel=0.005)
        assert agreement > 20  # gradients in 8 bits, summed once more over ranks
        assert eight_bit >= 2


@pytest.mark.parametrize("case", ["fsdp2", "expert_parallel"])
def test_sharded_experts_train_as_in_one_process(cases, case):
    """Expert parallelism weights rows behind the second GEMM, not before its cast."""
    for want, losses, agreement in cases[case]:
        assert losses == pytest.approx(want, rel=0.005)
        assert agreement > 20
