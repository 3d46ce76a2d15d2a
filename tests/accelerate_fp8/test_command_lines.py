import itertools
import json
import os
import sys

import pytest

from tests.accelerate_fp8.conftest import experts_in
from tests.processes import ran

LAUNCH = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1")
FP8 = (*LAUNCH, "--mixed_precision", "fp8")

SENTENCES = ["the cat sat on a mat", "one dog ran in this park", "a cat ran for ever"] * 4
TEXT = [{"text": sentence} for sentence in SENTENCES]
PAIRS = [
    {"prompt": "the dog", "chosen": " " + a, "rejected": " " + b}
    for a, b in itertools.pairwise(SENTENCES)
]
PROMPTS = [{"prompt": sentence} for sentence in SENTENCES]
SAMPLE = (
    *("--num_generations", "2", "--max_completion_length", "4"),
    *("--reward_funcs", "get_soft_overlong_punishment"),  # by length: no text has to be parsed
)
LORA = ("--use_peft", "--lora_target_modules", "q_proj", "v_proj")
LORA_ON_EXPERTS = (
    *("--use_peft", "--lora_dropout", "0", "--lora_target_modules", "q_proj"),
    *("--lora_target_parameters", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
)


@pytest.fixture
def trl(tmp_path, environment, tiny_model):
    """``trl(command, rows, options, model)`` trains two steps on rows of a local data set.

    Returns the FP8 GEMMs of its processes, and what they wrote.
    """

    def run(command, rows, options, model=tiny_model):
        counts, data = tmp_path / "counts", tmp_path / "data"
        counts.mkdir()
        data.mkdir()
        (data / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
        given = {
            "model_name_or_path": model,
            "dataset_name": data,
            "output_dir": tmp_path / "out",
            "max_steps": 2,
            "per_device_train_batch_size": 2,
            "report_to": "none",
            "use_cpu": True,
        }
        arguments = [text for name, value in given.items() for text in (f"--{name}", str(value))]
        words = (*command, *arguments, *options)
        done = ran(*words, env=environment, cwd=tmp_path, FP8_PROBE_OUT=str(counts))
        output = done.stdout + done.stderr
        assert "FP8 was requested" not in output
        saved = "adapter_model.safetensors" if "--use_peft" in options else "model.safetensors"
        assert (tmp_path / "out" / saved).exists()
        entries = [json.loads(path.read_text()) for path in counts.iterdir()]
        return sum(entry["scaled_mm"] for entry in entries), output

    return run


def _assert_fp8(ran):
    gemms, output = ran
    # Frozen weights have block scales, which torch's scaled matmul does not multiply on the CPU.
    frozen = "14 frozen weights stored in FP8 only" in output
    assert frozen or gemms >= 14 * 2 * 3  # 14 linear layers, two steps
    assert "14 of " in output
    assert "linear layers" in output


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
        pytest.param("grpo", PROMPTS, SAMPLE, id="grpo", marks=slow),
        pytest.param("rloo", PROMPTS, SAMPLE, id="rloo", marks=slow),
    ],
)
def test_launched_modules_of_trl(trl, forked_python, script, rows, extra):
    ran = trl([forked_python, *FP8, "-m", f"trl.scripts.{script}"], rows, extra)
    _assert_fp8(ran)
    is_frozen = extra == LORA or script in ("dpo", "kto", "rloo")  # these have a reference
    assert ("14 frozen weights" in ran[1]) == is_frozen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "rows", "extra"), [("sft", TEXT, ()), ("dpo", PAIRS, ()), ("rloo", PROMPTS, SAMPLE)]
)
def test_command_of_trl(trl, forked_python, command, rows, extra):
    # It hands what it does not know on to Accelerate's launcher.
    name = os.path.join(os.path.dirname(sys.executable), "trl")
    options = (*extra, "--mixed_precision", "fp8")
    _assert_fp8(trl([forked_python, name, command], rows, options))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "script", "extra"),
    [
        pytest.param("Qwen3Moe", "sft", LORA_ON_EXPERTS, id="sft-qwen3-lora"),
        pytest.param("Qwen3Moe", "sft", (), id="sft-qwen3", marks=slow),
        pytest.param("GptOss", "sft", LORA_ON_EXPERTS, id="sft-gpt-oss-lora", marks=slow),
        pytest.param("GptOss", "sft", (), id="sft-gpt-oss", marks=slow),
        pytest.param("Qwen3Moe", "grpo", (), id="grpo-qwen3"),
        pytest.param("Qwen3Moe", "grpo", LORA_ON_EXPERTS, id="grpo-qwen3-lora", marks=slow),
        pytest.param("GptOss", "grpo", (), id="grpo-gpt-oss", marks=slow),
    ],
)
def test_experts_train_in_fp8(trl, forked_hosts, tiny_model, tmp_path, name, script, extra):
    rows, options = (PROMPTS, (*SAMPLE, *extra)) if script == "grpo" else (TEXT, extra)
    command = [forked_hosts, *FP8, "-m", f"trl.scripts.{script}"]
    _, output = trl(command, rows, options, experts_in(tmp_path / "model", tiny_model, name))
    assert "4 fused weights in FP8 grouped GEMMs" in output
    if script == "sft":
        assert ("stored in FP8 only" in output) == bool(extra)
