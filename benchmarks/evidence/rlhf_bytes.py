"""Bytes of the models that RLHF holds at once, in BF16-mixed and FP8, counted on the meta device.

    python -m benchmarks.evidence.rlhf_bytes    # runs/benchmarks/rlhf_bytes.csv

Nothing is computed: models are built without memory and converted by this package. The bytes are
those of their tensors, and of the gradients and states that training will create.
A script in commit 9b7d5a8 counted the rows ``ppo example`` of the CSV while it
trained: storages of its four models' tensors, and as ``peak`` all live ones, with batches.

* ``ppo``: policy and value are trained, reference and reward are not; four equal models, as in
  AlpacaFarm's PPO (FP8-LM, arXiv 2310.18313). BF16-mixed holds trained weights in float32, the
  others in BF16.
* ``grpo``: TRL's GRPO with ``beta > 0`` and a reward model: policy and reference are loaded in
  float32, the reward in BF16.
* ``lora``: a LoRA policy, whose base serves as the reference, too, in BF16.

``weights`` are what the modules hold, with the scales of frozen weights, ``residuals`` what the
optimizer keeps of a weight below BF16, ``moments`` Adam's, with their scales. The FP8 rows are
those of level O2, the default of the one flag.
"""

import argparse
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from benchmarks.measurement import Table, environment, print_table
from benchmarks.rows import add_csv
from benchmarks.shapes import LLAMA_3_1_8B
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8, freeze
from torch_fp8.conversion.memory import expected_memory

LLAMA_7B = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
"""The layout of LLaMA-7B, AlpacaFarm's model (arXiv 2302.13971)."""
LAYOUTS = {"LLaMA-7B": LLAMA_7B, "Llama-3.1-8B": LLAMA_3_1_8B}
CONFIG = FP8Config(recipe="tensorwise")
BF16, FP8 = "bf16-mixed", "fp8 O2"
COLUMNS = ("scenario", "layout", "variant", "role", "parameters")
BYTES = ("weights", "residuals", "moments", "gradients")
COUNTED = ("caches", "peak")
"""Columns of rows that a run counted: FP8 weights cached between steps, and all live tensors."""
CHANGES = ("weights_below", "weights_and_residuals_below", "moments_below")

SCENARIOS: dict[str, tuple[tuple[str, str, torch.dtype], ...]] = {
    "ppo": (
        ("policy", "trained", torch.float32),
        ("value", "trained", torch.float32),
        ("reference", "frozen", torch.bfloat16),
        ("reward", "frozen", torch.bfloat16),
    ),
    "grpo": (
        ("policy", "trained", torch.float32),
        ("reference", "frozen", torch.float32),
        ("reward", "frozen", torch.bfloat16),
    ),
    "lora": (
        ("policy and reference", "adapted", torch.bfloat16),
        ("reward", "frozen", torch.bfloat16),
    ),
}
"""The models of each scenario: role, what becomes of it, and the dtype that it is loaded in."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_csv(parser, "rlhf_bytes")
    arguments = parser.parse_args()
    about = environment(torch.device("cpu"))
    table = Table(arguments.csv, (*COLUMNS, *BYTES, *CHANGES, *COUNTED), COLUMNS[:4], about)
    for scenario, models in SCENARIOS.items():
        layout = "LLaMA-7B" if scenario == "ppo" else "Llama-3.1-8B"
        sizes = LAYOUTS[layout]
        totals = {}
        for variant in (BF16, FP8):
            rows = [
                {"role": role, **bytes_of(role, kind, dtype, sizes, variant == FP8)}
                for role, kind, dtype in models
            ]
            total: dict[str, Any] = {"role": "all"}
            total |= {name: sum(row[name] for row in rows) for name in ("parameters", *BYTES)}
            totals[variant] = total
            if variant == FP8:
                total |= changes(totals[BF16], total)
            about_rows = {"scenario": scenario, "layout": layout, "variant": variant}
            table.add([{**about_rows, **row} for row in (*rows, total)])
    print_rows(table)


def print_rows(table: Table) -> None:
    """Print the rows that were added, in GiB."""
    shown = ("scenario", "variant", "role", *BYTES, *CHANGES)
    print_table(shown, [readable(row) for row in table.rows])


def bytes_of(
    role: str, kind: str, dtype: torch.dtype, sizes: dict[str, Any], in_fp8: bool
) -> dict[str, int]:
    """Return the bytes of one model by category."""
    model = meta_model(role, sizes, dtype)
    if kind == "adapted":
        model = adapted(model)
    optimizers = []
    if kind == "frozen":
        model.requires_grad_(False)
        if in_fp8:
            freeze(model, CONFIG, device="cpu")
    else:
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizers = [torch.optim.AdamW(trained)]
        if in_fp8:
            convert_to_float8(model, CONFIG, device="cpu")
            convert_optimizer(optimizers[0], CONFIG, model=model)
    counted = expected_memory(model, optimizers)
    of_moments = counted.scales if kind == "trained" else 0
    return {
        "parameters": counted.num_params,
        "weights": counted.weights + counted.scales - of_moments,
        "residuals": counted.master,
        "moments": counted.moments + of_moments,
        "gradients": counted.gradients,
    }


def meta_model(role: str, sizes: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    """Build a model without memory: with a head of one number where it judges."""
    config = LlamaConfig(**sizes, num_labels=1)
    cls = LlamaForSequenceClassification if role in ("value", "reward") else LlamaForCausalLM
    with torch.device("meta"):
        model: nn.Module = cls(config).to(dtype)
    return model


def adapted(model: nn.Module) -> nn.Module:
    """Return the model with LoRA of rank 16 on all its linear layers."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=16, target_modules="all-linear")
    return get_peft_model(model, config, low_cpu_mem_usage=True)


def changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    """Return the reduction of bytes in FP8, relative to BF16-mixed."""
    both = after["weights"] + after["residuals"]
    moments = 1 - after["moments"] / before["moments"] if before["moments"] else 0.0
    return {
        "weights_below": round(1 - after["weights"] / before["weights"], 4),
        "weights_and_residuals_below": round(1 - both / before["weights"], 4),
        "moments_below": round(moments, 4),
    }


def readable(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as it is printed, in GiB."""
    return row | {name: f"{row[name] / 2**30:.2f}" for name in BYTES}


if __name__ == "__main__":
    main()
