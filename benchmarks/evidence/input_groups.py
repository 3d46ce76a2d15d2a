"""Loss of small models whose layers share the products of backward, compared with separate layers.

    nice -n 19 python -m benchmarks.evidence.input_groups     # from the repository's root
    nice -n 19 python -m benchmarks.evidence.input_groups --scales
    nice -n 19 python -m benchmarks.evidence.input_groups --gradients

Models, data and the ten paired seeds are those of `small_models_loss`, at level O2. A finished run
becomes a row of the CSV at once, and an existing row is not run again. At the end the command
prints the paired difference of each model and of their mean, with its 95 % interval.

``--scales`` measures the cost of a group's scale to each member, on weights and gradients of
stock BF16 models after 1 step and after 1,000: SQNR of the member's own scale, and of the group's.

``--gradients`` compares gradients of a norm in front of q, k, v, and in front of a gated MLP,
with float64: SQNR of separate layers, and of groups.
"""

import argparse
import contextlib
import copy
import datetime
import functools
import math
import os
import statistics
import time
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.evidence import small_models_loss as small
from benchmarks.rows import ROOT, add_csv, append_rows, commit, read_rows, tell_kept
from torch_fp8 import FP8Config, convert_to_float8
from torch_fp8.conversion import fused_layers
from torch_fp8.ops.quantize import dequantize, quantize
from torch_fp8.quantization.formats import E4M3, E5M2, Format
from torch_fp8.quantization.recipe import CastSpec
from torch_fp8.quantization.scaling import scale_from_amax
from torch_fp8_tools.metrics import sqnr_db

MODULE = "benchmarks.evidence.input_groups"
RESULTS = ROOT / "benchmarks/results/input_groups.csv"
RECIPES = ("tensorwise", "blockwise")
APART, GROUPED, ALL = "apart", "grouped", "gate and up, too"
"""Runs of layers one by one, of groups behind norms alone (earlier code), and of all groups."""
COLUMNS = [
    *("recipe", "model", "layers", "seed", "steps", "loss"),
    *("torch", "transformers", "commit", "date", "command"),
]
WIDE = "llama, 128 wide"
"""Blocks of 128 x 128 divide the layers of this model; those of the others they do not."""
SCALES = ROOT / "benchmarks/results/input_groups_scales.csv"
SCALE_COLUMNS = [
    *("model", "steps", "layer", "operand", "format", "share_of_amax", "own_db", "group_db"),
    *("torch", "transformers", "commit", "date", "command"),
]
GRADIENTS = ROOT / "benchmarks/results/input_groups_gradients.csv"
GRADIENT_COLUMNS = [
    *("layers", "seed", "gradient", "apart_db", "group_db"),
    *("torch", "transformers", "commit", "date", "command"),
]
WIDTH, TOKENS = 512, 768
T_95 = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Quantile 0.975 of Student's t, by degrees of freedom."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=[*small.MODELS, WIDE], default=_WITH_GROUPS)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=["tensorwise"])
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(10)))
    parser.add_argument("--scales", action="store_true", help="measure what a shared scale costs")
    parser.add_argument(
        "--gradients", action="store_true", help="measure gradients of one backward"
    )
    add_csv(parser, "input_groups")
    arguments = parser.parse_args()
    tell_kept(arguments.csv)
    os.environ.pop("TORCH_FP8_CONFIG", None)
    torch.set_num_threads(1)
    if arguments.gradients:
        for kind in READERS:
            for seed in arguments.seeds:
                append_rows(arguments.csv, GRADIENT_COLUMNS, gradient_errors(kind, seed))
        return
    if arguments.scales:
        for model in arguments.models:
            for steps in (1, 1000):
                rows = scale_costs(model, steps)
                append_rows(arguments.csv, SCALE_COLUMNS, rows)
                worst = min(rows, key=lambda row: float(row["group_db"]) - float(row["own_db"]))
                print(model, steps, "worst:", *list(worst.values())[2:8], flush=True)
        return
    for seed in arguments.seeds:
        for model in arguments.models:
            for recipe in arguments.recipes:
                for layers in (APART, ALL):
                    if (recipe, model, layers, seed) in losses(arguments.csv):
                        continue
                    start = time.perf_counter()
                    loss = train(recipe, model, layers, seed)
                    append_rows(arguments.csv, COLUMNS, [_row(recipe, model, layers, seed, loss)])
                    seconds = time.perf_counter() - start
                    print(f"{recipe} {model} {layers} {seed}: {loss:.4f}  {seconds:.0f} s")
    print_summary(losses(arguments.csv))


_WITH_GROUPS = [name for name in small.MODELS if name != "mamba"]


def train(recipe: str, model: str, layers: str, seed: int) -> float:
    """Return the loss after `small.STEPS` steps."""
    config = FP8Config(recipe=recipe)
    runs = {**small.RUNS, recipe: (config, config)}
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4}
    wide = {WIDE: functools.partial(small._llama, **sizes)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(small.DEEP, wide))
        stack.enter_context(mock.patch.object(small, "RUNS", runs))
        if layers == APART:
            stack.enter_context(mock.patch.object(fused_layers, "can_group", return_value=False))
        return small.train(model, recipe, seed)


class Readers(nn.Module):
    """q, k, v of grouped-query attention, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH // 4, bias=False) for _ in "kv")

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)


class MLP(nn.Module):
    """A gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, 1408, bias=False) for _ in "gu")
        self.down_proj, self.act_fn = nn.Linear(1408, WIDTH, bias=False), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return output


READERS: dict[str, type[nn.Module]] = {"q, k, v": Readers, "gated MLP": MLP}


def gradient_errors(kind: str, seed: int) -> list[dict[str, object]]:
    """Return a row for each gradient of one backward."""
    torch.manual_seed(seed)
    stock = nn.Sequential(nn.RMSNorm(WIDTH, eps=1e-6), READERS[kind]()).bfloat16()
    x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16)
    models = {"exact": copy.deepcopy(stock).double(), APART: stock}
    models[ALL] = copy.deepcopy(stock)
    convert_to_float8(models[ALL], FP8Config(recipe="tensorwise", opt_level="O1"))
    with mock.patch.object(fused_layers, "can_group", return_value=False):
        convert_to_float8(models[APART], FP8Config(recipe="tensorwise", opt_level="O1"))
    grads: dict[str, dict[str, Tensor]] = {}
    for name, model in models.items():
        inputs = x.clone().to(model[0].weight.dtype).requires_grad_()
        y = model(inputs)
        torch.manual_seed(seed + 1000)
        y.backward(torch.randn(y.shape, dtype=torch.bfloat16).to(y.dtype))
        grads[name] = {"input": inputs.grad, **{n: p.grad for n, p in model.named_parameters()}}
    return [
        {
            "layers": kind,
            "seed": seed,
            "gradient": name,
            "apart_db": f"{float(sqnr_db(exact, grads[APART][name])):.3f}",
            "group_db": f"{float(sqnr_db(exact, grads[ALL][name])):.3f}",
            **_origin("--gradients"),
        }
        for name, exact in grads["exact"].items()
    ]


def scale_costs(model: str, steps: int) -> list[dict[str, object]]:
    """Return a row for each operand of each member of a group, after steps of stock BF16."""
    grads: dict[str, Tensor] = {}
    trained: list[nn.Module] = []
    groups: list[tuple[str, ...]] = []

    def change(stock: nn.Module) -> None:
        trained.append(stock)
        groups.extend(convert_to_float8(copy.deepcopy(stock)).groups)
        for name, layer in stock.named_modules():
            if any(name in group for group in groups):
                layer.register_forward_hook(functools.partial(_keep_gradient, grads, name))

    small.train(model, small.BASELINE, 0, steps, change=change)
    rows = []
    for names in groups:
        weights = {
            name: trained[0].get_parameter(f"{name}.weight").detach().bfloat16() for name in names
        }
        for operand, tensors in (("weight", weights), ("gradient", {n: grads[n] for n in names})):
            amax = torch.stack([x.detach().abs().amax().float() for x in tensors.values()]).amax()
            for name, x in tensors.items():
                for format in (E4M3,) if operand == "weight" else (E5M2, E4M3):
                    own = x.abs().amax().float()
                    row = {
                        "model": model,
                        "steps": steps,
                        "layer": name,
                        "operand": operand,
                        "format": format.name,
                        "share_of_amax": f"{(own / amax).item():.4f}",
                        "own_db": f"{_sqnr(x, own, format):.2f}",
                        "group_db": f"{_sqnr(x, amax, format):.2f}",
                    }
                    rows.append({**row, **_origin("--scales")})
    return rows


def _keep_gradient(
    grads: dict[str, Tensor], name: str, layer: nn.Module, args: object, output: Tensor
) -> None:
    if output.requires_grad:
        output.register_hook(lambda grad: grads.update({name: grad.flatten(0, -2)}))


def _sqnr(x: Tensor, amax: Tensor, format: Format) -> float:
    scale = scale_from_amax(amax, format, False)
    return float(sqnr_db(x, dequantize(quantize(x, CastSpec(format, "tensorwise"), scale))))


def _origin(options: str) -> dict[str, object]:
    import transformers

    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "command": f"python -m {MODULE} {options}",
    }


def _row(recipe: str, model: str, layers: str, seed: int, loss: float) -> dict[str, object]:
    return {
        "recipe": recipe,
        "model": model,
        "layers": layers,
        "seed": seed,
        "steps": small.STEPS,
        "loss": f"{loss:.6f}",
        **_origin(f"--recipes {recipe}"),
    }


def losses(path: object) -> dict[tuple[str, str, str, int], float]:
    """Return the losses of a CSV by recipe, model, layers and seed."""
    rows = read_rows(path)
    return {
        (row["recipe"], row["model"], row["layers"], int(row["seed"])): float(row["loss"])
        for row in rows
    }


def print_summary(known: dict[tuple[str, str, str, int], float]) -> None:
    for recipe in RECIPES:
        for groups in (GROUPED, ALL):
            differences: dict[str, dict[int, float]] = {}
            for (of, model, layers, seed), loss in known.items():
                apart = known.get((of, model, APART, seed))
                if of == recipe and layers == groups and apart is not None:
                    differences.setdefault(model, {})[seed] = 100 * (loss / apart - 1)
            for model, by_seed in differences.items():
                _print(f"{recipe} {model}, {groups}", list(by_seed.values()))
            seeds = [set(by_seed) for by_seed in differences.values()]
            common = sorted(set.intersection(*seeds)) if seeds else []
            means = [statistics.mean(d[seed] for d in differences.values()) for seed in common]
            _print(f"{recipe}, mean of {len(differences)} models, {groups}", means)


def _print(name: str, values: list[float]) -> None:
    if len(values) - 1 not in T_95:
        return
    mean, error = statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values))
    reach = T_95[len(values) - 1] * error
    print(
        f"{name}: {mean:+.3f} % +- {error:.3f}, 95 % {mean - reach:+.3f} to {mean + reach:+.3f}, "
        f"{len(values)} seeds"
    )


if __name__ == "__main__":
    main()
