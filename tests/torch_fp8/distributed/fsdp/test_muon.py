import pytest

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def cases(run_cases):
    return run_cases("muon_cases", 2)


def test_shards_train_as_one_rank_does(cases):
    for results, are_int8, _ in cases["muon_shards"]:
        assert all(are_int8)
        for name in ("stock", "one rank"):
            want = results[name] if name == "one rank" else results[name][0]
            assert results["int8"][0] == pytest.approx(want, rel=2e-3)


def test_a_weight_is_gathered_once_in_int8(cases):
    """A byte an element and a scale for 64, half of it of the other rank; stock sends 20 times as
    much.
    """
    for results, _, _ in cases["muon_shards"]:
        (_, stock, _), (_, ours, calls) = results["stock"], results["int8"]
        elements = 2 * 128 * 199
        assert calls == 2
        assert ours <= 0.55 * elements
        assert ours < 0.1 * stock


def test_a_folder_of_shards_goes_on_bit_for_bit(cases):
    assert cases["muon_resumes"] == [[True, True]] * 2


def test_replicas_stay_equal(cases):
    for losses, alone, equal in cases["muon_ddp"]:
        assert losses == pytest.approx(alone, rel=1e-3)
        assert equal


def test_experts_are_stepped_where_they_lie(cases):
    for (alone, whole), (sharded, parts) in cases["muon_experts"]:
        assert (whole, parts) == ([4, 4], [2, 2])
        assert sharded == pytest.approx(alone, rel=1e-3)
