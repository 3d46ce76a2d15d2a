"""LoRA with TRL and PEFT. The frozen base is stored in FP8, one byte per parameter.

    accelerate launch --mixed_precision fp8 examples/lora.py \
        --model Qwen/Qwen3-0.6B --data chats.jsonl
    accelerate launch --mixed_precision fp8 examples/lora.py --quick  # a tiny model, any machine

Each line of the data is {"prompt": "...", "completion": "..."}. Only the launcher's
flag asks for FP8. Needs `pip install peft trl`.
"""

import argparse
import inspect
import os
import shutil
import statistics
import textwrap

import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)
from trl import SFTConfig, SFTTrainer


def quick_model():
    """Return a tiny model with random weights and a tokenizer of bytes."""
    tokenizer = ByT5Tokenizer(extra_ids=0)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), num_attention_heads=2, pad_token_id=0, **sizes)
    return LlamaForCausalLM(config), tokenizer


def quick_rows() -> list[dict[str, str]]:
    """Return questions about functions of Python's library, with their docstrings' first lines."""
    rows = []
    for module in (inspect, os, shutil, statistics, textwrap):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            answer = (inspect.getdoc(function) or "").partition("\n")[0]
            rows.append({"prompt": f"{module.__name__}.{name}: ", "completion": answer})
    return [row for row in rows if row["completion"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--data", default="chats.jsonl")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--output", default="runs/lora")
    parser.add_argument("--quick", action="store_true", help="a tiny model and data of its own")
    options = parser.parse_args()

    if options.quick:
        model, tokenizer = quick_model()
        data = Dataset.from_list(quick_rows())
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype="bfloat16")
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        data = load_dataset("json", data_files=options.data, split="train")
    data = data.train_test_split(test_size=0.1, seed=0)
    trainer = SFTTrainer(
        model,
        SFTConfig(
            options.output,
            learning_rate=5e-3 if options.quick else 2e-4,
            max_steps=20 if options.quick else -1,
            num_train_epochs=1,
            per_device_train_batch_size=8,
            max_length=1024,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=data["train"],
        eval_dataset=data["test"],
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear"
        ),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model(options.output)
    if trainer.is_world_process_zero():
        print(f"held-out loss {before:.3f} -> {after:.3f}; the adapters are in {options.output}")


if __name__ == "__main__":
    main()
