"""A long run of a small model in BF16 and FP8, with the monitor's files of each.

    nice -n 19 python -m benchmarks.evidence.long_run --output runs/long            # from the root
    torch-fp8 report runs/long/fp8

A Llama of a quarter of a million parameters takes 10,000 steps of 128 tokens of the standard
library, each variant in its own folder: ``bf16``, ``fp8`` and, with ``--smooth``, ``fp8-smooth``
(``FP8Config(smooth_swiglu=True)``). The level is O1, so that BF16 and FP8 differ only in the
layers: stock AdamW trains float32 weights. Writes ``long_run.csv``.

``--perturb N`` multiplies the initial weights by 1 plus a thousandth of noise of seed N. Batches
stay the same. Such a long training turns the smallest difference into another run, so compare a
difference of one run in FP8 with those between perturbed runs in BF16.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import get_cosine_schedule_with_warmup

from benchmarks.comparison import tiny_llama
from benchmarks.evidence.pretraining import corpus, evaluate, windows
from benchmarks.rows import add_csv, write_rows
from torch_fp8 import FP8Config, Monitor, convert_to_float8
from torch_fp8.monitor.run_log import RunLog

STEPS, BATCH, LENGTH, HIDDEN, LAYERS, RATE = 10_000, 4, 32, 64, 2, 2e-3
EVERY, NOISE = 50, 1e-3


def run(
    config: FP8Config | None, steps: int, folder: Path, data: Any, seed: int, perturbed: int = 0
) -> dict[str, Any]:
    """Train one variant; its losses, or all statistics, are written into `folder`."""
    tokens, held_out, vocab_size = data
    torch.manual_seed(seed)
    model = tiny_llama.build(vocab_size, HIDDEN, LAYERS, pad_token_id=0, eos_token_id=1)
    if perturbed:
        noise = torch.Generator().manual_seed(perturbed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + NOISE * torch.randn(parameter.shape, generator=noise))
    if config is not None:
        convert_to_float8(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    monitor = None
    if config is not None:
        monitor = Monitor(model, [optimizer], config, folder=folder)
    schedule = get_cosine_schedule_with_warmup(optimizer, steps // 20, steps)
    generator = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    for _ in range(steps):
        ids = windows(tokens, BATCH, generator)[:, :LENGTH]
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if monitor is not None:
            monitor.observe_loss(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    events = 0
    if monitor is not None:
        monitor.close()
        events = len(monitor.events)
    else:
        log = RunLog(folder, [], {"recipe": "BF16"})
        log.write(steps, losses=list(enumerate(losses, 1)))
    model.eval()
    last = losses[-steps // 20 :]
    return {
        "steps": steps,
        "train_loss": sum(last) / len(last),
        "held_out_loss": evaluate(model, held_out),
        "events": events,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--perturb", type=int, default=0, metavar="N")
    parser.add_argument("--recipe", default="delayed")
    parser.add_argument("--smooth", action="store_true", help="with Smooth-SwiGLU, too")
    parser.add_argument("--only", nargs="+", metavar="VARIANT")
    add_csv(parser, "long_run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    fp8: dict[str, Any] = {"recipe": options.recipe, "opt_level": "O1", "monitor": EVERY}
    variants: dict[str, FP8Config | None] = {"bf16": None, "fp8": FP8Config(**fp8)}
    if options.smooth:
        variants["fp8-smooth"] = FP8Config(**fp8, smooth_swiglu=True)
    data = corpus()
    for name, config in variants.items():
        if options.only and name not in options.only:
            continue
        folder = options.output / (f"{name}-{options.perturb}" if options.perturb else name)
        folder.mkdir(parents=True, exist_ok=True)
        result = run(config, options.steps, folder, data, options.seed, options.perturb)
        named = {"variant": name, "perturbed": options.perturb}
        (folder / "result.json").write_text(json.dumps({**named, **result}))
        print(name, result, flush=True)
    found = sorted(options.output.glob("*/result.json"))
    rows = [json.loads(path.read_text()) for path in found]
    shown = [{**row, **{k: f"{v:.4f}" for k, v in row.items() if "loss" in k}} for row in rows]
    write_rows(options.csv, list(rows[0]), shown)


if __name__ == "__main__":
    main()
