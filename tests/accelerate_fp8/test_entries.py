import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest

pytestmark = pytest.mark.long


SCRIPTS = Path(__file__).parent / "scripts"
TRAINERS = ("trainer", "sft", "lora", "dpo", "grpo", "reward_model")

# loop.py: 8 micro-batches through 3 layers; fprop and wgrad for each, dgrad for all but the first.
LOOP_GEMMS = 8 * (3 + 3 + 2)


@pytest.mark.parametrize("script", ["loop.py", "trainers.py"])
def test_scripts_say_nothing_of_fp8(script):
    assert "fp8" not in (SCRIPTS / script).read_text().lower()


@pytest.mark.smoke
def test_launcher_flag_runs_fp8_gemms(run):
    done = run("loop.py", launch=("--mixed_precision", "fp8"))
    assert (done.fp8, done.linear) == (LOOP_GEMMS, 0)
    assert "layer torch_fp8.nn.linear.Float8Linear" in done.stdout


def test_launcher_without_fp8_runs_none(run):
    done = run("loop.py", launch=("--mixed_precision", "no"))
    assert done.fp8 == 0
    assert done.linear > 0
    assert "layer torch.nn.modules.linear.Linear" in done.stdout


def test_constructor_argument_runs_fp8_gemms_and_shows_the_summary_once(run):
    done = run("loop.py", "fp8")
    assert done.fp8 == LOOP_GEMMS
    assert done.stderr.count("linear layers") == 1
    assert "3 of 3 linear layers, 100.0 % of the matmul FLOPs, level O2" in done.stderr
    assert "  optimizer AdamW with 8-bit states" in done.stderr
    assert "emulation on CPU" in done.stderr
    assert "bytes per parameter" in done.stderr


def test_environment_reaches_every_option_of_an_unmodified_script(run):
    options = '{"recipe": "tensorwise", "wgrad": "bf16", "skip": ["2"]}'
    done = run("loop.py", "fp8", TORCH_FP8_CONFIG=options)
    assert done.fp8 == 8 * (2 + 1)  # two layers; dgrad for the last only, no wgrad
    assert "tensorwise" in done.stderr
    assert "2: skip='2'" in done.stderr


def test_trainers_of_transformers_and_trl_run_fp8_gemms(run, tiny_model):
    done = run("trainers.py", tiny_model, launch=("--mixed_precision", "fp8"))
    counts = _counts(done.stdout)
    assert set(counts) == set(TRAINERS)
    for name, (trained, evaluated) in counts.items():
        if name != "lora":
            assert trained > 0, name
            assert evaluated > 0, name
    # 14 linear layers, 2 steps, three GEMMs each; q, k, v share two of theirs, and so do gate, up.
    assert counts["trainer"][0] == (14 * 3 - 2 * 6) * 2
    # TRL recomputes activations by default.
    assert counts["sft"][0] == (14 * 4 - 2 * 6) * 2
    # Frozen are the base of LoRA and the references of DPO and GRPO: they have block scales, which
    # the scaled matmul of torch does not take on the CPU.
    assert done.stderr.count("14 frozen weights stored in FP8 only") == 3
    assert done.stderr.count("bf16=True in the training arguments") == 1
    # 14 linear layers, embedding and output layer; the adapters of 4 layers, two matrices each.
    full = "optimizer AdamW {'trained SplitWeight': 16}"
    assert done.stdout.count(full) == 4
    kinds = "{'frozen Parameter': 2, 'frozen Float8FrozenWeight': 14, 'trained Parameter': 8}"
    assert f"lora optimizer AdamW {kinds}" in done.stdout


def test_trainers_without_the_flag_run_none(run, tiny_model):
    done = run("trainers.py", tiny_model, "trainer", "lora", launch=("--mixed_precision", "no"))
    assert _counts(done.stdout) == dict.fromkeys(("trainer", "lora"), (0, 0))


@pytest.mark.gpu
@pytest.mark.skipif(
    not entry_points(group="torch.backends", name="fp8_autoload"),
    reason="torch-fp8 is not installed here, so that nothing loads it for an unmodified script",
)
def test_constructor_argument_runs_fp8_gemms_on_the_card(run):
    # By name, for auto leaves layers as small as these in BF16.
    named = '{"recipe": "tensorwise"}'
    done = run("loop.py", "fp8", CUDA_VISIBLE_DEVICES="0", TORCH_FP8_CONFIG=named)
    assert done.fp8 == LOOP_GEMMS
    assert "torch scaled_mm on " in done.stderr


def _counts(stdout):
    lines = re.findall(r"^(\w+): trained (\d+) evaluated (\d+)$", stdout, re.MULTILINE)
    return {name: (int(trained), int(evaluated)) for name, trained, evaluated in lines}
