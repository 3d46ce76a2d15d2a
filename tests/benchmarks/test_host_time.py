"""What a block calls on the host: counted, so the same on every machine."""

import json
import shutil
from pathlib import Path

import pytest

from tests.processes import ran

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import collections, json, os, sys
from benchmarks.evidence import host_time
from benchmarks.evidence.stub_driver import stub_driver
from benchmarks.evidence.compiled_block import BLOCKS
from benchmarks.evidence.generated_call import generated_calls

LAYOUT = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
LAYOUT |= {"num_attention_heads": 2, "num_key_value_heads": 1}

def called(run):
    names = collections.Counter()
    def note(frame, event, argument):
        if event == "call":
            code = frame.f_code
            names[os.path.basename(code.co_filename) + ":" + code.co_name] += 1
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return names

with stub_driver() as counts:
    rows = []
    for case in ("training", "inference"):
        rows += host_time.rows(case, host_time.runs_of(case), counts, 2)
    narrow = host_time.runs_of("training, O3", ("tensorwise",))
    rows += host_time.rows("training, O3", narrow, counts, 2)
    split = host_time.runs_of(host_time.WIDE, ("tensorwise",))
    rows += host_time.rows(host_time.WIDE, split, counts, 2)
    rows += host_time.rows("step", {"O2": host_time.optimizer_step("O2")}, counts, 2)
    names = {}
    for recipe in host_time.RECIPES:
        run = host_time.block("training", recipe)
        for _ in range(3):
            run()
        names[recipe] = called(run)
    BLOCKS["small"] = (LAYOUT, 16)
    with generated_calls():
        variants = "BF16", "tensorwise", "tensorwise last_step O2 with payloads"
        runs = host_time.compiled_and_eager("small", variants)
        rows += host_time.rows(host_time.COMPILED, runs, counts, 2)
print(json.dumps([rows, names]))
"""
RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("cc") is None, reason="Triton's launchers need cc"),
]


@pytest.fixture(scope="module")
def run(forked_python):
    return json.loads(ran(forked_python, "-c", SCRIPT, cwd=ROOT).stdout.splitlines()[-1])


@pytest.fixture
def rows(run):
    return {
        (row["what"], row["recipe"], row["mode"])[: 3 if "compiled" in row["what"] else 2]: row
        for row in run[0]
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_all_gemms_and_kernels_are_launched(rows, recipe):
    training, inference = (rows[case, recipe] for case in ("training", "inference"))
    grouped = recipe == "tensorwise"  # blocks do not divide k and v of this block
    assert (training["gemms"], inference["gemms"]) == (15 if grouped else 21, 7)
    kernels = {"tensorwise": (28, 4), "delayed": (28, 6), "rowwise": (63, 9), "blockwise": (30, 6)}
    assert (training["kernels"], inference["kernels"]) == kernels[recipe]


def test_weights_in_two_halves_are_not_read_for_their_amax(rows):
    assert rows["training, float32 weights", "tensorwise"]["kernels"] == 25


@pytest.mark.parametrize("recipe", RECIPES)
def test_eager_calls_nothing_that_it_can_do_without(run, recipe):
    names = run[1][recipe]
    assert names["stub_driver.py:product"] == (15 if recipe == "tensorwise" else 21)
    for name in (
        "_ops.py:__call__",  # torch's dispatcher
        "autocast_mode.py:__enter__",
        "stub_driver.py:_capability",  # of the device
        "jit.py:__call__",  # Triton's cdiv and its like
        "core.py:__ne__",  # of a kernel's globals, each of which Triton compares in each launch
    ):
        assert name not in names, name
    assert names["lazy_quantized.py:__torch_function__"] <= 20


@pytest.mark.parametrize("recipe", RECIPES)
def test_calls_of_a_block(rows, recipe):
    most = {"tensorwise": 2600, "delayed": 2840, "rowwise": 2965, "blockwise": 3000}
    assert rows["training", recipe]["calls"] <= most[recipe]
    assert rows["inference", recipe]["calls"] <= 5 * rows["inference", "BF16"]["calls"]


def test_calls_of_a_block_whose_gradients_get_8_bits(rows):
    """Each of its 7 gradients takes 65 calls."""
    o3, o2 = (rows[case, "tensorwise"]["calls"] for case in ("training, O3", "training"))
    assert o3 - o2 <= 7 * 66


def test_calls_of_a_compiled_block(rows):
    """Kernels that Inductor launches take the host little; as opaque calls, 3.3 of BF16's."""
    what, fp8 = "training, compiled", "tensorwise"
    bf16, compiled = (rows[what, recipe, "compiled"] for recipe in ("BF16", fp8))
    assert compiled["calls"] <= 0.6 * rows[what, fp8, "eager"]["calls"]
    assert compiled["calls"] <= 2.0 * bf16["calls"]
    halves = rows[what, "tensorwise last_step O2 with payloads", "compiled"]
    assert halves["calls"] <= bf16["calls"] + 446  # 16 are guards and inputs of each of 7 weights
    assert bf16["kernels"] == 12


def test_calls_of_an_optimizer_step(rows):
    assert rows["step", "O2"]["kernels"] == 1
    assert rows["step", "O2"]["calls"] <= 5_480
