import pytest

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def results(run_cases):
    return run_cases("fsdp_agreement_cases", 2)["agreement"]


SAID = {
    "width": "'0.weight' is (64, 64) torch.float32, sharded by '0' along dimension 0, in FP8 "
    "(tensorwise) on rank 0, (96, 64) torch.float32, sharded by '0' along dimension 0, in FP8 "
    "(tensorwise) on rank 1",
    "depth": "'2.weight' is missing on rank 0, (64, 64) torch.float32",
    "skip": "'1.weight' is (64, 64) torch.float32, sharded by '1' along dimension 0, in FP8 "
    "(tensorwise) on rank 0, (64, 64) torch.float32, sharded by '1' along dimension 0, in high "
    "precision on rank 1",
    "sharding": "sharded by 'the root' along dimension 0, in FP8 (tensorwise) on rank 1",
}


@pytest.mark.parametrize("difference", SAID)
def test_every_rank_is_told_what_differs(results, difference):
    for result in results:
        assert "the model differs between ranks" in result[difference]
        assert SAID[difference] in result[difference]
        assert "Build, convert and shard the same model on all ranks" in result[difference]


def test_ranks_that_agree_train_and_generate_between_steps(results):
    for result in results:
        first, *others = result["same"]
        assert others == [first, first]
