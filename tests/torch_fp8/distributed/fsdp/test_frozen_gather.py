import pytest

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def cases(run_cases):
    return run_cases("fsdp_frozen_cases", 2)


@pytest.mark.parametrize("shape", ["aligned", "uneven"])
def test_shards_take_a_byte_and_train_as_on_one_device(cases, shape):
    values = [value[shape] for value in cases["trains"]]
    for value in values:
        assert value["frozen"] == 4
        assert value["held"] == [4, 4]
        held, elements = value["bytes"]
        assert held == elements
        assert value["equal"] == [True] * 4
        assert value["again"] == value["kept"] == 4
        for sharded, alone in value["losses"]:
            assert sharded == pytest.approx(alone, rel=2e-2)
    assert values[0]["losses"][0][0] == pytest.approx(values[0]["losses"][0][1], rel=1e-3)


def test_a_sharded_model_is_frozen_in_place(cases):
    for value in cases["later"]:
        assert value["frozen"] == [0, 5, 5]
        sharded, alone = value["losses"]
        assert sharded == pytest.approx(alone, rel=1e-5)
        before, after, elements = value["bytes"]
        assert after == before - 3 * elements


def test_a_frozen_weight_travels_as_bytes(cases):
    for value in cases["wire"]:
        assert value["fp8"] < 0.5 * value["keep"]


def test_state_dicts_are_plain_and_nothing_written_is_lost(cases):
    for kinds, equal, locals_, kept, unchanged, same, losses in cases["state"]:
        assert kinds == locals_ == ["Tensor"]
        assert equal
        assert kept == 4
        assert unchanged
        assert same, "bytes and scales are those of one device"
        assert losses[0] == pytest.approx(losses[1], rel=1e-3)
        assert losses[2] == pytest.approx(losses[3], rel=1e-3)
        assert losses[4] == losses[5]
        assert losses[2] != pytest.approx(losses[0], rel=1e-2)


def test_they_survive_offloading_and_moving(cases):
    for value in cases["offload_and_move"]:
        offloaded, alone, kept = value["offload"]
        assert offloaded == pytest.approx(alone, rel=1e-5)
        assert kept == 4
        assert value["moved"] == [pytest.approx(alone, rel=1e-5), 4]
        assert value["evaluated"] == pytest.approx(alone, rel=1e-5)
        assert "and its gradient was requested" in value["error"]
