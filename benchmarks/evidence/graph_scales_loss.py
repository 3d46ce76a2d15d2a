"""Loss of compiled small models whose casts have the last step's scales, against current scales.

    python -m benchmarks.evidence.graph_scales_loss    # runs/benchmarks/graph_scales_loss.csv

The models of `small_models_loss` train at O2, compiled (backend ``aot_eager``), with
``FP8Config(graph_scales="current")`` and ``"last_step"``, from the same weights and tokens.

* ``--jumps 0``: thirty seeds of 30 steps. The command prints the mean of the paired differences of
  the loss at the end, and its 95 % interval, by model and of all pairs, which passes if it ends
  below `BOUND`.
* Another jump multiplies the input of one layer in the 20th step, and ``loss`` is the mean of the
  20 steps after it. ``known jump`` is ``"last_step"`` with current scales only in that step.
  ``--clip 1`` clips the gradient to that norm, which Trainers do by default. ``--layer
  down_proj`` makes the second block's layer of that name jump instead of the middle layer.
"""

import argparse
import statistics
from collections import defaultdict

import torch
from torch import Tensor, nn

from benchmarks.evidence.small_models_loss import (
    BASELINE,
    LENGTH,
    MODELS,
    ROWS,
    VOCABULARY,
    loss_of,
    make_optimizers,
)
from benchmarks.measurement import environment
from benchmarks.rows import add_csv, append_rows, read_rows
from torch_fp8 import Float8Linear, FP8Config, convert_optimizer, convert_to_float8

BOUND = 0.0025
T_95 = {119: 1.980, 29: 2.045, 9: 2.262, 2: 4.303}
"""Quantiles of Student's distribution by degrees of freedom."""
JUMP_AT, AFTER, STEPS = 20, 20, 30
KNOWN_JUMP = "known jump"
SCALES = ("current", "last_step", KNOWN_JUMP)
COLUMNS = (
    *("model", "jump", "seed", "scales", "loss", "last_loss", "saturated", "graphs"),
    *("torch", "commit", "date", "command"),
)


def run(
    name: str, scales: str, seed: int, jump: float, clip: float, layer: str | None = None
) -> dict[str, object]:
    """Train a model, and return its losses and how many operands have saturated."""
    torch.manual_seed(seed)
    model = MODELS[name]()
    model.train()
    config = FP8Config(graph_scales="last_step" if scales == KNOWN_JUMP else scales)
    (optimizer,) = make_optimizers(model, BASELINE)
    convert_to_float8(model, config)
    convert_optimizer(optimizer, config, model=model)
    layers = [m for m in model.modules() if isinstance(m, Float8Linear)]
    factor = torch.ones((), dtype=torch.float32, device="cpu")
    if jump:
        jumping = layers[len(layers) // 2]
        if layer:
            names = {n: m for n, m in model.named_modules() if n.split(".")[-1] == layer}
            jumping = [*names.values()][1]
        _multiply_input(jumping, factor)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model.compile(backend="aot_eager")
    data = torch.Generator().manual_seed(1000 + seed)
    tokens = torch.randint(2, VOCABULARY, (ROWS, LENGTH), generator=data)
    hidden = torch.rand(tokens.shape, generator=data) < 0.15
    torch.manual_seed(seed)
    losses = []
    for step in range(JUMP_AT + 1 + AFTER if jump else STEPS):
        factor.fill_(jump if jump and step == JUMP_AT else 1)
        if scales == KNOWN_JUMP:
            layers[0].fp8.scaling.saturation._set(-1, step == JUMP_AT)
        loss = loss_of(name, model, tokens, hidden)
        losses.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    scaling = layers[0].fp8.scaling
    return {
        "loss": f"{statistics.fmean(losses[JUMP_AT + 1 :]) if jump else losses[-1]:.6f}",
        "last_loss": f"{losses[-1]:.6f}",
        "saturated": 0 if scaling is None else scaling.saturation.count,
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
    }


def _multiply_input(layer: nn.Module, factor: Tensor) -> None:
    layer.register_forward_pre_hook(
        lambda module, inputs: (inputs[0] * factor.to(inputs[0].dtype),)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["llama", "gemma3", "t5", "distilbert"])
    parser.add_argument("--jumps", nargs="+", type=float, default=[0, 8, 64, 1000])
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(30)))
    parser.add_argument("--clip", type=float, default=torch.inf, help="largest gradient norm")
    parser.add_argument("--layer", help="whose input jumps; none: the middle one")
    add_csv(parser, "graph_scales_loss")
    options = parser.parse_args()
    torch.set_num_threads(1)
    about = environment(torch.device("cpu"))
    where = f" at {options.layer}" if options.layer else ""
    where += "" if options.clip == torch.inf else f", clipped to {options.clip:g}"
    for jump in options.jumps:
        for seed in options.seeds[: 3 if jump else None]:
            for model in options.models:
                for scales in SCALES[: 3 if jump else 2]:
                    row = {"model": model, "jump": f"{jump:g}{where}", "seed": seed}
                    result = run(model, scales, seed, jump, options.clip, options.layer)
                    append_rows(options.csv, COLUMNS, [about | row | {"scales": scales} | result])
    for line in summary(read_rows(options.csv)):
        print(line)


def summary(rows: list[dict[str, str]]) -> list[str]:
    """Return the mean paired difference by model and jump, and its 95 % interval."""
    losses = {(r["model"], r["jump"], r["seed"], r["scales"]): float(r["loss"]) for r in rows}
    differences: dict[tuple[str, str], list[float]] = defaultdict(list)
    for (model, jump, seed, scales), loss in losses.items():
        if scales == SCALES[1] and (model, jump, seed, SCALES[0]) in losses:
            difference = loss / losses[model, jump, seed, SCALES[0]] - 1
            differences[model, jump].append(difference)
            differences["all", jump].append(difference)
    lines = []
    for (model, jump), values in differences.items():
        mean, error = statistics.fmean(values), 0.0
        if len(values) - 1 in T_95:
            error = T_95[len(values) - 1] * statistics.stdev(values) / len(values) ** 0.5
        lines.append(f"{model:12} jump {jump:5} {len(values):3} pairs: {mean:+.3%} +- {error:.3%}")
    return lines


if __name__ == "__main__":
    main()
