import pytest

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def cases(run_cases):
    return run_cases("parallel_training_cases", 2)


@pytest.fixture(scope="module")
def mesh_cases(run_cases):
    return run_cases("mesh_cases", 4)


def test_losses_are_those_of_one_rank(cases):
    for result in cases["losses"]:
        bf16 = result.pop("bf16")
        for parallel, one, first in result.values():
            assert parallel < 0.6 * first  # it trains
            assert parallel == pytest.approx(one, rel=0.005)
            assert parallel == pytest.approx(bf16, rel=0.005)


def test_states_are_those_of_one_rank(cases):
    """Random bits and groups of 32 belong to places in the whole matrix, whatever the sharding."""
    assert cases["states_are_those_of_one_rank"] == [{"True": [], "False": []}] * 2


def test_gradients_of_what_all_ranks_have_are_summed_by_the_step(cases):
    for partial, eight_bit, settled, away in cases["gradients"]:
        assert partial == ["attention.o.bias", "down.bias", "norm1.weight", "norm2.weight"]
        assert eight_bit == 7
        assert settled
        # Biases of row-wise layers see no GEMM in between; norms do, in FP8.
        assert max(away["down.bias"], away["attention.o.bias"]) < 0.01
        assert max(away.values()) < 0.1


def test_checkpoints_open_on_one_rank_and_on_two(cases):
    rank0, _ = cases["checkpoints"]
    assert rank0["O2"] == rank0["O3"] == []
    for result in cases["checkpoints"]:
        assert result["O2 resumed"]
        assert result["O3 resumed"]


def test_shardings_that_states_cannot_follow_are_refused_by_name(cases):
    for result in cases["refused_shardings"]:
        assert "'odd' has 5 columns on 2 ranks" in result["odd columns"]
        assert "'experts' is sharded as (Shard(dim=1),)" in result["stacked"]
        assert result["8 bits"] is None


def test_float32_shards_are_split_and_joined_as_on_one_rank(cases):
    names = ["up.weight", "down.weight"]
    assert cases["split_float32"] == [[names, ["WideGrad"], [[True, True]] * 2]] * 2


def test_one_optimizer_steps_sharded_and_plain_parameters(cases):
    # Three steps of 3e-3, in FP8 on both sides, of weights around 0.1.
    assert max(cases["mixed_parameters"]) < 0.02


def test_a_pipeline_is_one_process_bit_for_bit(cases):
    for rank, result in enumerate(cases["pipeline"]):
        assert len(result) == 3
        for name, (weights, losses, last) in result.items():
            assert weights, name
            assert losses is (True if rank else None), (name, last)


def test_fsdp2_and_tensor_parallelism_on_one_mesh(mesh_cases):
    for result in mesh_cases["fsdp2"]:
        for name, case in result.items():
            # FSDP2 scatters gradients in BF16 or in groups of FP8: 0.2 dB of FP8 GEMMs' 20 to 25.
            assert all(parallel >= one - 0.7 for parallel, one in case["gradients"]), name
            assert case["loaded"], name
            if name.endswith("True"):
                assert case["gathers"] == 14
                assert case["skipped"] == []
        assert result["tensorwise True"]["bytes"] < 0.7 * result["tensorwise False"]["bytes"]
    for case in mesh_cases["fsdp2"][0].values():  # one rank's run is on rank 0
        if case["losses"] is not None:
            first, last, one = case["losses"]
            assert last < 0.8 * first
            assert last == pytest.approx(one, rel=0.005)
