"""Bytes that collectives move, counted: the cases of communication_cases.py, on four ranks."""

import pytest
import torch

from tests.comm_counter import CommunicationCount, count_communication

pytestmark = pytest.mark.long


RANKS = range(4)


@pytest.fixture(scope="module")
def ranks(run_ranks):
    """What each case returned, by rank."""
    return run_ranks("communication_cases.py", len(RANKS))


def row(kind, payload, sent, *, calls=1, dtype="float32", ranks=4):
    return [kind, dtype, ranks, calls, payload, sent]


@pytest.mark.parametrize(
    ("name", "payload", "sent"),
    [
        ("all-reduce", 32, 48),
        ("all-gather", 128, 96),
        ("all-gather of one", 128, 96),
        ("reduce-scatter", 128, 96),
        ("reduce-scatter of one", 128, 96),
        ("all-to-all", 128, 96),
    ],
)
def test_bytes_of_a_collective(case, name, payload, sent):
    kind = name.removesuffix(" of one")
    for value in case("collectives"):
        assert value[name] == [row(kind, payload, sent)]


@pytest.mark.parametrize(
    ("kind", "payload", "at_root", "elsewhere"),
    [
        ("broadcast", 32, 32, 0),
        ("scatter", 128, 96, 0),
        ("reduce", 32, 0, 32),
        ("gather", 128, 0, 32),
    ],
)
def test_bytes_of_a_collective_with_a_root(case, kind, payload, at_root, elsewhere):
    for rank, value in enumerate(case("collectives")):
        assert value[kind] == [row(kind, payload, at_root if rank == 1 else elsewhere)]


def test_barriers_move_no_data(case):
    assert [value["barrier"] for value in case("collectives")] == [[]] * 4


def test_what_stays_on_a_rank_is_not_sent(case):
    for rank, value in enumerate(case("uneven")):
        assert value == [row("all-to-all", 20, 20 - 2 * (rank + 1), dtype="bfloat16")]


def test_asynchronous_collectives(case):
    assert case("asynchronous") == [[row("all-reduce", 96, 144, calls=3)]] * 4


def test_point_to_point(case):
    for value in case("point_to_point"):
        assert value == [
            row("recv", 32, 0),
            row("recv", 8, 0, dtype="uint8"),
            row("send", 32, 32),
            row("send", 8, 8, dtype="uint8"),
        ]


def test_objects_are_bytes(case):
    for sizes, pickles in case("objects"):
        assert sizes == row("all-gather", 32, 24, dtype="int64")
        assert pickles[:4] == ["all-gather", "uint8", 4, 1]
        assert 0 < pickles[5] == pickles[4] * 3 / 4


def test_a_row_for_each_size_of_group(case):
    expected = [row("all-reduce", 32, 32, ranks=2), row("all-reduce", 32, 48)]
    assert case("groups") == [expected] * 4


def test_functional_collectives(case):
    for rank, value in enumerate(case("functional")):
        assert value == [
            row("all-gather", 256, 192, calls=2),
            row("all-reduce", 32, 48),
            row("all-to-all", 128, 96),
            row("broadcast", 32, 32 if rank == 1 else 0),
            row("reduce-scatter", 128, 96),
        ]


def test_functional_collectives_in_backward(case):
    expected = [row("all-gather", 128, 96), row("reduce-scatter", 128, 96)]
    assert case("functional_backward") == [[expected, True]] * 4


def test_what_dtensor_makes_of_its_operators(case):
    assert case("dtensor") == [[[row("all-gather", 256, 192)], True]] * 4


def test_what_an_operator_of_dtensor_gathers_by_itself(case):
    assert case("operator_of_dtensor") == [[row("all-gather", 256, 192)]] * 4


def test_tensor_parallel(case):
    """An all-reduce of (2, 8) after the row-wise layer, one before the column-wise in backward."""
    assert case("tensor_parallel") == [[row("all-reduce", 128, 192, calls=2)]] * 4


def test_data_parallel(case):
    """128 weights: the reducer's all-reduce in float32, a stock hook's in FP16."""
    expected = [row("all-reduce", 512, 768)], [row("all-reduce", 256, 384, dtype="float16")]
    assert case("data_parallel") == [list(expected)] * 4


def test_callbacks_in_threads_of_the_backend_are_not_seen(case):
    """As the module says; the last rank's may run at once, in its own thread."""
    assert case("callback")[0] == [row("all-to-all", 64, 48)]


def test_fully_sharded(case):
    """128 weights in BF16, gathered once more in backward where they were freed in forward."""
    for value in case("fsdp"):
        scattered = row("reduce-scatter", 256, 192, calls=2, dtype="bfloat16")
        assert value == {
            "True": [row("all-gather", 512, 384, calls=4, dtype="bfloat16"), scattered],
            "False": [row("all-gather", 256, 192, calls=2, dtype="bfloat16"), scattered],
        }


def test_compiled_graphs_stay_compiled(case):
    assert case("compiled") == [[[[row("all-reduce", 32, 48)]] * 2, 1]] * 4


def test_contexts_within_contexts_count_each(case):
    outer, inner = [row("all-reduce", 96, 144, calls=3)], [row("all-reduce", 32, 48)]
    assert case("nested") == [[outer, inner, False]] * 4


def test_counting_changes_no_result(case):
    assert case("results") == [True] * 4


def test_after_an_error_within(case):
    assert case("after_an_error") == [[[row("all-reduce", 32, 48)], False]] * 4


def test_subclasses_that_leave_dispatch_alone(case):
    for rank, value in enumerate(case("subclasses")):
        expected = [
            row("all-reduce", 64, 96, calls=2),
            row("broadcast", 32, 32 if rank == 0 else 0),
        ]
        assert value == expected


def test_totals_of_all_and_of_some(case):
    first = case("table")[0]
    assert first["all"] == [3, 8024, 12032]
    assert first["some"] == [2, 8016, 12024]
    assert first["one"] == [1, 16, 24]
    assert first["none"] == [0, 0, 0]


def test_prints_a_table(case):
    assert case("table")[0]["text"].splitlines() == [
        "kind        dtype     ranks  calls  payload bytes  bytes sent",
        "all-reduce  bfloat16      4      1             16          24",
        "all-reduce  float32       4      1          8,000      12,000",
        "broadcast   uint8         4      1              8           8",
        "total                            3          8,024      12,032",
    ]


def test_without_a_process_group_nothing_is_counted():
    with count_communication() as count:
        torch.ones(2, requires_grad=True).sum().backward()
    assert isinstance(count, CommunicationCount)
    assert (count.rows, count.calls, count.bytes_sent) == ([], 0, 0)


def test_one_rank_sends_nothing(single_process_group):
    with count_communication() as count:
        torch.distributed.all_reduce(torch.ones(8))
        torch.distributed.broadcast(torch.ones(8), 0)
    assert (count.calls, count.payload_bytes, count.bytes_sent) == (2, 64, 0)
