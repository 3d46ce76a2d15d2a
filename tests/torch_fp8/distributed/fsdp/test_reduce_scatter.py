import pytest
import torch
import torch.distributed as dist

from tests.internals import factor_of, layout_of, pack_parts, structure_of, unpack_parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "sizes",
    [
        [(64, True)],
        [(96, True), (10, False)],
        [(33, True), (31, True), (3, False), (64, True), (1, False)],
        [(50, False)],
        [(0, True), (32, True), (0, False)],
    ],
    ids=str,
)
def test_sums_come_back_to_their_places(sizes, dtype):
    """Numbers that 8 bits hold, so that sums are exact."""
    numel = sum(size for size, _ in sizes)
    parts = torch.randint(-8, 9, (3, numel), generator=torch.Generator().manual_seed(0))
    structure = structure_of(sizes)
    messages = pack_parts(parts.to(dtype), structure)
    assert messages.shape == (3, layout_of(structure).num_bytes)
    output = torch.full((numel,), torch.nan, dtype=dtype)
    unpack_parts(messages, structure, output, 0.5)
    assert torch.equal(output, (parts.sum(0) * 0.5).to(dtype))


def test_a_parameter_does_not_scale_the_next_one():
    parts = torch.cat([torch.full((2, 33), 1e6), torch.full((2, 31), 1e-6)], dim=1)
    structure = structure_of([(33, True), (31, True)])
    output = torch.empty(64)
    unpack_parts(pack_parts(parts, structure), structure, output, 1.0)
    torch.testing.assert_close(output, parts.sum(0), rtol=0.04, atol=0)


def test_factors_of_the_reductions_that_fsdp_asks_for():
    assert factor_of(dist.ReduceOp.SUM, 4) == 1
    assert factor_of(dist.ReduceOp.AVG, 4) == 0.25
    assert factor_of(dist._make_nccl_premul_sum(0.125), 4) == 0.125
    with pytest.raises(ValueError, match="sum or an average"):
        factor_of(dist.ReduceOp.MAX, 4)
