import json
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from tests.moe_models import moe_model

LAUNCH = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1")
TARGETS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
LORA = (
    "--use_peft",
    "--lora_dropout",
    "0",
    "--lora_target_modules",
    "q_proj",
    "--lora_target_parameters",
    *TARGETS,
)
ROWS = [{"text": sentence} for sentence in ("the cat sat on a mat", "one dog ran in this park")] * 4
GENERATE = (
    *("--num_generations", "2", "--max_completion_length", "4"),
    *("--reward_funcs", "get_soft_overlong_punishment"),  # by length: no text has to be parsed
)
slow = pytest.mark.slow


def _folder(name, tiny_model, tmp_path):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_model)
    tokenizer.save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    sizes = {"eos_token_id": 3, "bos_token_id": 2, "pad_token_id": 1}
    moe_model(name, **sizes).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "extra"),
    [
        pytest.param("Qwen3Moe", LORA, id="qwen3-lora"),
        pytest.param("Qwen3Moe", (), id="qwen3", marks=slow),
        pytest.param("GptOss", LORA, id="gpt-oss-lora", marks=slow),
        pytest.param("GptOss", (), id="gpt-oss", marks=slow),
    ],
)
def test_trl_sft_trains_experts_in_fp8(
    name, extra, tiny_model, tmp_path, environment, forked_hosts
):
    output = _run(
        "sft", _folder(name, tiny_model, tmp_path), ROWS, extra, tmp_path, environment, forked_hosts
    )
    assert ("stored in FP8 only" in output) == bool(extra)
    saved = "adapter_model.safetensors" if extra else "model.safetensors"
    assert (tmp_path / "out" / saved).exists()


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "extra"),
    [
        pytest.param("Qwen3Moe", (), id="qwen3"),
        pytest.param("Qwen3Moe", LORA, id="qwen3-lora", marks=slow),
        pytest.param("GptOss", (), id="gpt-oss", marks=slow),
    ],
)
def test_trl_grpo_trains_experts_in_fp8(
    name, extra, tiny_model, tmp_path, environment, forked_hosts
):
    folder = _folder(name, tiny_model, tmp_path)
    rows = [{"prompt": row["text"]} for row in ROWS]
    _run("grpo", folder, rows, (*GENERATE, *extra), tmp_path, environment, forked_hosts)
    saved = "adapter_model.safetensors" if extra else "model.safetensors"
    assert (tmp_path / "out" / saved).exists()


def _run(script, model, rows, extra, tmp_path, environment, python):
    """Run a script of TRL under the flag; return what it said."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = {
        "model_name_or_path": model,
        "dataset_name": tmp_path / "data",
        "output_dir": tmp_path / "out",
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "report_to": "none",
        "use_cpu": True,
    }
    options = [text for key, value in given.items() for text in (f"--{key}", str(value))]
    command = (*LAUNCH, "--mixed_precision", "fp8", "-m", f"trl.scripts.{script}", *options, *extra)
    done = subprocess.run(
        [python, *command],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "4 fused weights in FP8 grouped GEMMs" in output
    assert "FP8 was requested" not in output
    return output


CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: fp8
num_machines: 1
num_processes: 2
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: Qwen3MoeDecoderLayer
  fsdp_cpu_ram_efficient_loading: {}
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "sparing",
    [
        pytest.param("true", id="rank-0-loads"),
        pytest.param("false", id="each-rank-loads", marks=slow),
    ],
)
def test_a_configuration_file_shards_frozen_experts(
    sparing, tiny_model, tmp_path, environment, forked_hosts
):
    config = tmp_path / "fsdp.yaml"
    config.write_text(CONFIG.format(sparing))
    script = Path(__file__).parent / "scripts" / "fsdp2_experts.py"
    launch = ("-m", "accelerate.commands.launch", "--config_file", str(config))
    folder = _folder("Qwen3Moe", tiny_model, tmp_path)
    done = subprocess.run(
        [forked_hosts, *launch, "--main_process_port", "0", str(script), str(folder)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 0: trained" in done.stdout
    assert "rank 1: trained" in done.stdout
    assert "frozen weights stored and gathered in FP8 only" in done.stderr
