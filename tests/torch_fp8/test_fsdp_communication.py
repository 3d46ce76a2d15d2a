"""FSDP2 with gathers and scatters in FP8: the cases of fsdp_cases.py, on two gloo ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "fsdp_cases.py"
ROOT = Path(__file__).parents[2]


def run_ranks(number, folder):
    """What each case returned, by rank."""
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": search}
    results = [folder / f"{rank}.json" for rank in range(number)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", CASES, str(rank), str(number), folder / "store", path],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, path in enumerate(results)
    ]
    try:
        errors = [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * number, errors
    return [json.loads(path.read_text()) for path in results]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return run_ranks(2, tmp_path_factory.mktemp("fsdp"))


@pytest.fixture
def case(two_ranks):
    """``case(name)``: what it returned on the two ranks."""

    def values(name):
        for results in two_ranks:
            assert "error" not in results[name], results[name]["error"]
        return [results[name]["value"] for results in two_ranks]

    return values


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise", "mxfp8"])
def test_gathered_bytes_are_those_of_a_cast_on_one_device(case, recipe, dtype):
    for value in case("bits"):
        number, seen, equal = value[f"{recipe} {dtype}"]
        # MX scales travel with the bytes, which FSDP allows where it need not pad: not 33 rows.
        assert number == seen == (4 if recipe == "mxfp8" else 5)
        assert equal


def test_payloads_are_freed_as_fsdp_frees_weights(case):
    for value in case("freed"):
        for after_forward, kept in (("True", 0), ("False", 1)):
            whole, numel, forward, backward = value[after_forward]
            assert whole == numel  # one byte for each element: there is nothing else
            assert forward == kept * whole
            assert backward == 0


@pytest.mark.parametrize("case_name", ["O1 fp32", "O1 bf16"])
def test_losses_of_two_ranks_are_those_of_one(case, case_name):
    for value in case("one_rank"):
        ranks, alone = value[case_name]
        assert ranks == pytest.approx(alone, rel=0.06)
        assert sum(ranks) == pytest.approx(sum(alone), rel=0.01)


def test_bytes_against_bf16(case):
    for value in case("bytes"):
        stock = {kind: sent for kind, _, _, sent in value["off"]}
        sent = {kind: (dtype, calls, sent) for kind, dtype, calls, sent in value["fp8"]}
        assert sorted(sent) == ["all-gather", "all-reduce", "all-to-all"]
        assert sent["all-gather"][0] == sent["all-to-all"][0] == "torch.uint8"
        assert sent["all-reduce"][1] == 1  # the scales of all weights
        gather = sent["all-gather"][2] + sent["all-reduce"][2]
        assert gather <= 0.52 * stock["all-gather"]
        assert sent["all-to-all"][2] <= 0.53 * stock["reduce-scatter"]
