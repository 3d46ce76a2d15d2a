import pytest

from benchmarks.evidence import kernel_resources as bench
from benchmarks.rows import read_rows
from tests import kernel_code
from tests.torch_fp8.kernels.conftest import FAR_FROM_SPILLING

FEW = "tests/torch_fp8/kernels/test_producers_compiled.py::test_norm_compiles_and_fits"


def _allowed(kernel, warps):
    if kernel.startswith(("pack", "unpack", "sum_plain", "reduce_and", "encode", "decode")):
        return 64
    return 168 if warps == 1 else min(255, 65536 // (32 * warps))


@pytest.fixture(scope="module")
def recorded():
    return read_rows(bench.RESULTS)


@pytest.mark.long
def test_recorded_figures_are_those_of_this_code(recorded):
    """Of a few variants; all are the largest among inputs, of which these tests have one."""
    rows = {tuple(row[c] for c in bench.COLUMNS[:3]): row for row in recorded}
    measured = bench.measure(f"{FEW}[one element]")
    assert {row["target"] for row in measured} == {"sm_90", "sm_100"}
    assert len(measured) >= 10
    for row in measured:
        was = rows[tuple(row[c] for c in bench.COLUMNS[:3])]
        assert int(was["registers"]) >= row["registers"]
        assert int(was["shared_bytes"]) >= row["shared_bytes"]
        assert int(was["warps"]) == row["warps"]


def test_every_kernel_is_recorded_for_both_targets_without_spills(recorded):
    for target in ("sm_90", "sm_100"):
        kernels = {row["kernel"] for row in recorded if row["target"] == target}
        assert {"statistics_kernel", "norm_cast_kernel", "swiglu_backward_cast_kernel"} <= kernels
        assert {"quantize_blocks_kernel", "adamw_step_kernel", "pack_kernel"} <= kernels
    for row in recorded:
        assert int(row["spilled_bytes"]) == 0, row
        allowed = _allowed(row["kernel"], int(row["warps"]))
        assert int(row["registers"]) <= allowed, row


def test_all_variants_were_compiled_of_this_code(recorded):
    """Of what tests compile, every choice is covered; the record has every variant."""
    code = kernel_code.digests()
    changed = {row["kernel"] for row in recorded if row["digest"] != code.get(row["kernel"])}
    assert not changed, (
        "run `python -m benchmarks.evidence.kernel_resources --changed` and commit the CSV"
    )
    assert len({row["triton"] for row in recorded}) == 1


def test_what_is_far_from_spilling_on_hopper_is_so_on_blackwell(recorded):
    """Tests compile only the others for both; see FAR_FROM_SPILLING in the kernels' conftest."""
    of_target = {target: {} for target in ("sm_90", "sm_100")}
    for row in recorded:
        key = row["kernel"], row["variant"], row["warps"]
        of_target[row["target"]][key] = int(row["registers"])
    assert of_target["sm_90"].keys() == of_target["sm_100"].keys()
    left_out = 0
    for (kernel, variant, warps), registers in of_target["sm_90"].items():
        allowed = _allowed(kernel, int(warps))
        if registers < FAR_FROM_SPILLING * allowed:
            left_out += 1
            assert of_target["sm_100"][kernel, variant, warps] <= 0.7 * allowed, (kernel, variant)
    assert left_out > 300
