"""The share of LoRA's improvement that remains after the adapter is merged into an FP8 base.

    nice -n 19 python -m benchmarks.evidence.merge_aware   # from the root; two minutes

A small Llama has learned the standard library in BF16 (as in `evidence.rollout_logprobs`). Its
parameters are rounded to BF16, as for LoRA: exports hold all other weights in BF16, while with
a float32 embedding the hidden states between layers would be float32 in training. LoRA over
its FP8 base then learns the same text read backwards, by PEFT's method (``plain``) and with
``FP8Config(merge_aware=True)`` (``aware``), with the same batches, at several learning rates: a
smaller rate leads to a smaller adapter. The trained model is exported with
``adapters="merge"`` and read again by `torch_fp8.load_frozen`.

* ``base``, ``trained``, ``merged``: loss of the same windows, in FP8 with recipe blockwise: before,
  as trained, and of the merged checkpoint.
* ``kept``: ``(base - merged) / (base - trained)``.
* ``delta``: norm of the adapters' change, over that of the weights.
* ``equal_logits``: whether the merged checkpoint's logits are those of the trained forward, bit for
  bit.
* ``casts``, ``bytes``: the weights that one step folds and casts, and the bytes of them that are
  saved for backward in addition to the base.
"""

import argparse
import copy
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.evidence import pretraining
from benchmarks.evidence.rollout_logprobs import learned, write
from benchmarks.rows import ROOT, add_csv
from torch_fp8 import FP8Config, convert_to_float8, export, load_frozen
from torch_fp8.nn.merge_aware import MergeAware
from torch_fp8.tensor.frozen_weight import Float8FrozenWeight

RESULTS = ROOT / "benchmarks/results/merge_aware.csv"
STEPS, RATES = 40, (5e-5, 2e-4, 1e-3)
BATCH, TOKENS, EVALUATED = 8, 64, 32
LEAST = 0.95
COLUMNS = [
    *("way", "rate", "delta", "base", "trained", "merged", "kept", "equal_logits"),
    *("casts", "bytes", "steps", "torch", "transformers", "commit", "date", "command"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_csv(parser, "merge_aware")
    arguments = parser.parse_args()
    base, tokens, _ = learned()
    rows = [row for rate in RATES for row in measure(base, tokens.flip(0), rate, STEPS)]
    write(rows, arguments.csv, COLUMNS, "benchmarks.evidence.merge_aware")


def measure(base: Any, tokens: Tensor, rate: float, steps: int) -> list[dict[str, Any]]:
    """Train both ways, and return a row for each."""
    evaluated = pretraining.windows(tokens, EVALUATED, torch.Generator().manual_seed(9))[:, :TOKENS]
    base = in_bf16(base)
    rows = []
    for way in ("plain", "aware"):
        torch.manual_seed(0)
        lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(copy.deepcopy(base), lora)
        convert_to_float8(model, FP8Config(recipe="blockwise", merge_aware=way == "aware"))
        before, _ = loss_of(model, evaluated)
        adapters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(adapters, lr=rate)
        generator = torch.Generator().manual_seed(1)
        for _ in range(steps):
            windows = pretraining.windows(tokens, BATCH, generator)[:, :TOKENS]
            pretraining.loss_of(model.train(), windows).backward()
            optimizer.step()
            optimizer.zero_grad()
        trained, logits = loss_of(model, evaluated)
        with tempfile.TemporaryDirectory() as folder:
            export(model, Path(folder) / "merged", adapters="merge")
            served = load_frozen(AutoModelForCausalLM, Path(folder) / "merged", "blockwise")
            merged, of_merged = loss_of(served, evaluated)
        layers = [m for m in model.modules() if isinstance(m, MergeAware)]
        row = {
            "way": way,
            "rate": rate,
            "delta": f"{delta_of(model):.5f}",
            "base": f"{before:.5f}",
            "trained": f"{trained:.5f}",
            "merged": f"{merged:.5f}",
            "kept": f"{(before - merged) / (before - trained):.4f}",
            "equal_logits": torch.equal(logits, of_merged),
            "casts": len(layers),
            "bytes": sum(m.base_layer.weight.numel() for m in layers),
            "steps": steps,
        }
        print(*row.values(), flush=True)
        rows.append(row)
    return rows


def in_bf16(model: Any) -> Any:
    """Return a copy with BF16 parameters and float32 buffers (of RoPE), as loading gives."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


@torch.no_grad()
def loss_of(model: Any, windows: Tensor) -> tuple[float, Tensor]:
    """Return the loss of these windows in evaluation, and their logits."""
    with torch.autocast("cpu", torch.bfloat16):
        made = model.eval()(input_ids=windows, labels=windows, use_cache=False)
    return float(made.loss), made.logits


@torch.no_grad()
def delta_of(model: Any) -> float:
    """Return the norm of the adapters' change, over that of the weights below them."""
    added = total = 0.0
    for layer in model.modules():
        weight = getattr(getattr(layer, "base_layer", None), "weight", None)
        if isinstance(weight, Float8FrozenWeight):
            added += layer.get_delta_weight("default").double().square().sum().item()
            total += weight.dequantize().double().square().sum().item()
    return math.sqrt(added / total)


if __name__ == "__main__":
    main()
