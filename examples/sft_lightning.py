"""Supervised fine-tuning with PyTorch Lightning.

    python examples/sft_lightning.py --model Qwen/Qwen3-0.6B --data chats.jsonl
    python examples/sft_lightning.py --quick  # a tiny model, any machine

Each line of the data is {"prompt": "...", "completion": "..."}. Only the Trainer's
`precision="fp8-mixed"` asks for FP8. Needs `pip install lightning transformers`.
"""

import argparse
import inspect
import json
import os
import shutil
import statistics
import textwrap
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    DataCollatorForSeq2Seq,
    LlamaConfig,
    LlamaForCausalLM,
)


class SupervisedFineTuning(L.LightningModule):
    def __init__(self, model: torch.nn.Module, learning_rate: float) -> None:
        super().__init__()
        self.model, self.learning_rate = model.train(), learning_rate

    def training_step(self, batch: dict, batch_idx: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict, batch_idx: int) -> None:
        self.log("eval_loss", self.model(**batch).loss, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


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


def tokenize(row: dict[str, str], tokenizer) -> dict[str, list[int]]:
    """Return the tokens of a row; -100 leaves the prompt out of the loss."""
    prompt = tokenizer(row["prompt"], add_special_tokens=False).input_ids
    answer = tokenizer(row["completion"], add_special_tokens=False).input_ids
    answer = [*answer, tokenizer.eos_token_id]
    return {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--data", default="chats.jsonl")
    parser.add_argument("--output", default="runs/sft_lightning")
    parser.add_argument("--precision", default="fp8-mixed")
    parser.add_argument("--steps", type=int, default=-1, help="optimizer steps; -1: one epoch")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--quick", action="store_true", help="a tiny model and data of its own")
    options = parser.parse_args()

    L.seed_everything(0)
    if options.quick:
        model, tokenizer = quick_model()
        rows = quick_rows()
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        rows = [json.loads(line) for line in Path(options.data).read_text().splitlines()]
    data = [tokenize(row, tokenizer) for row in rows]
    collate = DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=16)
    train = DataLoader(data[10:], 8, shuffle=True, collate_fn=collate)
    held_out = DataLoader(data[:10], 8, collate_fn=collate)

    trainer = L.Trainer(
        precision=options.precision,
        max_epochs=1,
        max_steps=20 if options.quick else options.steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
    )
    module = SupervisedFineTuning(model, 1e-3 if options.quick else options.learning_rate)
    (before,) = trainer.validate(module, held_out, verbose=False)
    trainer.fit(module, train)
    (after,) = trainer.validate(module, held_out, verbose=False)
    if trainer.is_global_zero:
        model.save_pretrained(options.output)
        tokenizer.save_pretrained(options.output)
        losses = f"{before['eval_loss']:.3f} -> {after['eval_loss']:.3f}"
        print(f"held-out loss {losses}; the model is in {options.output}")


if __name__ == "__main__":
    main()
