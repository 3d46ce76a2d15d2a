import pytest

pytestmark = pytest.mark.long


MIXED_GEMM_DB = 24.0  # the floor of a GEMM of (E5M2, E4M3), less half a dB


@pytest.fixture(scope="module")
def cases(run_cases):
    return run_cases("tensor_parallel_cases", 2)


def test_a_block_is_as_far_from_bfloat16_as_on_one_rank(cases):
    """Parts of weights have scales of their own, sums another order: within 0.5 dB; what the
    residual stream hides most of (the output, the gradient of the input) is rounded to bfloat16
    once more, to 39 dB: within 1.2."""
    for result in cases["block_against_one_rank"]:
        for recipe, ((output, input_grad, *weights)) in result.items():
            for parallel, one in (output, input_grad):
                assert parallel >= one - 1.2, recipe
            for parallel, one in weights:
                assert parallel >= one - 0.5, recipe


def test_smooth_swiglu_keeps_its_bits_in_parts_and_in_shards(cases):
    """An aligned channel leaves about 10 dB of the others without it; one rank has 22 to 24."""
    for result in cases["smooth_swiglu"]:
        assert len(result) == 4
        for recipe, (split, one, sharded) in result.items():
            for values in zip(split, one, sharded, strict=True):
                assert min(values) > 20, recipe
                assert max(values) - min(values) < 1.5, recipe


def test_layers_of_a_shard_have_recipes_of_their_own(cases):
    for result in cases["overrides"]:
        for found, _, state in result.values():
            assert min(found) > 30
            assert state == ["amax_history", "last_scale"]


def test_gathered_bytes_are_those_of_a_whole_cast(cases):
    assert cases["gathered_bytes_are_those_of_a_whole_cast"] == [[], []]


def test_transposed_payload(cases):
    for result in cases["transposed_payload"]:
        for recipe, (gaussian, spread) in result.items():
            assert gaussian == 200, recipe  # exact
            assert spread >= 100, recipe  # rows over 2^-8..2^8: what becomes subnormal


def test_one_scale_for_the_group(cases):
    for used, expected in cases["one_scale"]:
        assert used == pytest.approx(expected, rel=1e-6)


def test_order_of_conversion_sharing_and_gathering_again_change_no_bit(cases):
    assert cases["order_of_conversion"] == [[True, True, True]] * 2


def test_a_shared_input_is_gathered_once(cases):
    for result in cases["collectives_of_attention"]:
        for again, gathers in (("False", 1), ("True", 2)):
            forward, backward = result[again]
            assert forward["all-gather torch.uint8"] == 1
            assert forward["all-reduce torch.float32"] == 1
            assert forward["reduce-scatter torch.bfloat16"] == 1
            # Of the gradient of the output; and, again, of the input.
            assert backward["all-gather torch.uint8"] == gathers
            assert backward["reduce-scatter torch.bfloat16"] == 1
            assert backward["all-reduce torch.float32"] == 1
            assert "all-gather torch.bfloat16" not in forward | backward


def test_sums_have_16_bits_where_the_input_has_32(cases):
    for result in cases["float32_under_autocast"]:
        collectives = ["all-gather torch.uint8", "reduce-scatter torch.bfloat16"]
        assert result["True"] == [collectives, "torch.float32"]
        assert result["False"] == [["all-reduce torch.bfloat16"], "torch.float32"]


def test_bytes_kept_for_backward(cases):
    """A byte for each element of the whole input, or of the rank's own half; and the scale."""
    for result in cases["memory_for_backward"]:
        assert result["False"] == pytest.approx(1, abs=0.01)
        assert result["True"] == pytest.approx(0.5, abs=0.01)


def test_tokens_that_the_group_does_not_divide(cases):
    for results, refused in cases["uneven_tokens"]:
        for tokens, (shape, _, output, up, down) in zip((5, 1), results, strict=True):
            assert shape == [2, tokens, 64]
            # Two roundings against each other, of a half of the noise each: 3 dB less.
            assert min(output, up, down) >= MIXED_GEMM_DB - 3
        assert "FP8 linear 'up' got parts with different shapes" in refused
    shapes = [[shape for _, shape, *_ in results] for results, _ in cases["uneven_tokens"]]
    assert shapes == [[[2, 3, 64], [2, 1, 64]], [[2, 2, 64], [2, 0, 64]]]


def test_features_that_the_group_does_not_divide(cases):
    assert [result[0] for result in cases["uneven_features"]] == [[17, 64], [16, 64]]
    for result in cases["uneven_features"]:
        assert min(result[1:]) >= MIXED_GEMM_DB - 3


def test_frozen_weights(cases):
    assert cases["frozen"] == [[0, 1, True, True]] * 2


def test_what_is_not_finite_is_seen_on_every_rank(cases):
    assert cases["not_a_number"] == [{}, {}]


def test_refusals_name_the_layer_and_the_way_out(cases):
    for result in cases["refusals"]:
        for case in ("wgrad, convert first", "wgrad, parallelize first"):
            assert "FP8 linear '0.up': wgrad='bf16'" in result[case]
            assert "use wgrad='fp8'" in result[case]
        assert "'q': wgrad='bf16'" in result["shared input"]
        assert "recipe 'rowwise' has scales that run along them" in result["features"]
        assert "their recipes cast it differently" in result["two recipes"]
        assert "such as Float8ColwiseParallel" in result["no style"]
        assert "got a DTensor, but its weight is not one" in result["no DTensor"]
        assert "'0' is stored transposed (Conv1D)" in result["transposed"]
        assert "skip=('0',)" in result["transposed"]
        for case in ("wgrad, plain", "features, tensorwise", "off"):
            assert result[case] is None


def test_torchs_own_styles_run_fp8_gemms_and_16_bit_collectives(cases):
    for result in cases["torchs_own_styles"]:
        for dtypes, values in result:
            assert dtypes == ["torch.bfloat16"]
            for parallel, one in values:
                assert parallel >= one - 0.5


def test_layers_that_are_not_converted(cases):
    for result in cases["layers_that_are_not_converted"]:
        # Three layers in FP8, and the input of the fourth; one multiplication of noise at most.
        assert result["skipped"] >= MIXED_GEMM_DB
        assert result["grad"] >= MIXED_GEMM_DB
        # bfloat16's own sums, in another order.
        assert min(result["evaluated"], result["reverted"]) >= 40
        assert result["forward in BF16"] >= 40


def test_a_repeated_forward_uses_the_scales_of_the_first(cases):
    assert cases["checkpointing_of_activations"] == [True, True]


def test_delayed_histories_are_one_ranks(cases):
    """Amaxes of input and weight are exact; that of the inner gradient goes through GEMMs."""
    for result in cases["delayed_histories"]:
        assert all(away <= 0.05 for away in result.values())


def test_gathers_are_issued_before_the_weight_is_cast(cases):
    for forward, backward in cases["issued_before_it_is_needed"]:
        assert forward == ["issue", "cast", "wait", "gemm", "cast", "gemm"]
        # The row-wise layer, then the column-wise one, whose gather is hidden by dgrad, too.
        assert backward[:5] == ["issue", "cast", "wait", "gemm", "gemm"]
        assert backward[5:] == ["issue", "cast", "gemm", "wait", "gemm"]


def test_compilation_is_refused_by_name(cases):
    for result in cases["compiled"]:
        assert "torch.compile cannot trace FP8 gathers" in result["fp8"]
        assert result["off"] is True
