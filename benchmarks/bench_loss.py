"""A Llama of 127 million parameters from scratch on a card, in BF16 and in FP8.

    python -m benchmarks.bench_loss              # on a GPU; runs/benchmarks/loss.csv
    python -m benchmarks.bench_loss --toy        # a tiny model, also on a CPU

2,000 steps of 8,192 tokens of Python's standard library (a few epochs) at a learning rate of 6e-4,
in an eager loop with `convert_to_float8` and `convert_optimizer`. Each variant runs in its own
process, with the same tokens in the same order from the same weights. Several processes share the
card, so the times mean nothing.

* ``last_loss``: mean of the last tenth of the steps; ``held_out_loss``: loss of held-out files;
  ``..._difference``: difference from BF16, in percent.
* ``bf16, again``: BF16 from weights that are larger by a millionth; its difference is chance.

loss_curves.csv in the same folder has the mean loss of every fiftieth part of each run.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import get_cosine_schedule_with_warmup

from benchmarks.comparison import stdlib_corpus, tiny_llama
from benchmarks.comparison.code_tokenizer import END, train_tokenizer
from benchmarks.measurement import Table, default_device, environment, parser, print_table
from benchmarks.plot import draw
from torch_fp8 import (
    Float8Linear,
    FP8Config,
    convert_optimizer,
    convert_to_float8,
    memory_report,
)
from torch_fp8.conversion.forward_precision import LastSteps, unscheduled

COLUMNS = (
    *("variant", "steps", "last_loss", "last_difference", "held_out_loss", "held_out_difference"),
    *("recipe", "fp8_linears", "bytes_per_parameter", "note"),
)
BF16 = "bf16"
VARIANTS: dict[str, dict[str, Any] | None] = {
    BF16: None,
    "bf16, again": None,
    "O2, tensorwise": {"opt_level": "O2", "recipe": "tensorwise"},
    "O2, delayed": {"opt_level": "O2", "recipe": "delayed"},
    "O2, rowwise": {"opt_level": "O2", "recipe": "rowwise"},
    "O2, blockwise": {"opt_level": "O2", "recipe": "blockwise"},
    "O2, bf16_last=0.05": {"opt_level": "O2", "bf16_last": 0.05},
    "O2, bf16_last=0.2": {"opt_level": "O2", "bf16_last": 0.2},
    "O3, auto": {"opt_level": "O3"},
}
VOCABULARY, HIDDEN, LAYERS, LENGTH, SEQUENCES = 8192, 768, 17, 512, 16
STEPS, LEARNING_RATE, EVALUATED, PIECES = 2000, 6e-4, 64, 50
TOY = {"hidden": 64, "layers": 2, "length": 32, "sequences": 2, "one_in": 40, "vocabulary": 512}
REAL = {
    **{"hidden": HIDDEN, "layers": LAYERS, "length": LENGTH, "sequences": SEQUENCES},
    **{"one_in": 1, "vocabulary": VOCABULARY},
}


def main() -> None:
    arguments = parser("loss", __doc__)
    arguments.add_argument("--steps", type=int, help=f"default: {STEPS}")
    arguments.add_argument("--variants", nargs="+", choices=VARIANTS)
    arguments.add_argument("--corpus", type=Path, help="file that keeps the tokens for another run")
    arguments.add_argument("--one", nargs=2, metavar=("TOKENS", "RESULT"), help=argparse.SUPPRESS)
    arguments = arguments.parse_args()
    steps = arguments.steps or (10 if arguments.toy else STEPS)
    names = arguments.variants or ([BF16, "O2, delayed"] if arguments.toy else list(VARIANTS))
    sizes = TOY if arguments.toy else REAL
    if arguments.one:
        tokens = torch.load(arguments.one[0])
        result = train(names[0], tokens, steps, sizes)
        Path(arguments.one[1]).write_text(json.dumps(result))
        return
    table = Table(arguments.csv, COLUMNS, ("variant", "steps"), environment(default_device()))
    where = arguments.csv.with_name(f"{arguments.csv.stem}_curves.csv")
    curves = Table(where, ("variant", "steps", "step", "loss"), ("variant", "steps"), table.about)
    kept = arguments.corpus
    tokens = torch.load(kept) if kept and kept.exists() else corpus(sizes)
    if kept and not kept.exists():
        torch.save(tokens, kept)
    results = train_all(names, tokens, steps, arguments.toy)
    for name, result in results.items():
        table.add([row_of(name, steps, result, results.get(BF16, {}))])
        losses = result.get("losses", [])
        size = max(1, len(losses) // PIECES)
        pieces = [losses[i : i + size] for i in range(0, len(losses), size)]
        rows = [
            {"variant": name, "steps": steps, "step": (i + 1) * size, "loss": round(mean(part), 5)}
            for i, part in enumerate(pieces)
        ]
        curves.add(rows)
    draw(where)
    print_table(COLUMNS, table.rows)


def corpus(sizes: dict[str, int]) -> dict[str, Any]:
    """Return the tokens to train on and to evaluate with, and the size of the vocabulary."""
    texts: dict[bool, list[str]] = {False: [], True: []}
    for path in stdlib_corpus.source_files(one_in=sizes["one_in"]):
        texts[stdlib_corpus.is_held_out(path)].append(path.read_text(encoding="utf-8"))
    tokenizer = train_tokenizer(texts[False], sizes["vocabulary"])
    parts = [
        torch.tensor([i for ids in tokenizer([t + END for t in part])["input_ids"] for i in ids])
        for part in (texts[False], texts[True] or texts[False])
    ]
    return {"training": parts[0], "held_out": parts[1], "vocabulary": len(tokenizer)}


def train_all(
    names: Iterable[str], tokens: dict[str, Any], steps: int, toy: bool
) -> dict[str, dict[str, Any]]:
    """Return the result of each variant; all run at the same time."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        torch.save(tokens, f"{folder}/tokens")
        processes = {}
        for i, name in enumerate(names):
            command = [sys.executable, "-m", "benchmarks.bench_loss", "--variants", name]
            command += ["--steps", str(steps), "--one", f"{folder}/tokens", f"{folder}/{i}"]
            log = Path(folder, f"{i}.log").open("wb")  # noqa: SIM115  (the process writes it)
            processes[name] = subprocess.Popen(
                [*command, *(["--toy"] if toy else [])], stdout=log, stderr=log
            )
        for i, (name, process) in enumerate(processes.items()):
            if process.wait() == 0:
                found[name] = json.loads(Path(folder, str(i)).read_text())
            else:
                lines = Path(folder, f"{i}.log").read_text(errors="replace").strip().splitlines()
                found[name] = {"note": " ".join(lines[-1:])[:200]}
    return found


def train(name: str, tokens: dict[str, Any], steps: int, sizes: dict[str, int]) -> dict[str, Any]:
    """Train a variant and return its losses and its properties."""
    device, options = default_device(), VARIANTS[name]
    torch.manual_seed(0)
    model = tiny_llama.build(tokens["vocabulary"], sizes["hidden"], sizes["layers"], 0, 1)
    model.to(device)
    if name == "bf16, again":
        with torch.no_grad():
            model.get_input_embeddings().weight *= 1 + 1e-6
    config = None if options is None else FP8Config(**options, emulate=device.type == "cpu")
    last = None
    if config is not None:
        convert_to_float8(model, unscheduled(config))
        last = LastSteps(model, config.bf16_last, steps) if config.bf16_last else None
    fused = device.type == "cuda"
    optimizer = torch.optim.AdamW(
        model.parameters(), LEARNING_RATE, (0.9, 0.95), weight_decay=0.1, fused=fused
    )
    if config is not None:
        convert_optimizer(optimizer, config, model=model)
    schedule = get_cosine_schedule_with_warmup(optimizer, max(1, steps // 20), steps)
    generator, losses = torch.Generator().manual_seed(0), []
    for step in range(steps):
        if last is not None:
            last.before(step)
        loss = loss_of(model, windows(tokens["training"], sizes, sizes["sequences"], generator))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    linears = [m for m in model.modules() if isinstance(m, Float8Linear)]
    return {
        "losses": [float(loss) for loss in losses],
        "held_out": evaluate(model, tokens["held_out"], sizes),
        "recipe": linears[0].fp8.recipe.name if linears else "",
        "fp8_linears": len(linears),
        "bytes_per_parameter": round(memory_report(model, optimizer).bytes_per_param, 3),
    }


def windows(
    tokens: Tensor, sizes: dict[str, int], count: int, generator: torch.Generator
) -> Tensor:
    """Return (count, length) of the tokens, on the device."""
    starts = torch.randint(len(tokens) - sizes["length"], (count,), generator=generator)
    return tokens[starts[:, None] + torch.arange(sizes["length"])].to(default_device(), torch.int64)


def loss_of(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    """Return the loss of a batch, under autocast."""
    with torch.autocast(tokens.device.type, torch.bfloat16):
        loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


@torch.no_grad()
def evaluate(model: torch.nn.Module, held_out: Tensor, sizes: dict[str, int]) -> float:
    """Return the mean loss of the same windows every time."""
    chosen = windows(held_out, sizes, EVALUATED, torch.Generator().manual_seed(0))
    return mean([float(loss_of(model, part)) for part in chosen.split(sizes["sequences"])])


def mean(values: list[float]) -> float:
    """Return the mean, or NaN for no values."""
    return sum(values) / len(values) if values else math.nan


def row_of(
    name: str, steps: int, result: dict[str, Any], baseline: dict[str, Any]
) -> dict[str, object]:
    """Return a row of COLUMNS."""
    row: dict[str, object] = {"variant": name, "steps": steps, "note": result.get("note", "")}
    if "losses" not in result:
        return row
    tenth = max(1, steps // 10)
    figures = {"last": mean(result["losses"][-tenth:]), "held_out": result["held_out"]}
    row |= {key: result[key] for key in ("recipe", "fp8_linears", "bytes_per_parameter")}
    for key, value in figures.items():
        row[f"{key}_loss"] = round(value, 5)
        if "losses" in baseline and name != BF16:
            of = mean(baseline["losses"][-tenth:]) if key == "last" else baseline["held_out"]
            row[f"{key}_difference"] = f"{100 * (value / of - 1):+.3f}"
    return row


if __name__ == "__main__":
    main()
