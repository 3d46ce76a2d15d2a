import pytest
import torch

from tests.internals import Run, joined, pieces_of, runs_of, target_of

pytestmark = pytest.mark.long


ON_FOUR = ("unused", "join", "subgroup", "not_finite", "bytes", "sqnr", "accumulation")
OPTIONS = (
    "default",
    "buckets as views",
    "static graph",
    "unused parameters",
    "many buckets",
    "many buckets as views",
    "many buckets, static graph",
)
ONE_ROUNDING, TWO_ROUNDINGS = 0.0143, 0.0205  # relative error; Gaussian values give 0.0135, 0.0195
RANKS = pytest.mark.parametrize("ranks", [2, 4])


@pytest.fixture(scope="module")
def results(run_cases):
    return {n: run_cases("comm_hook_cases", n, *names) for n, names in ((2, ()), (4, ON_FOUR))}


@pytest.fixture
def case(results):
    """``case(name, ranks)``: what it returned on each rank."""
    return lambda name, ranks=2: results[ranks][name]


@pytest.mark.parametrize("start", [0, 1, 65])
def test_what_travels_behind_an_odd_bias_is_aligned(start):
    buffer = torch.randn(start + 4096).bfloat16()
    runs = [Run(start, start + 4096, True)]
    packed = joined(buffer, runs, 32)
    assert torch.equal(packed, buffer[start:])
    decoded, stays = target_of(buffer, runs, 4096, (torch.bfloat16,))
    assert packed.data_ptr() % 16 == decoded.data_ptr() % 16 == 0
    in_place = decoded.data_ptr() == buffer[start:].data_ptr()
    assert in_place == stays == (start == 0), "in its own place where that is aligned"


@pytest.mark.parametrize("option", OPTIONS)
def test_averages_are_those_of_float32_up_to_two_roundings_and_equal_on_all_ranks(case, option):
    for value in case("options"):
        error, equal, hook, num_buckets = value[option]
        assert 0.01 < error < TWO_ROUNDINGS  # it is FP8, too
        assert equal
        assert hook == "average_bucket"
        assert (num_buckets >= 4) is ("many" in option)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_buckets_of_every_dtype(case, dtype):
    for value in case("dtypes"):
        error, equal, hook = value[f"torch.{dtype}"]
        assert error == 0 if dtype == "float64" else 0.01 < error < TWO_ROUNDINGS
        assert equal
        assert hook == "average_bucket"


@pytest.mark.parametrize("shapes", ["matrices", "one odd matrix", "vectors", "one element"])
def test_buckets_of_every_kind(case, shapes):
    for value in case("dtypes"):
        error, equal, _ = value[shapes]
        assert error < (TWO_ROUNDINGS if "matri" in shapes else 0.006)  # BF16, twice
        assert equal


def test_a_static_graph_whose_first_backward_has_several_buckets(case):
    """DDP gives all of them the number 0 then, and none is the last."""
    for value in case("static_graph_of_two_dtypes"):
        error, equal, _ = value
        assert error < TWO_ROUNDINGS
        assert equal


@RANKS
def test_accumulated_gradients_are_averaged_once(case, ranks):
    for value in case("accumulation", ranks):
        for equal_before, error, equal in value:
            assert not equal_before
            assert error < TWO_ROUNDINGS
            assert equal


@RANKS
def test_parameters_that_some_or_all_ranks_leave_out(case, ranks):
    for error, equal, none in case("unused", ranks):
        assert error < TWO_ROUNDINGS
        assert equal
        assert none


@RANKS
def test_uneven_inputs_give_what_torchs_hooks_give(case, ranks):
    for value in case("join", ranks):
        for error, equal, hook in value:
            assert error < TWO_ROUNDINGS
            assert equal
            assert hook == "average_bucket"


def test_several_modules_in_one_backward(case):
    for one, other, stock in case("several"):
        assert 0.01 < one < TWO_ROUNDINGS
        assert 0.01 < other < TWO_ROUNDINGS
        assert stock < 1e-6


def test_a_process_group_of_some_ranks(case):
    for error, report, hook in case("subgroup", 4):
        assert 0.01 < error < TWO_ROUNDINGS
        assert report == "2, gradients averaged in FP8, 1.03 bytes each"
        assert hook == "average_bucket"


def test_sparse_gradients_are_averaged_as_without_us(case):
    for sparse_only, mixed in case("sparse"):
        assert sparse_only == [True, 0.0, True]
        is_sparse, embedding, weight, bias, equal = mixed
        assert is_sparse
        assert embedding == 0
        assert 0.01 < weight < 0.03  # these gradients are alike on both ranks, and so is rounding
        assert bias < 0.006
        assert equal


@RANKS
def test_all_ranks_see_what_is_not_finite_on_one(case, ranks):
    for seen, equal in case("not_finite", ranks):
        assert seen == [32, 1] + [0] * 8
        assert equal


@pytest.mark.parametrize("when", ["before", "after", "built in", "built in, after", "reason"])
def test_a_users_hook_wins(case, when):
    for value in case("users_hook"):
        error, equal, hook, report = value[when]
        assert error < 1e-6
        assert equal
        assert hook != "average_bucket"
        told = {
            "before": "the communication hook case_users_hook.<locals>.users is registered",
            "built in": "the communication hook BuiltinCommHookType.ALLREDUCE is registered",
            "reason": "the host says so",
            "after": "FP8, 1.03 bytes each",  # nobody can know
            "built in, after": "FP8, 1.03 bytes each",
        }
        assert told[when] in report


def test_off_is_torchs_all_reduce(case):
    told = "2, gradients averaged in their dtype: communication='off'"
    assert case("off") == [[True, told]] * 2


def test_copies_average_as_the_original(case):
    for value in case("copies"):
        assert len(value) == 8
        for error, equal, hook, num_hooks, reason in value:
            assert error < TWO_ROUNDINGS
            assert equal
            assert hook == "average_bucket"
            assert num_hooks == 1
            assert reason is None


def test_each_bucket_is_sent_as_soon_as_it_is_full_in_one_order(case):
    """Every exchange but the last bucket's is issued before the last gradient is ready."""
    values = case("order")
    assert values[0] == values[1]
    events, num_buckets = values[0]
    assert num_buckets >= 4
    issued = [event for event in events if not event.startswith("ready")]
    first, others = ["all-to-all", "all-gather"], ["all-to-all", "all-gather"] * (num_buckets - 2)
    assert issued == [*first, "all-to-all", *others, "all-gather"]
    last_ready = max(i for i, event in enumerate(events) if event.startswith("ready"))
    assert events[:last_ready].count("all-to-all") == num_buckets - 1
    assert events[:last_ready].count("all-gather") == num_buckets - 2


@RANKS
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_bytes_sent_are_a_quarter_of_float32s_and_half_of_bf16s(case, level, ranks):
    for value in case("bytes", ranks):
        of_float32, of_bf16, kinds, calls = value[level]
        assert of_float32 <= 0.27
        assert of_bf16 <= 0.53
        assert kinds == [["all-gather", "torch.uint8"], ["all-to-all", "torch.uint8"]]
        assert calls <= 6


def test_compiled_around_ddp(case):
    assert case("compiled") == [[[True, "average_bucket"]] * 2] * 2


def test_after_a_backward_that_raised_the_next_is_right(case):
    for error, equal, _ in case("after_an_error"):
        assert error < TWO_ROUNDINGS
        assert equal


@RANKS
def test_an_average_keeps_33_5_db_and_every_row_32(case, ranks):
    for value in case("sqnr", ranks):
        for whole, worst_row in value:
            assert whole >= 33.5  # what is measured is 34.1 and 32.9; E4M3 would have 28.5
            assert worst_row >= 32


def test_a_single_rank_exchanges_nothing(case):
    assert case("one_rank") == [[True, "1, so nothing is exchanged", None]] * 2


def test_neighbours_of_a_kind_travel_as_one_run():
    buffer = torch.zeros(26518)
    gradients, start = [], 0
    for shape in ((64, 64), (64, 80), (4096,), (5,), (65, 77), (64, 64), (64, 64), (2, 2)):
        numel = torch.Size(shape).numel()
        gradients.append(buffer[start : start + numel].view(shape))
        start += numel
    assert runs_of(pieces_of(buffer, gradients)) == [
        Run(0, 9216, True),
        Run(9216, 13317, False),
        Run(13317, 18322, True),
        Run(18322, 26514, True),
        Run(26514, 26518, False),
    ]
