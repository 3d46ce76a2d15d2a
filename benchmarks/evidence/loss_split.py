"""The loss that each rounding of FP8 costs six small models, and cures for it.

    nice -n 19 python -m benchmarks.evidence.loss_split       # from the repository's root

The models, their data and their ten paired seeds are those of `small_models_loss`. Most runs use
nothing of this package: in stock BF16, linear layers and experts round their operands. A
linear layer has three products, each with two operands, so there are six roundings:

    y = x w^T        fprop.input, fprop.weight
    dx = g w         dgrad.grad, dgrad.weight
    dw = g^T x       wgrad.grad, wgrad.input

The products themselves accumulate in float32. A run has one of these roundings, or all but one, or
another scale, format, source or cure. Runs of other groups are this package's options, torchao's
own code (emulated), and Transformer Engine's rules by this package's recipes.

A finished run becomes a row of the CSV at once, and an existing row is not run again.
"""

import argparse
import datetime
import functools
import math
import os
import re
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import peers
from benchmarks.evidence import small_models_loss as small
from benchmarks.plot import draw
from benchmarks.rows import add_csv, append_rows, tell_kept
from torch_fp8 import Float8Linear, FP8Config, set_forward_precision
from torch_fp8.conversion.forward_precision import LastSteps
from torch_fp8.quantization.formats import GEMM_ALIGNMENT

MODULE = "benchmarks.evidence.loss_split"
RESULTS = small.ROOT / "benchmarks/results/loss_split.csv"
COLUMNS = ["group", *small.COLUMNS]
E4M3 = torch.float8_e4m3fn
SIX = (
    *("fprop.input", "fprop.weight"),
    *("dgrad.grad", "dgrad.weight"),
    *("wgrad.grad", "wgrad.input"),
)
OUTPUT = r"\.(o|o_proj|out_proj|out_lin)$"
VALUES = r"\.v(_proj|_lin)?$"
ATTENTION = r"[aA]ttn|[aA]ttention"
MLP = r"mlp|DenseReluDense|ffn|experts"
BLOCK = 128
Change = Callable[[nn.Module], Callable[[int], None] | None]


@dataclass
class Rounding:
    """The roundings of a model's layers.

    Attributes:
        operands: roundings of `SIX` that take part.
        scale: one for each ``tensor``, ``row`` (along the product's sum) or ``block`` (128 elements
            of a row; 128 x 128 of a weight).
        gradients: format of gradients, or None for E5M2, and E4M3 in experts.
        stochastic: roundings that are stochastic.
        float32: whether weights are cast from float32 instead of its BF16 half.
        powers: whether scales are powers of two.
        clip: quantile of the inputs' magnitudes that the scale covers.
        second: operands of fprop with a second FP8 term, which holds the rounding error.
        second_layers: pattern of the names of layers that have second terms.
        channels: share of the input's channels, those with the largest amax, that stay in BF16.
        outliers: share of the input's channels, those with the largest amax, that have a scale of
            their own.
        feedback: whether weights are rounded to minimize the error of the product with the previous
            step's inputs: the error of a column is added to later columns.
        last: number of last steps whose fprop runs in BF16, as the evaluation does then.
        evaluation: whether the evaluation after the last step rounds, if `last` is 0.
        layers: pattern of the names of layers that round; others don't.
        other: pattern of the names of layers that do not round.
    """

    operands: tuple[str, ...] = SIX
    scale: str = "tensor"
    gradients: torch.dtype | None = None
    stochastic: tuple[str, ...] = ()
    float32: bool = False
    powers: bool = False
    clip: float = 1.0
    second: tuple[str, ...] = ()
    second_layers: str = ""
    channels: float = 0.0
    outliers: float = 0.0
    feedback: bool = False
    last: int = 0
    evaluation: bool = True
    layers: str = ""
    other: str = "^$"
    _left: int = field(default=1 << 30, repr=False)
    _moments: dict[str, Tensor] = field(default_factory=dict, repr=False)

    def change(self, model: nn.Module) -> Callable[[int], None]:
        """Let a model's layers round; return a function that sets the number of steps left."""
        self._moments.clear()
        small.round_operands(model, self.multiply)
        return functools.partial(setattr, self, "_left")

    def multiply(self, name: str, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return y (M, N) of x (..., K) and w (N, K); see `small.round_operands`."""
        rounds = re.search(self.layers, name) and not re.search(self.other, name)
        source = self if rounds else _NOTHING
        return _Product.apply(x, weight, source, name, self.gradients or dtype)

    def rounds(self, operand: str) -> bool:
        in_bf16 = self._left <= self.last if self._left else self.last or not self.evaluation
        return operand in self.operands and not (in_bf16 and operand.startswith("fprop"))

    def operand(self, operand: str, x: Tensor, name: str, dtype: torch.dtype = E4M3) -> Tensor:
        """Return x in float32, rounded; the product sums over its last dimension."""
        if not self.rounds(operand):
            return x.bfloat16().float()
        if operand.endswith("weight"):
            x = x.float() if self.float32 else x.bfloat16().float()
        else:
            x = x.float()
        random = operand in self.stochastic
        if operand == "fprop.weight" and self.feedback and name in self._moments:
            return self._fed_back(x, self._moments[name])
        clip = self.clip if operand == "fprop.input" else 1.0
        scale = self._scale(x, dtype, operand.endswith("weight"), clip)
        if operand == "fprop.input" and self.outliers:
            scale = self._two_scales(x, dtype)
        y = _rounded(x, scale, dtype, random)
        if operand in self.second and re.search(self.second_layers, name):
            rest = x - y
            scale = self._scale(rest, dtype, operand.endswith("weight"), 1.0)
            y = y + _rounded(rest, scale, dtype, random)
        if operand == "fprop.input" and self.channels:
            largest = _largest_channels(x, self.channels)
            y[..., largest] = x[..., largest]
        return y

    def note(self, name: str, x: Tensor) -> None:
        """Keep the second moments (K, K) of a layer's inputs for the next step's weight."""
        if self.feedback:
            rows = x.detach().float().flatten(0, -2)
            self._moments[name] = rows.t() @ rows

    def _scale(self, x: Tensor, dtype: torch.dtype, square: bool, clip: float) -> Tensor:
        limit = torch.finfo(dtype).max
        if self.scale == "tensor":
            size = x.abs().flatten()
            amax = size.amax() if clip == 1.0 else size.quantile(clip)
        elif self.scale == "row":
            amax = x.abs().amax(-1, keepdim=True)
        else:
            amax = _block_amax(x, BLOCK if square else 1)
        scale = amax.clamp(min=1e-12) / limit
        return torch.exp2(torch.ceil(torch.log2(scale))) if self.powers else scale

    def _two_scales(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a scale for each channel (K,): one of two, that of the outliers or of the rest."""
        largest = torch.zeros(x.shape[-1], dtype=torch.bool)
        largest[_largest_channels(x, self.outliers)] = True
        amax = x.flatten(0, -2).abs().amax(0)
        amax = torch.where(largest, amax[largest].amax(), amax[~largest].amax())
        return amax.clamp(min=1e-12) / torch.finfo(dtype).max

    def _fed_back(self, w: Tensor, moments: Tensor) -> Tensor:
        """Round the columns of w (N, K) one after another, each error spread over later ones."""
        columns = moments.shape[0]
        ridge = 0.01 * moments.diagonal().mean() * torch.eye(columns)
        inverse = torch.linalg.inv((moments + ridge).double())
        inverse = torch.linalg.cholesky(inverse, upper=True).float()
        scale, w, y = self._scale(w, E4M3, True, 1.0), w.clone(), torch.empty_like(w)
        for k in range(columns):
            y[:, k] = _rounded(w[:, k], scale, E4M3, False)
            error = (w[:, k] - y[:, k]) / inverse[k, k]
            w[:, k + 1 :] -= error[:, None] * inverse[k, k + 1 :]
        return y


class _Product(torch.autograd.Function):
    """``y = x w^T`` with rounded operands, and its gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, rounding: Rounding, name: str, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rounding, ctx.name, ctx.dtype = rounding, name, dtype
        with torch.autocast("cpu", enabled=False):
            w = rounding.operand("fprop.weight", weight, name)
            y = rounding.operand("fprop.input", x.bfloat16(), name) @ w.t()
            rounding.note(name, x)
        return y.bfloat16()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), operand, name = ctx.saved_tensors, ctx.rounding.operand, ctx.name
        g = grad.bfloat16()
        # (..., N) @ (N, K), each along N
        dx = (
            operand("dgrad.grad", g, name, ctx.dtype)
            @ operand("dgrad.weight", weight.t(), name).t()
        )
        rows = operand("wgrad.grad", g.flatten(0, -2).t(), name, ctx.dtype)  # (N, M) along M
        dw = rows @ operand("wgrad.input", x.bfloat16().flatten(0, -2).t(), name).t()
        return dx.to(x.dtype), dw.bfloat16().to(weight.dtype), None, None, None


def _largest_channels(x: Tensor, share: float) -> Tensor:
    """Return the numbers of the channels of x (..., K) with the largest amax, a share of K."""
    count = max(1, round(share * x.shape[-1]))
    return x.flatten(0, -2).abs().amax(0).topk(count).indices


def _block_amax(x: Tensor, rows: int) -> Tensor:
    """Return the amax of each block of `rows` x `BLOCK` elements of x, in x's shape."""
    flat = x.abs().reshape(-1, x.shape[-1])
    height, width = flat.shape
    padded = nn.functional.pad(flat, (0, -width % BLOCK, 0, -height % rows))
    blocks = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // BLOCK, BLOCK)
    amax = blocks.amax((1, 3), keepdim=True).expand_as(blocks).reshape(padded.shape)
    return amax[:height, :width].reshape(x.shape)


def _rounded(x: Tensor, scale: Tensor, dtype: torch.dtype, random: bool) -> Tensor:
    limit = torch.finfo(dtype).max
    y = (x / scale).clamp(-limit, limit)
    if random:
        bits = 3 if dtype == E4M3 else 2
        least = torch.finfo(dtype).smallest_normal
        step = torch.exp2(torch.floor(torch.log2(y.abs().clamp(min=least))) - bits)
        y = (torch.floor(y / step + torch.rand_like(y)) * step).clamp(-limit, limit)
    return y.to(dtype).float() * scale


_NOTHING = Rounding(operands=())


def _but(*left_out: str) -> Rounding:
    return Rounding(operands=tuple(operand for operand in SIX if operand not in left_out))


class _SavedInFP8(torch.autograd.Function):
    """A norm whose backward reads its input rounded to E4M3, with a scale for 128 elements."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: Callable[[Tensor], Tensor], *weights: Tensor) -> Tensor:
        scale = _block_amax(x.float(), 1).clamp(min=1e-12) / torch.finfo(E4M3).max
        ctx.save_for_backward(_rounded(x.float(), scale, E4M3, False).to(x.dtype))
        ctx.norm, ctx.weights = norm, weights
        return norm(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
            x = x.detach().requires_grad_()
            y = ctx.norm(x)
        dx, *dw = torch.autograd.grad(y, (x, *ctx.weights), grad.to(y.dtype))
        return dx, None, *dw


def _save_norms(model: nn.Module) -> None:
    for module in model.modules():
        if type(module).__name__.endswith(("Norm", "LayerNorm")):
            weights = tuple(module.parameters(recurse=False))
            forward = functools.partial(type(module).forward, module)
            module.forward = functools.partial(_saved, forward, weights)


def _saved(forward: Callable[[Tensor], Tensor], weights: tuple[Tensor, ...], x: Tensor) -> Tensor:
    return _SavedInFP8.apply(x, forward, *weights)


def _torchao(recipe: str, model: nn.Module) -> None:
    """Convert the layers that this package converts, by torchao's own code.

    Its experts stay in BF16. Inputs are made contiguous, because it refuses Mamba's otherwise.
    """
    small_layers = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and (module.in_features % GEMM_ALIGNMENT or module.out_features % GEMM_ALIGNMENT)
    }
    peers.torchao(model, recipe, skip=("lm_head", *small_layers))
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _, args: (args[0].contiguous(), *args[1:]))


def _steps(share: float) -> int:
    return -int(-share * small.STEPS // 1)


def _o1(**options: object) -> tuple[FP8Config, None]:
    return FP8Config(opt_level="O1", **options), None


def _bf16_last(share: float) -> tuple[FP8Config, FP8Config, Change]:
    """Return O2 with `FP8Config.bf16_last`, as a Trainer runs it."""
    return FP8Config(), FP8Config(), functools.partial(_schedule, share)


def _schedule(share: float, model: nn.Module) -> Callable[[int], None]:
    schedules: list[LastSteps] = []  # the model is not converted yet

    def before(left: int) -> None:
        if not schedules:
            schedules.append(LastSteps(model, share, small.STEPS))
        schedules[0].before(small.STEPS - left)

    return before


def _values(model: nn.Module) -> Callable[[int], None]:
    """Return a function that runs the forward of values in BF16, and their backward in FP8."""

    def before(left: int) -> None:
        for name, module in model.named_modules():
            if re.search(VALUES, name) and isinstance(module, Float8Linear):
                set_forward_precision(module, "bf16")

    return before


_IN_BF16 = FP8Config(skip=("lm_head", "v_proj", "v_lin", "v"))
"""Values in BF16; ``v`` is T5's name."""
FORWARD = SIX[:2]
REFERENCE, ALONE, LEFT_OUT = "reference", "one rounding alone", "all but one rounding"
HOW, WHERE, FIELD, CURE = "how it rounds", "where it rounds", "the field", "cures"
LAYERS = "values in BF16"
OPTION, OTHERS = "the last steps' forward in BF16", "other options of this package"
RULES = "layers in BF16, eight blocks"
HEAD, FROZEN_HEAD = "output layer of 4,096 classes", "frozen output layer of 4,096 classes"

Rows = dict[tuple[str, str, int], dict]
Run = Rounding | Change | tuple[Any, ...]
RUNS: dict[str, dict[str, Run]] = {
    REFERENCE: {
        small.BASELINE: (None, None),
        small.PERTURBED: (None, None),
        "O2": (FP8Config(), FP8Config()),
        "all six": Rounding(),
        "forward": Rounding(FORWARD),
        "all six, evaluated in BF16": Rounding(evaluation=False),
        "O2, evaluated in BF16": (FP8Config(eval_fp8=False), FP8Config(eval_fp8=False)),
    },
    ALONE: {name: Rounding((name,)) for name in SIX}
    | {"dgrad": Rounding(SIX[2:4]), "wgrad": Rounding(SIX[4:])},
    OPTION: {
        "O2, bf16_last=0.2": _bf16_last(0.2),
        "O2, bf16_last=0.1": _bf16_last(0.1),
        "O2, bf16_last=0.05": _bf16_last(0.05),
    },
    LAYERS: {
        "O2, forward of values in BF16": (FP8Config(), FP8Config(), _values),
        "O2, values in BF16": (_IN_BF16, _IN_BF16),
        "O2, values in BF16, bf16_last=0.1": (*(_IN_BF16, _IN_BF16), _bf16_last(0.1)[2]),
    },
    HOW: {
        "scales of rows": Rounding(scale="row", gradients=E4M3),
        "scales of rows, gradients E5M2": Rounding(scale="row"),
        "scales of 1x128": Rounding(scale="block", gradients=E4M3),
        "gradients E4M3": Rounding(gradients=E4M3),
        "gradients stochastic": Rounding(stochastic=("dgrad.grad", "wgrad.grad")),
    },
    FIELD: {
        "torchao tensorwise": functools.partial(_torchao, "tensorwise"),
        "torchao rowwise": functools.partial(_torchao, "rowwise"),
        "Transformer Engine's rule: delayed": _o1(recipe="delayed"),
        "Transformer Engine's rule: current": _o1(recipe="tensorwise"),
        "Transformer Engine's rule: 1x128": _o1(recipe="blockwise"),
    },
    CURE: {
        "forward of the last 20 % in BF16": Rounding(last=_steps(0.2)),
        "forward of the last 10 % in BF16": Rounding(last=_steps(0.1)),
        "forward of the last 5 % in BF16": Rounding(last=_steps(0.05)),
        "values in BF16": Rounding(other=VALUES),
        "values and attention's output in BF16": Rounding(other=f"{VALUES}|{OUTPUT}"),
        "second term of the weight": Rounding(second=("fprop.weight",)),
        "second term of the input": Rounding(second=("fprop.input",)),
        "second terms of both": Rounding(second=FORWARD),
        "second terms of both, values alone": Rounding(second=FORWARD, second_layers=VALUES),
        "1/16 of the input channels with their own scale": Rounding(outliers=1 / 16),
        "1/16 of the input channels in BF16": Rounding(channels=1 / 16),
        "error feedback of the weight": Rounding(feedback=True),
        "weight cast from float32": Rounding(float32=True),
        "scales are powers of two": Rounding(powers=True),
        "inputs clipped at 99.9 %": Rounding(clip=0.999),
        "stochastic inputs": Rounding(stochastic=("fprop.input",)),
        "stochastic weights": Rounding(stochastic=("fprop.weight",)),
    },
    WHERE: {
        "output of attention alone": Rounding(layers=OUTPUT),
        "all but output of attention": Rounding(other=OUTPUT),
        "attention alone": Rounding(layers=ATTENTION),
        "MLPs alone": Rounding(layers=MLP),
        "queries and keys alone": Rounding(layers=r"\.[qk](_proj|_lin)?$"),
        "values alone": Rounding(layers=VALUES),
        "saved by norms, alone": _save_norms,
        "O2, norms and MLPs save BF16": (FP8Config(save_activations="bf16"), FP8Config()),
    },
    LEFT_OUT: {f"without {name}": _but(name) for name in SIX},
    OTHERS: {
        "O2, wgrad in BF16": (FP8Config(wgrad="bf16"), FP8Config()),
        "optimizer alone": (None, FP8Config()),
    },
}
DEEP_RUNS: dict[str, Run] = {
    small.BASELINE: (None, None),
    "all six": Rounding(),
    "first block's attention in BF16 (3.6 %)": Rounding(other=r"layers\.0\.self_attn"),
    "last block's attention in BF16 (3.6 %)": Rounding(other=r"layers\.7\.self_attn"),
    "first block's down_proj in BF16 (3.0 %)": Rounding(other=r"layers\.0\.mlp\.down_proj"),
    "last block's down_proj in BF16 (3.0 %)": Rounding(other=r"layers\.7\.mlp\.down_proj"),
    "all v_proj in BF16 (4.8 %)": Rounding(other="v_proj"),
    "all k_proj in BF16 (4.8 %)": Rounding(other="k_proj"),
}
_FP8_HEAD = FP8Config(loss_head="fp8")
HEAD_RUNS: dict[str, Run] = {
    small.BASELINE: (None, None),
    "O2": (FP8Config(), FP8Config()),
    "O2, output layer in FP8": (_FP8_HEAD, _FP8_HEAD),
}
OTHER_MODELS: dict[str, tuple[dict[str, Callable[..., nn.Module]], dict[str, Run]]] = {
    RULES: (small.DEEP, DEEP_RUNS),
    HEAD: (small.LARGE, HEAD_RUNS),
    FROZEN_HEAD: (small.FROZEN, HEAD_RUNS),
}
"""Models and runs of groups that have models of their own."""
CONTROLS = {
    **dict.fromkeys((LEFT_OUT, CURE, HOW, FIELD, WHERE, RULES), "all six"),
    **dict.fromkeys((OPTION, OTHERS, LAYERS, HEAD, FROZEN_HEAD), "O2"),
}
"""The run to which a group's runs are compared."""
NOT_OF = {
    ("mamba", "attention alone"),
    ("mamba", "MLPs alone"),
    ("mamba", "queries and keys alone"),
    ("mamba", "values alone"),
    *(
        ("mamba", run)
        for run in (
            *("values in BF16", "O2, values in BF16", "O2, forward of values in BF16"),
            "second terms of both, values alone",
        )
    ),
}
"""Runs that are BF16 or `all six` in these models."""
GROUPS = [*RUNS, *OTHER_MODELS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=GROUPS)
    parser.add_argument("--models", nargs="+", default=None)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(10)))
    parser.add_argument("--table", action="store_true", help="print what docs/loss.md has")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="begin no run after these minutes"
    )
    add_csv(parser, "loss_split")
    arguments = parser.parse_args()
    if arguments.table:
        for group in arguments.groups:
            control = CONTROLS.get(group, "")
            print(f"\n{group}\n{table(small.read_rows(arguments.csv), group, control)}")
        return
    tell_kept(arguments.csv)
    os.environ.pop("TORCH_FP8_CONFIG", None)
    torch.set_num_threads(1)
    end = time.monotonic() + 60 * arguments.minutes
    # The first three seeds of all come first: an interrupted benchmark has compared every run.
    for first, last in ((0, 3), (3, 6), (6, None)):
        seeds = arguments.seeds[first:last]
        for group in arguments.groups:
            models, runs = _of_group(group)
            models = [m for m in models if m in (arguments.models or models)]
            for run, how in runs.items():
                for model in models:
                    for seed in seeds:
                        if time.monotonic() > end:
                            return
                        if (model, run) not in NOT_OF:
                            measure(arguments.csv, group, run, how, model, seed)
    if arguments.csv == RESULTS:
        draw(RESULTS)


def _of_group(group: str) -> tuple[list[str], dict[str, Run]]:
    """Return the names of a group's models, and its runs."""
    models, runs = OTHER_MODELS.get(group) or (small.MODELS, RUNS[group])
    return list(models), runs


def measure(path: Any, group: str, run: str, how: Run, model: str, seed: int) -> None:
    """Add the row of a run to the CSV at `path`, if it is not there."""
    rows = small.read_rows(path)
    if (model, run, seed) in rows:
        return
    start, change = time.perf_counter(), None
    if isinstance(how, Rounding):
        change = how.change
    elif isinstance(how, tuple):
        small.RUNS[run] = how[:2]
        change = how[2] if len(how) > 2 else None
    else:
        change = how
    loss = small.train(model, run, seed, change=change)
    row = small.as_columns(model, run, seed, small.STEPS, loss, rows)
    command = f"python -m {MODULE} --groups '{group}' --models '{model}'"
    append_rows(path, COLUMNS, [{**row, "group": group, "command": command}])
    seconds = time.perf_counter() - start
    now = f"{datetime.datetime.now():%H:%M:%S}"
    print(f"{now} {model:12} {run:40} {seed}: {row['rel_diff']}  {seconds:.1f} s", flush=True)


def mean_and_error(values: dict[str, list[float]]) -> tuple[float, float]:
    """Return the mean over models of the means over seeds, and its standard error.

    Args:
        values: a number for each seed, by model.
    """
    means = [statistics.mean(of_model) for of_model in values.values()]
    squares = [statistics.variance(v) / len(v) if len(v) > 1 else math.nan for v in values.values()]
    return statistics.mean(means), math.sqrt(sum(squares)) / len(squares)


def table(rows: Rows, group: str, control: str = "") -> str:
    """Return a group's differences from BF16 in percent, as docs/loss.md has them.

    Args:
        rows: rows of the CSV.
        group: key of RUNS, or RULES.
        control: run that the last column compares with, seed by seed, or empty for no column.
    """
    models, _ = _of_group(group)
    runs = dict.fromkeys(run for (_, run, _), row in rows.items() if row["group"] == group)
    runs.pop(small.BASELINE, None)
    lines = []
    for run in runs:
        values = {m: by_seed(rows, m, run) for m in models if by_seed(rows, m, run)}
        cells = [_cell({m: [*values[m].values()]}) if m in values else "" for m in models]
        everywhere = {m: [*of_model.values()] for m, of_model in values.items()}
        cells += [_cell(everywhere)] if len(models) > 1 else []
        if control:
            of_control = {m: by_seed(rows, m, control) for m in values}
            differences = {
                m: [v - of_control[m][seed] for seed, v in of_run.items() if seed in of_control[m]]
                for m, of_run in values.items()
            }
            cells.append("" if run == control else _cell(differences))
        seeds = min(map(len, values.values()))
        lines.append(f"| {run} | {seeds} | {' | '.join(cells)} |")
    return "\n".join(lines)


def by_seed(rows: Rows, model: str, run: str) -> dict[int, float]:
    """Return a run's relative difference from BF16 for each seed."""
    return {s: float(row["rel_diff"]) for (m, r, s), row in rows.items() if (m, r) == (model, run)}


def _cell(values: dict[str, list[float]]) -> str:
    mean, error = mean_and_error(values)
    return f"{100 * mean:+.2f} ± {100 * error:.2f}"


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning)
    main()
