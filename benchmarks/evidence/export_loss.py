"""Perplexity of a small Llama that is served from its export, against the forward of its training.

    nice -n 19 python -m benchmarks.evidence.export_loss   # from the root; a quarter of an hour

A Llama of two million parameters learns the standard library from scratch in BF16
(`evidence.pretraining` has the text). For each recipe a copy continues in FP8, at level O2, and is
exported in each format that can express the recipe. Stock transformers loads the folder on the CPU,
where it dequantizes: weights are those of training, activations stay in BF16. It can't load a
ModelOpt folder, which `torch_fp8.load_trainable` reads here.

* ``weights_equal``: number of FP8 layers whose dequantized weights in the file equal, bit for bit,
  those that a forward in training mode multiplied by, and number of all FP8 layers.
* ``bytes_per_bf16_byte``: bytes of the FP8 weights and their scales in the file, over BF16's.
* ``perplexity``: on the same held-out windows, in evaluation, of the trained model
  (``training``), of the served one, and of the trained BF16 weights without FP8 (``bf16``).
"""

import argparse
import copy
import datetime
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from benchmarks.comparison import tiny_llama
from benchmarks.evidence import pretraining
from benchmarks.rows import ROOT, add_csv, commit, write_rows
from torch_fp8 import (
    FP8Config,
    convert_optimizer,
    convert_to_float8,
    export,
    load_trainable,
    revert,
)
from torch_fp8.checkpoint.load import QuantizedFiles
from torch_fp8.nn import linear_function
from torch_fp8.ops.quantize import dequantize
from torch_fp8.quantization.recipe import RECIPES, SAVE_FORMATS

RESULTS = ROOT / "benchmarks/results/export_loss.csv"
CASES = [
    (format, recipe)
    for recipe in RECIPES
    for format, able in SAVE_FORMATS.items()
    if recipe in able
]
STEPS_BF16, STEPS, HIDDEN, LAYERS = 400, 30, 256, 2
RATE_BF16, RATE = 3e-3, 3e-4
EVAL_WINDOWS = 128
BAND = 0.005
"""The most by which the served perplexity may differ."""
COLUMNS = [
    *("format", "recipe", "opened_by", "fp8_layers", "weights_equal", "bytes_per_bf16_byte"),
    *("training_perplexity", "served_perplexity", "rel_diff", "bf16_perplexity"),
    *("steps", "torch", "transformers", "commit", "date", "command"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    add_csv(parser, "export_loss")
    arguments = parser.parse_args()
    pretraining.EVAL_WINDOWS = EVAL_WINDOWS
    tokens, held_out, vocab_size = pretraining.corpus()
    base = pretrained(tokens, vocab_size, STEPS_BF16)
    rows = []
    for recipe in RECIPES:
        model = trained(base, recipe, tokens, arguments.steps)
        rows += measure(model, recipe, held_out, arguments.steps)
        write(rows, arguments.csv)
    print(f"wrote {arguments.csv}")


def pretrained(tokens: Tensor, vocab_size: int, steps: int) -> nn.Module:
    """Return a Llama that has learned in BF16."""
    torch.manual_seed(0)
    model = tiny_llama.build(vocab_size, HIDDEN, LAYERS, pad_token_id=0, eos_token_id=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE_BF16, betas=(0.9, 0.95))
    train(model, optimizer, tokens, steps, seed=0)
    return model


def trained(base: nn.Module, recipe: str, tokens: Tensor, steps: int) -> nn.Module:
    """Return a copy that has continued in FP8, at level O2."""
    model = copy.deepcopy(base)
    config = FP8Config(recipe=recipe)
    convert_to_float8(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95))
    convert_optimizer(optimizer, config, model=model)
    train(model, optimizer, tokens, steps, seed=1)
    return model


def train(model: Any, optimizer: Any, tokens: Tensor, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
    for _ in range(steps):
        loss = pretraining.loss_of(model, pretraining.windows(tokens, pretraining.BATCH, generator))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def measure(model: Any, recipe: str, held_out: Tensor, steps: int) -> list[dict[str, Any]]:
    """Export a model in all formats that can express its recipe, and return a row for each."""
    training = perplexity(model, held_out)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for format in [format for format, able in CASES if able == recipe]:
            path = Path(folder) / format
            report = export(model, path, format)
            if format == "modelopt":
                opened_by = "torch_fp8.load_trainable"
                served = load_trainable(AutoModelForCausalLM, path, FP8Config(opt_level="O1"))
            else:
                opened_by = "transformers"
                served = AutoModelForCausalLM.from_pretrained(path)
            ours = perplexity(served, held_out)
            rows.append(
                {
                    "format": format,
                    "recipe": recipe,
                    "opened_by": opened_by,
                    "fp8_layers": len(report.fp8),
                    "weights_equal": equal_weights(model, path),
                    "bytes_per_bf16_byte": f"{report.bytes_per_bf16_byte:.4f}",
                    "training_perplexity": f"{training:.4f}",
                    "served_perplexity": f"{ours:.4f}",
                    "rel_diff": f"{ours / training - 1:+.5f}",
                    "steps": steps,
                }
            )
            print(*rows[-1].values(), flush=True)
    revert(model)
    for row in rows:
        row["bf16_perplexity"] = f"{perplexity(model, held_out):.4f}"
    return rows


def perplexity(model: Any, held_out: Tensor) -> float:
    """Return exp of the mean loss of the held-out windows, in evaluation."""
    return math.exp(pretraining.evaluate(model.eval(), held_out))


def equal_weights(model: nn.Module, path: Path) -> int:
    """Count the layers whose weights in the file are those that training multiplies by."""
    files = QuantizedFiles(path)
    multiplied = weights_of_a_forward(model)
    return sum(
        torch.equal(files.read(f"{name}.weight").dequantize(), weight)
        for name, weight in multiplied.items()
    )


def weights_of_a_forward(model: Any) -> dict[str, Tensor]:
    """Return the float32 values of the weights that a forward in training mode multiplies by."""
    seen: dict[str, Tensor] = {}
    original = linear_function.fprop

    def spy(*arguments: Any, **needs: Any) -> Any:
        y, operands = original(*arguments, **needs)
        seen[arguments[4].name] = dequantize(operands.weight)
        return y, operands

    linear_function.fprop = spy
    try:
        pretraining.loss_of(model.train(), torch.arange(64).reshape(1, -1))
    finally:
        linear_function.fprop = original
    return seen


def write(rows: list[dict[str, Any]], path: Path) -> None:
    import transformers

    about = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit(),
        "date": f"{datetime.date.today():%Y-%m-%d}",
        "command": "python -m benchmarks.evidence.export_loss",
    }
    write_rows(path, COLUMNS, [{**row, **about} for row in rows])


if __name__ == "__main__":
    main()
