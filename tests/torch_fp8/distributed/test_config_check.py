import pytest

import torch_fp8
from tests.comm_counter import count_communication
from tests.internals import check_same_config
from torch_fp8 import FP8Config

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def ranks(run_cases):
    return run_cases("agreement_cases", 4)["configurations"]


def errors(ranks, name):
    return [results[name][0] for results in ranks if name in results]


def test_no_collective_is_needed(ranks):
    for name in ("same", "level", "version"):
        assert [results[name][1] for results in ranks] == [[]] * 4


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("level", "opt_level is 'O2' on ranks 0-1, 3, 'O3' on rank 2. "),
        (
            "several",
            "recipe is 'auto' on rank 0, 'rowwise' on ranks 1-3; "
            "communication is 'auto' on rank 0, 'off' on rank 1, 'fp8' on ranks 2-3. ",
        ),
        ("skip", "skip is ('lm_head',) on ranks 0-2, ('lm_head', 'embed') on rank 3. "),
        (
            "environment",
            "seed is 0 on ranks 0, 2-3, 3 on rank 1 (TORCH_FP8_CONFIG is not set on ranks 0, 2-3, "
            "set on rank 1). ",
        ),
    ],
)
def test_every_rank_is_told_the_fields_the_values_and_the_ranks(ranks, name, says):
    expected = f"ranks have different FP8Configs: {says}Use the same FP8Config on all ranks"
    assert errors(ranks, name) == [expected] * 4


def test_ranks_of_a_group_have_their_global_numbers(ranks):
    said = errors(ranks, "group")
    assert len(said) == 2
    assert all("seed is 1 on rank 1, 3 on rank 3 (" in message for message in said)


def test_after_an_error_checks_go_on(ranks):
    assert errors(ranks, "again") == [None] * 4


def test_comparisons_that_follow_each_other_are_kept_apart(ranks):
    assert [results["many"] for results in ranks] == [[None] * 200] * 4


def test_a_rank_that_comes_too_late_raises_as_the_others_do(ranks):
    *others, late = errors(ranks, "late")
    for message in others:
        assert message.startswith("rank 3 did not enable FP8 while node-0 (ranks 0-1), node-1 (ra")
    assert late.startswith("ranks 0-2 did not enable FP8 while node-1 (rank 3) did, or did not get")


def test_one_rank_warns_of_those_that_it_waits_for(ranks):
    *others, late = [results["waiting"] for results in ranks]
    said = "FP8 is waiting for rank 3 to enable it too, for up to 2 s"
    assert [text for texts in others for text in texts] == [said]
    assert late == ["FP8 is waiting for ranks 0-2 to enable it too, for up to 2 s"]


def test_other_versions_are_named_with_their_hosts(ranks):
    said = (
        f"ranks have different versions: torch-fp8 is {torch_fp8.__version__} on node-0 "
        "(ranks 0-1), node-1 (rank 2), 0.0.9 on node-1 (rank 3). Install the same versions "
        "on all hosts"
    )
    assert errors(ranks, "version") == [said] * 4


def test_auto_is_refused_on_several_kinds_of_cards(ranks):
    said = (
        "recipe 'auto' measures one kind of card, but the card is H000 (sm_90) on node-0 "
        "(ranks 0-1), H100 (sm_90) on node-1 (ranks 2-3). Name a recipe that all of them support"
    )
    assert all(message.startswith(said) for message in errors(ranks, "cards and auto"))


def test_a_named_recipe_runs_on_several_kinds_of_cards_with_one_warning(ranks):
    assert errors(ranks, "cards") == [None] * 4
    first, *others = [results["warned"] for results in ranks]
    assert others == [[]] * 3
    assert len(first) == 1
    assert "H000 (sm_90) on node-0" in first[0]


@pytest.mark.parametrize(("missing", "came"), [(3, [0, 1, 2]), (0, [1, 2, 3])])
def test_a_rank_that_does_not_ask_for_fp8_is_named_after_the_timeout(ranks, missing, came):
    waited = [ranks[rank][f"waited for {missing}"] for rank in came]
    assert 2 <= max(waited) < 20  # the first rank whose time is over tells the others
    assert min(waited) > 1.8
    for results in (ranks[rank] for rank in came):
        message, sent = results[f"missing {missing}"]
        assert message.startswith(f"rank {missing} did not enable FP8 while node-0 (rank")
        assert sent == []  # whoever is missing is in a collective of its own


def test_one_process_checks_nothing(single_process_group):
    with count_communication() as count:
        check_same_config(FP8Config())
    assert count.calls == 0


def test_without_a_process_group_there_is_nothing_to_check():
    check_same_config(FP8Config())
