import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
LAUNCH = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1")
FP8 = (*LAUNCH, "--mixed_precision", "fp8")

SENTENCES = ["the cat sat on a mat", "one dog ran in this park", "a cat ran for ever"] * 4
TEXT = [{"text": sentence} for sentence in SENTENCES]
PAIRS = [
    {"prompt": "the dog", "chosen": " " + a, "rejected": " " + b}
    for a, b in itertools.pairwise(SENTENCES)
]
PROMPTS = [{"prompt": sentence} for sentence in SENTENCES]
GENERATE = ("--num_generations", "2", "--max_completion_length", "4")
LORA = ("--use_peft", "--lora_target_modules", "q_proj", "v_proj")
# By length, so that no text has to be parsed.
REWARD = ("--reward_funcs", "get_soft_overlong_punishment")


@pytest.fixture
def shell(tmp_path, environment, forked_python):
    """Runs a command; returns the FP8 GEMMs of its processes, and what they wrote."""

    def run(*command, **variables):
        counts = tmp_path / "counts"
        counts.mkdir()
        done = subprocess.run(
            [forked_python, *command],
            env={**environment, "FP8_PROBE_OUT": str(counts), **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        entries = [json.loads(path.read_text()) for path in counts.iterdir()]
        return sum(entry["scaled_mm"] for entry in entries), done.stdout + done.stderr

    return run


@pytest.fixture
def options(tmp_path, tiny_model):
    """The options of a TRL script for a local model and rows of a local data set."""

    def for_rows(rows):
        data = tmp_path / "data"
        data.mkdir()
        (data / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
        given = {
            "model_name_or_path": tiny_model,
            "dataset_name": data,
            "output_dir": tmp_path / "out",
            "max_steps": 2,
            "per_device_train_batch_size": 2,
            "report_to": "none",
            "save_strategy": "no",
            "use_cpu": True,
        }
        return [text for name, value in given.items() for text in (f"--{name}", str(value))]

    return for_rows


def _assert_fp8(ran):
    gemms, output = ran
    # Frozen weights have block scales, which torch's scaled matmul does not multiply on the CPU.
    frozen = "14 frozen weights stored in FP8 only" in output
    assert frozen or gemms >= 14 * 2 * 3  # 14 linear layers, two steps
    assert "14 of " in output
    assert "linear layers" in output
    assert "FP8 was requested" not in output


slow = pytest.mark.slow


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "rows", "extra"),
    [
        pytest.param("sft", TEXT, LORA, id="sft-lora"),
        pytest.param("sft", TEXT, (), id="sft", marks=slow),
        pytest.param("reward", PAIRS, (), id="reward", marks=slow),
        pytest.param("dpo", PAIRS, (), id="dpo", marks=slow),
        pytest.param("dpo", PAIRS, LORA, id="dpo-lora", marks=slow),
        pytest.param("kto", PAIRS, (), id="kto", marks=slow),
        pytest.param("grpo", PROMPTS, (*REWARD, *GENERATE), id="grpo", marks=slow),
        pytest.param("rloo", PROMPTS, (*REWARD, *GENERATE), id="rloo", marks=slow),
    ],
)
def test_launched_modules_of_trl(shell, options, script, rows, extra):
    ran = shell(*FP8, "-m", f"trl.scripts.{script}", *options(rows), *extra)
    _assert_fp8(ran)
    assert ("14 frozen weights" in ran[1]) == (extra == LORA)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "rows", "extra"),
    [("sft", TEXT, ()), ("dpo", PAIRS, ()), ("rloo", PROMPTS, (*REWARD, *GENERATE))],
)
def test_command_of_trl(shell, options, command, rows, extra):
    # It hands what it does not know on to Accelerate's launcher.
    trl = os.path.join(os.path.dirname(sys.executable), "trl")
    _assert_fp8(shell(trl, command, *options(rows), *extra, "--mixed_precision", "fp8"))
