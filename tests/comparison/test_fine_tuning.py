"""What is found out before anything is trained."""

import argparse
import dataclasses
import json
from pathlib import Path

import fine_tuning
import fine_tuning_time
import finetune
import pytest
import torch
from fine_tuning_time import Work
from script_start import Refusal
from sft_arguments import argument_parser, last_checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}


def parsed(*arguments: str) -> argparse.Namespace:
    return argument_parser("").parse_args(arguments)


def test_a_length_beyond_the_context_is_refused(tmp_path):
    config = LlamaConfig(**SMALL, num_attention_heads=2, max_position_embeddings=64)
    config.save_pretrained(tmp_path)
    with pytest.raises(Refusal, match="--max-length 512: the model's context is 64 tokens"):
        fine_tuning.prepare(parsed("--model", str(tmp_path)))


def test_steps_are_measured_in_bf16_and_in_fp8():
    model = LlamaForCausalLM(LlamaConfig(**SMALL, num_attention_heads=2))
    row = torch.arange(32)[None]
    seen = []
    model.register_forward_hook(lambda *_: seen.append(type(model.model.layers[0].mlp.up_proj)))
    for step in fine_tuning_time.step_times(model, {"input_ids": row, "labels": row}):
        assert 0 < step.of(Work(1, 1, 1)) == sum(dataclasses.astuple(step))
    assert [kind.__name__ for kind in seen] == ["Linear"] * 4 + ["Float8Linear"] * 4


@pytest.mark.parametrize("name", ["./runs/nowhere", "/a/b/c", "a/b/c"])
def test_a_wrong_folder_is_no_name_on_the_hub(name):
    with pytest.raises(Refusal, match=f"--model {name}: there is no such folder; expected a fol"):
        fine_tuning.model_config(name)


def test_a_folder_without_a_tokenizer_says_so(tmp_path):
    LlamaForCausalLM(LlamaConfig(**SMALL, num_attention_heads=2)).save_pretrained(tmp_path)
    with pytest.raises(Refusal, match=f"--model {tmp_path}: .*AutoTokenizer.*; expected a folder"):
        fine_tuning._load(str(tmp_path))


def test_the_last_checkpoint_of_either_script(tmp_path):
    folder = tmp_path / "checkpoints"
    assert last_checkpoint(tmp_path) is None
    for step in (9, 20, 100):
        (folder / f"step-{step}").mkdir(parents=True)
    assert last_checkpoint(tmp_path) == folder / "step-100"
    other = tmp_path / "other"
    (other / "checkpoints").mkdir(parents=True)
    (other / "checkpoints/last.ckpt").touch()
    assert last_checkpoint(other) == Path(other / "checkpoints/last.ckpt")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a\n\n", "completion": "b"},
        {"instruction": "a", "input": "", "output": "b"},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    ],
)
def test_the_example_gets_prompts_and_completions(row, tmp_path):
    """Of each kind of row; and a command that starts the example, which ends by itself."""
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    given = ["--model", "m", "--data", str(tmp_path / "rows.jsonl"), "--assets", str(tmp_path)]
    words = finetune.command(finetune.argument_parser().parse_args([*given, "--steps", "9"]))
    pairs = Path(words[words.index("--data") + 1])
    assert json.loads(pairs.read_text()) == {"prompt": "a\n\n", "completion": "b"}
    program = words[words.index("--") :]
    assert program[2].endswith("examples/sft_lightning.py")
    assert words[words.index("--steps") + 1] == "10"
    assert program[program.index("--steps") + 1] == "9"
