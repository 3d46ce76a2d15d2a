from unittest import mock

import pytest
import torch

from tests.internals import Exchanges, Times, links
from torch_fp8 import FP8Config
from torch_fp8.distributed import DDPReport

PLAIN, CODES = "all-reduce torch.bfloat16", "all-to-all torch.uint8"
IN_FLOAT32 = "all-reduce torch.float32"
GATHERED = ["all-gather torch.uint8", "all-gather torch.bfloat16"]
SCATTERED = "reduce-scatter torch.bfloat16"


@pytest.fixture(scope="module")
def ranks(run_cases):
    return run_cases("link_cases", 2)


def test_a_choice_of_the_user_stays_when_a_checkpoint_has_another():
    named, measured = Exchanges({"average": True}), Exchanges({"average": True}, {}, "measured")
    for exchanges in (named, measured):
        exchanges.adopt({"average": False})
    assert named["average"]
    assert not measured["average"]
    assert measured.note("average") == "as in the checkpoint"


def test_a_single_process_measures_nothing():
    with mock.patch.object(links, "seconds_of", side_effect=AssertionError("measured")):
        model = torch.nn.Linear(2, 2)
        chosen = links.choose_exchanges(model, FP8Config(), {"average": None}, torch.device("cpu"))
    assert all(chosen[kind] for kind in links.KINDS)
    assert links.exchanges_state(model) is None


def test_the_summary_says_what_was_measured():
    note = Exchanges({}, {"average": Times(0.0012, 0.0021)}, "measured").note("average")
    said = "measured (average 1.20 ms in 8 bits, 2.10 in BF16, 13 million elements)"
    assert note == said
    assert str(DDPReport(8, note=note)) == f"8, gradients averaged in FP8, 1.03 bytes each, {said}"


@pytest.mark.long
def test_ranks_decide_by_the_slowest_of_them(ranks):
    for value in ranks["ddp"]:
        report, measured, kinds, state = value["slow O1"]
        assert "averaged in their dtype: measured (average 1000.00 ms in 8 bits, 500.00" in report
        assert measured == ["average"]
        assert kinds == [IN_FLOAT32]
        assert state == {links.STATE_KEY: [0, 2, 2, 2]}
        report, measured, kinds, state = value["fast O1"]
        assert "FP8, 1.03 bytes each, measured (average 100.00 ms in 8 bits, 500.00" in report
        assert CODES in kinds
        assert IN_FLOAT32 not in kinds
        assert state == {links.STATE_KEY: [1, 2, 2, 2]}
        assert CODES not in value["slow O2"][2]
        assert CODES in value["fast O2"][2]
    assert ranks["ddp"][0] == ranks["ddp"][1]


@pytest.mark.long
def test_nothing_is_measured_at_o3_nor_where_the_user_has_chosen(ranks):
    for value in ranks["ddp"]:
        for name in ("slow O3", "slow fp8", "slow off"):
            _, measured, kinds, state = value[name]
            assert measured == []
            assert state == {}
            assert (CODES in kinds) == (name != "slow off")
    for measured, report in ranks["ddp_once"]:
        assert measured == ["average"]
        assert report == "2, gradients averaged in FP8, 1.03 bytes each"


@pytest.mark.long
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("fast", [True, False])
def test_a_run_that_goes_on_takes_the_choice_of_its_checkpoint(ranks, level, fast):
    for value in ranks["ddp_resumes"]:
        report, early, kinds, same, losses = value[f"{level} {fast}"]
        assert ("their dtype: measured" in report) == fast
        assert ("FP8, 1.03 bytes each, as in the checkpoint" in early) == fast
        assert ("their dtype: as in the checkpoint" in early) == (not fast)
        assert (CODES in kinds) == fast
        assert same
        assert all(loss > 0 for loss in losses)


@pytest.mark.long
def test_fsdp2s_gathers_and_scatters_are_chosen_apart(ranks):
    for value in ranks["fsdp"]:
        report, measured, kinds, resumed, _ = value["slow"]
        assert measured == ["gather", "scatter"]
        assert "FSDP2: 5 weights gathered in FP8, gradients of 0 modules scattered" in report
        assert "measured (gather 100.00 ms in 8 bits, 500.00 in BF16; scatter 900.00" in report
        assert GATHERED[0] in kinds
        assert SCATTERED in kinds
        assert CODES not in kinds
        assert resumed == kinds
        _, _, kinds, _, _ = value["fast"]
        assert CODES in kinds
        report, _, kinds, resumed, _ = value["nothing"]
        assert "FSDP2: 0 weights gathered in FP8" in report
        assert GATHERED[0] not in kinds
        assert CODES not in kinds
        assert resumed == kinds
        for name in ("O3", "fp8"):
            assert value[name][1] == []
            assert CODES in value[name][2]


@pytest.mark.long
def test_a_checkpoint_that_is_loaded_between_steps_is_followed(ranks):
    for before, after, finite in ranks["still_trains_mid_run"]:
        assert CODES in before
        assert CODES not in after
        assert GATHERED[0] not in after
        assert finite


@pytest.mark.long
def test_what_is_timed_runs_and_all_ranks_have_the_same_times(ranks):
    for times, equal in ranks["real_timers"]:
        assert [kind for kind, *_ in times] == list(links.KINDS)
        assert all(seconds > 0 for _, *pair in times for seconds in pair)
        assert equal
