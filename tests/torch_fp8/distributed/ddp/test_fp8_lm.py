"""FP8-LM's all-reduce of gradients: the cases of fp8_lm_cases.py, on four ranks."""

import pytest

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def ranks(run_ranks):
    """What each case returned, by rank."""
    return run_ranks("fp8_lm_cases.py", 4)


def test_the_papers_rule(case):
    """In one bucket and in one for each gradient; float32 arithmetic may differ in its last bit."""
    for value in case("rule"):
        assert len(value) == 4
        for error, equal in value.values():
            assert error < 2e-7
            assert equal


def test_gradients_in_bfloat16(case):
    for error, equal in case("bfloat16"):
        assert error < 2**-8
        assert equal


def test_sums_that_saturate_halve_mu(case):
    """The same gradient on four ranks: of half the range the largest sums are cut in two."""
    for (first, cut), *rest in case("scaling"):
        assert first == 0.25
        assert cut == 0.5
        for mu, error in rest:
            assert mu == 0.25  # 1 / N, below which it never falls
            assert error < 2**-4  # two roundings of E4M3


def test_mu_grows_where_nothing_saturates(case):
    for value in case("growth"):
        assert value == pytest.approx([0.5 * 2 ** (i / 1000) for i in (1, 2, 3)], rel=1e-6)


def test_zeros_stay_zeros(case):
    assert case("zeros") == [[0.0] * 4] * 4


def test_the_smallest_gradients_have_a_finite_scale(case):
    assert case("tiny") == [[True] * 4] * 4


@pytest.mark.parametrize("bad", ["inf", "nan"])
def test_all_ranks_see_what_is_not_finite_on_one(case, bad):
    for value in case("not_finite"):
        assert value[bad] == [[1.0, 0.0, 0.0, 0.0], True, True]


def test_bytes_on_the_wire(case):
    """11,264 elements as bytes, 134 as BF16 with up to 15 bytes of padding for each rank, twice."""
    message = 4 * (11264 // 4 + 80)
    for value in case("bytes"):
        assert value == [
            ["all-gather", "torch.uint8", 1, message * 3 / 4],
            ["all-reduce", "torch.float32", 1, 2 * 8 * 3 / 4],  # a scale for each matrix
            ["all-to-all", "torch.uint8", 1, message * 3 / 4],
        ]
        assert sum(row[3] for row in value) < 0.27 * (11264 + 134) * 4 * 2 * 3 / 4


def test_what_has_no_8_bit_form_is_averaged_as_without_it(case):
    assert case("float64") == [0.0] * 4


def test_connected_by_the_configuration(case):
    said = "4, gradients averaged in FP8 by FP8-LM's rule, 1 byte each"
    for value in case("connected"):
        assert value == [said, "average_bucket", "SharedScaleAllReduce", True, True]


def test_resuming_is_exact_to_the_bit(case):
    for same, (whole, half, rest) in case("resumed"):
        assert same
        assert whole == rest != half


def test_a_copy_has_a_mu_of_its_own(case):
    assert case("copied") == [[True, True, True]] * 4


def test_uneven_inputs(case):
    assert case("uneven") == [True] * 4


def test_one_scale_and_a_sum_in_fp8_are_less_exact_than_our_exchange(case):
    """Ours has two roundings with a scale for each 32, and a sum in float32."""
    for value in case("quality"):
        (ours, our_row), (theirs, their_row) = value["ours"], value["fp8-lm"]
        assert ours > 28.3
        assert our_row > 26.5
        assert theirs < ours - 4
        assert their_row < our_row - 4
