import pytest

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def ranks(run_ranks):
    return run_ranks("recipe_choice_cases.py", 2)


ALIKE = ("together", "again", "after", "fsdp", "tensor", "restarted", "failed", "failed again")


@pytest.mark.parametrize("name", ALIKE)
def test_all_ranks_choose_alike(ranks, name):
    first, second = (results[name] for results in ranks)
    assert (first["recipe"], first["skipped"]) == (second["recipe"], second["skipped"])


@pytest.mark.parametrize("name", ["together", "fsdp", "tensor"])
def test_one_of_them_measures(ranks, name):
    measured = [results[name]["measured"] for results in ranks]
    assert sorted(measured) == [False, True]
    assert ranks[0][name]["recipe"] == ("rowwise", "blockwise")[measured.index(True)]
    assert len(ranks[0][name]["skipped"]) == 1


def test_nothing_is_measured_twice(ranks):
    for results in ranks:
        assert results["again"] == {**results["together"], "measured": False}


def test_a_rank_that_converts_alone_waits_for_nobody(ranks):
    assert ranks[1]["before"]["recipe"] == "blockwise"
    assert ranks[1]["before"]["measured"]
    assert ranks[1]["alone"]["recipe"] == "blockwise"


def test_stages_of_a_pipeline_are_measured_by_the_ranks_that_have_them(ranks):
    assert [results["stages"]["recipe"] for results in ranks] == ["rowwise", "blockwise"]


def test_shapes_are_those_that_a_rank_multiplies(ranks):
    whole = {"0": "128x64", "1": "48x128", "2": "80x48"}
    for results in ranks:
        assert results["shapes under fsdp"] == whole
        assert results["shapes under tensor"] == {**whole, "0": "64x64", "1": "48x64"}


def test_sharded_models_train_with_a_layer_left(ranks):
    for results in ranks:
        assert results["step under fsdp"] == [True, 2]
        assert results["step under tensor"] == [True, 0]


def test_a_failure_is_told_once(ranks):
    assert {results["failed"]["recipe"] for results in ranks} == {"tensorwise"}
    assert sum(results["failed"]["warned"] for results in ranks) == 1
    assert sum(results["failed again"]["warned"] for results in ranks) == 0


def test_who_waits_longer_than_the_timeout_is_told_why(ranks):
    assert ranks[0]["late"] == "late"
    assert "this rank waits for a measurement that another rank" in ranks[1]["late"]
    assert "set FP8Config(recipe=...)" in ranks[1]["late"]


def test_ranks_that_measured_before_there_was_a_group_do_not_train_different_functions(ranks):
    for results in ranks:
        assert (
            "measured by this process alone, before the process group existed" in results["early"]
        )
        said = results["early, wrapped"]
        assert "the model differs between ranks: '0' is in FP8 (rowwise) on" in said
        assert "'1' is in high precision on rank 0, in FP8 (blockwise) on rank 1" in said
        assert "after init_process_group if the recipe is 'auto'" in said


def test_payloads_are_kept_on_all_ranks_or_on_none(ranks):
    kept, same = (results["payloads"] for results in ranks)
    assert kept == same
    assert kept in (0, 2)  # the third is too small for two halves
