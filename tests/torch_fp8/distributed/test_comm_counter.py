"""The counter of the bytes that collectives move: comm_counter_cases.py, on four ranks."""

import pytest
import torch

from tests.comm_counter import count_communication

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def ranks(run_cases):
    return run_cases("comm_counter_cases", 4)


def row(kind, payload, sent, *, calls=1, dtype="float32", ranks=4):
    return [kind, dtype, ranks, calls, payload, sent]


@pytest.mark.parametrize(
    ("kind", "payload", "sent"),
    [
        ("all-reduce", 32, 48),
        ("all-gather", 128, 96),
        ("reduce-scatter", 128, 96),
        ("all-to-all", 128, 96),
        ("broadcast", 32, 32),
    ],
)
def test_bytes_of_a_collective(case, kind, payload, sent):
    for rank, value in enumerate(case("collectives")):
        assert value["barrier"] == []
        assert value["pair"] == [row("all-reduce", 32, 32, ranks=2)]
        found = [rows for name, rows in value.items() if name.startswith(kind)]
        sends = sent if kind != "broadcast" or rank == 1 else 0
        assert len(found) >= 2
        assert found == [[row(kind, payload, sends)]] * len(found)


def test_what_stays_on_a_rank_is_not_sent(case):
    for rank, value in enumerate(case("uneven")):
        assert value == [row("all-to-all", 20, 20 - 2 * (rank + 1), dtype="bfloat16")]


def test_what_dtensor_makes_of_its_operators(case):
    gather = row("all-gather", 256, 192)
    assert case("dtensor") == [[[gather], [gather]]] * 4


def test_data_parallel(case):
    """128 weights: the reducer's all-reduce in float32, a stock hook's in FP16."""
    expected = [row("all-reduce", 512, 768)], [row("all-reduce", 256, 384, dtype="float16")]
    assert case("data_parallel") == [list(expected)] * 4


def test_fully_sharded(case):
    """128 weights in BF16, gathered once more in backward where they were freed in forward."""
    gathered = row("all-gather", 512, 384, calls=4, dtype="bfloat16")
    scattered = row("reduce-scatter", 256, 192, calls=2, dtype="bfloat16")
    assert case("fsdp") == [[gathered, scattered]] * 4


def test_compiled_graphs_stay_compiled(case):
    assert case("compiled") == [[[[row("all-reduce", 32, 48)]] * 2, 1]] * 4


def test_contexts_within_contexts_count_each(case):
    assert case("nested") == [[[row("all-reduce", 64, 96, calls=2)], [1], False]] * 4


def test_one_rank_sends_nothing(single_process_group):
    with count_communication() as count:
        torch.distributed.all_reduce(torch.ones(8))
        torch.distributed.broadcast(torch.ones(8), 0)
    assert (count.calls, count.payload_bytes, count.bytes_sent) == (2, 64, 0)
