import torch

from benchmarks import bench_moe
from benchmarks.bench_moe import BLOCK
from benchmarks.shapes import TOY_MOE_BLOCKS
from tests.waits import Waits

CPU = torch.device("cpu")


def test_a_block_waits_for_no_result():
    """All but the grouped GEMM, whose reference on the CPU reads the ends of groups."""
    case = bench_moe.build(TOY_MOE_BLOCKS["GPT-OSS-20B"], 32, "random", CPU)
    run = bench_moe.step(bench_moe.variant_of(BLOCK, case.experts), case)
    with Waits() as waits:
        run()
    assert waits.count == 0
