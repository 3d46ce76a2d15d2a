"""Loss heads under DDP and FSDP2, on two gloo ranks."""

import pytest

pytestmark = pytest.mark.long
_CASES = "tests.torch_fp8.loss_head.head_cases"


@pytest.fixture(scope="module")
def ranks(run_cases):
    return run_cases(_CASES, 2)


@pytest.mark.parametrize("case", ["ddp", "fsdp"])
def test_loss_and_gradients_are_those_of_stock_without_logits(ranks, case):
    for results in ranks[case]:
        for key, got in results.items():
            assert got["loss"] <= 1e-5, (key, got)
            assert got["db"] >= 42, (key, got)
            assert got["equal"], key
            # FSDP2 frees the weight of a head that is sharded alone after its forward.
            assert got["fused"] == (key != "alone"), (key, got)


@pytest.mark.parametrize("order", ["compile(DDP)", "DDP(compile)"])
def test_ddp_of_compiled_models(ranks, order):
    for results in ranks["compiled_ddp"]:
        got = results[order]
        assert got["loss"] <= 1e-5
        assert got["db"] >= 25, got
        assert got["equal"]
        assert got["fused"]
        assert got["logits"] == "LazyLogits"


def test_split_shards(ranks):
    for results in ranks["fsdp_levels"]:
        for difference, fused in results.values():
            assert difference <= 2e-4
            assert fused


def test_logits_of_a_freed_weight_gather_it_again(ranks):
    for freed, total in ranks["read_after_reshard"]:
        assert freed
        assert total > 0


def test_heads_in_fp8_under_fsdp(ranks):
    for results in ranks["fsdp_fp8"]:
        for name, (difference, fused, has_gradient) in results.items():
            assert difference <= 5e-3, (name, difference)
            assert fused, name
            assert has_gradient == name.startswith("trained"), name


def test_a_forward_multiplies_by_shards_as_they_are_written(ranks):
    for results in ranks["written_shards"]:
        for key, (error, _) in results.items():
            assert error <= 2**-6, (key, error)  # BF16 rounds the sum with the bias


def test_logits_from_before_a_write_to_a_shard_are_refused(ranks):
    for results in ranks["written_shards"]:
        for key, (_, read) in results.items():
            if key.endswith("lm_head.weight"):
                assert "'lm_head' was written after its forward" in str(read), (key, read)
            else:
                assert read == 0.0, (key, read)


def test_reads_after_backward_leave_no_weight_gathered(ranks):
    for results in ranks["reads_after_backward"]:
        want, got = (results[f"before the step, {kind}"] for kind in ("off", "bf16"))
        assert got == pytest.approx(want, rel=1e-4)
        want, got = (results[f"after it, {kind}"] for kind in ("off", "bf16"))
        assert got[::2] == pytest.approx(want[::2], rel=1e-4)
        assert all("was written after its forward" in error for error in got[1::2])
