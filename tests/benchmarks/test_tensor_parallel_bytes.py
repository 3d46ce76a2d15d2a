"""Bytes of tensor and sequence parallelism, counted on fake tensors."""

import pytest

from benchmarks.evidence.tensor_parallel_bytes import rows

pytestmark = pytest.mark.long


def test_bytes_of_a_block_of_llama():
    made = rows(8)
    assert len(made) == 9
    most = {"sequence parallel": 0.76, "sequence parallel, gathered again": 0.71}
    for row in made:
        assert float(row["ratio"]) <= most.get(row["case"], 1), row
