"""Direct preference optimization with TRL: a trained policy and a frozen reference.

    accelerate launch --mixed_precision fp8 examples/dpo.py \
        --model Qwen/Qwen3-0.6B --data pairs.jsonl
    accelerate launch --mixed_precision fp8 examples/dpo.py --quick  # a tiny model, any machine

Each line of the data is {"prompt": "...", "chosen": "...", "rejected": "..."}. Only the
launcher's flag asks for FP8. The reference is stored in FP8, one byte per parameter. Needs
`pip install trl`.
"""

import argparse
import copy
import inspect
import os
import shutil
import statistics
import textwrap

import torch
from datasets import Dataset, load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)
from trl import DPOConfig, DPOTrainer


def quick_model():
    """Return a tiny model with random weights and a tokenizer of bytes."""
    tokenizer = ByT5Tokenizer(extra_ids=0)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), num_attention_heads=2, pad_token_id=0, **sizes)
    return LlamaForCausalLM(config), tokenizer


def quick_rows() -> list[dict[str, str]]:
    """Return functions of Python's library, with half a docstring line as the rejected answer."""
    rows = []
    for module in (inspect, os, shutil, statistics, textwrap):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            answer = (inspect.getdoc(function) or "").partition("\n")[0]
            row = {"prompt": f"{module.__name__}.{name}: ", "chosen": answer}
            rows.append(row | {"rejected": answer[: len(answer) // 2]})
    return [row for row in rows if row["rejected"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--data", default="pairs.jsonl")
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--output", default="runs/dpo")
    parser.add_argument("--quick", action="store_true", help="a tiny model and data of its own")
    options = parser.parse_args()

    if options.quick:
        model, tokenizer = quick_model()
        data = Dataset.from_list(quick_rows())
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype="float32")
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        data = load_dataset("json", data_files=options.data, split="train")
    data = data.train_test_split(test_size=0.1, seed=0)
    trainer = DPOTrainer(
        model,
        copy.deepcopy(model),
        args=DPOConfig(
            options.output,
            beta=options.beta,
            learning_rate=5e-4 if options.quick else 1e-6,
            max_steps=12 if options.quick else -1,
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
    )
    trainer.train()
    result = trainer.evaluate()
    trainer.save_model(options.output)
    if trainer.is_world_process_zero():
        print(
            f"held-out loss {result['eval_loss']:.3f} (0.693 at the start), "
            f"{result['eval_rewards/accuracies']:.0%} of the pairs ranked right; "
            f"the model is in {options.output}"
        )


if __name__ == "__main__":
    main()
