"""The benchmark of experts at toy size."""

import pytest
import torch

from benchmarks import bench_moe
from benchmarks.bench_moe import BF16, BLOCK, VARIANTS
from benchmarks.rows import read_rows
from benchmarks.shapes import TOY_MOE_BLOCKS
from tests.waits import Waits

CPU = torch.device("cpu")
FLOORS = {"output_db": 22.5, "grad_input_db": 21.5, "grad_weight_db": 20.0}
"""As in tests/torch_fp8/nn; the worst gradient is that of few scores."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Rows of one run at toy size."""
    csv = tmp_path_factory.mktemp("moe") / "moe.csv"
    patch = pytest.MonkeyPatch()
    patch.setattr("sys.argv", ["bench_moe", "--toy", "--csv", str(csv)])
    with patch.context():
        bench_moe.main()
    patch.undo()
    return read_rows(csv)


@pytest.mark.long
def test_every_variant_has_a_time_errors_and_saved_bytes(rows):
    assert len(rows) == len(TOY_MOE_BLOCKS) * 2 * len(VARIANTS)
    for row in rows:
        assert not row["note"]
        assert float(row["median_ms"]) > 0
        assert float(row["speedup"]) > 0
        if row["variant"] == BF16:
            assert float(row["saved_share"]) == 1
        else:
            assert all(float(row[name]) >= floor for name, floor in FLOORS.items()), row


@pytest.mark.long
def test_a_block_saves_least(rows):
    for start in range(0, len(rows), len(VARIANTS)):
        shares = {r["variant"]: float(r["saved_share"]) for r in rows[start : start + 4]}
        assert min(shares, key=shares.get) == BLOCK
        assert shares[BLOCK] < 0.3  # with the padding of few rows


def test_a_block_waits_for_no_result():
    """All but the grouped GEMM, whose reference on the CPU reads the ends of groups."""
    case = bench_moe.build(TOY_MOE_BLOCKS["GPT-OSS-20B"], 32, "random", CPU)
    run = bench_moe.step(bench_moe.variant_of(BLOCK, case.experts), case)
    with Waits() as waits:
        run()
    assert waits.count == 0
