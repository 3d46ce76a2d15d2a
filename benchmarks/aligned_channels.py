"""Training with planted faults of SwiGLU: channels that align and grow, and sporadic outliers.

    nice -n 19 python -m benchmarks.aligned_channels       # from the root

arXiv 2409.12517 describes why FP8 training fails late: the gate and the up projection of a channel
align, the channel becomes quadratic in the input and outgrows the others. What takes hundreds of
billions of tokens there is planted here, into each gated MLP of a Llama of half a million
parameters that has learnt the standard library for 1,500 steps in BF16, and goes on with it from
there (`benchmarks.pretraining` has model and text):

* **aligned channels.** From step `Faults.start` on the gate row and the up row of a channel are the
  same direction, and both grow by the same factor in each step, to `Faults.magnitude` times their
  norm in `Faults.growth` steps. The column of the down projection shrinks by the factor that the
  product grows by.
* **sporadic outliers.** In every `Faults.every`-th step the output of the up projection has one
  channel that is `Faults.outlier` times larger, and the down projection's column for it is smaller
  by the same factor.

So neither changes what the MLP computes, but for rounding: the outlier is a power of two, and
BF16's result is the same bit for bit. Planted channels are not trained, for Adam's steps have the
size of the learning rate however small a weight is. `train` takes any configuration and any faults;
`Faults()` has both, and ``Faults(magnitude=1, outlier=1)`` none.

The benchmark trains in BF16 and in each recipe, with Smooth-SwiGLU and without, at level O1: only
the GEMMs differ. A finished run becomes a row of the CSV at once, and a row that is there is not
run again. The losses of all steps go into a second CSV, of which the picture is drawn.
"""

import argparse
import datetime
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, get_cosine_schedule_with_warmup

from benchmarks.comparison import tiny_llama
from benchmarks.pretraining import BATCH, LEARNING_RATE, corpus, evaluate, loss_of, windows
from benchmarks.recipes_loss import ROOT, commit
from benchmarks.rows import add_csv, append_rows, read_rows, tell_kept
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8

PRETRAINING_STEPS, STEPS = 1500, 300
RESULTS = ROOT / "benchmarks/results/aligned_channels.csv"
CURVES = RESULTS.with_name("aligned_channels_curves.csv")
PICTURE = RESULTS.with_suffix(".png")
COLUMNS = [
    *("faults", "recipe", "smooth_swiglu", "seed", "steps", "eval_loss", "bf16_eval_loss"),
    *("rel_diff", "torch", "commit", "date", "command"),
]
BASELINE = "bf16"
WINDOW = 10
"""The steps over which the losses of the picture are averaged."""
HIDDEN, LAYERS, RATE = 128, 2, 3e-4


@dataclass(frozen=True)
class Faults:
    """What is planted, the same in every gated MLP.

    Attributes:
        aligned: channels whose gate and up are one direction.
        magnitude: how many times larger both grow to be; 1: they are not touched.
        start, growth: the step in which they begin to grow, and the steps that it takes.
        spiking: the channel of the outliers.
        outlier: how many times larger it is, a power of two; 1: there are none.
        every: steps from one outlier to the next.
    """

    aligned: tuple[int, ...] = (3, 100, 200, 300)
    magnitude: float = 400.0
    start: int = 50
    growth: int = 150
    spiking: int = 77
    outlier: float = 1024.0
    every: int = 50


NO_FAULTS = Faults(magnitude=1.0, outlier=1.0)
PLANTED = {"both": Faults(), "none": NO_FAULTS}
VARIANTS = [
    (BASELINE, False),
    *((recipe, smooth) for recipe in ("delayed", "tensorwise") for smooth in (True, False)),
]


class Run(NamedTuple):
    """Losses of each step's batch and of the held-out text at the end, in nats per token."""

    losses: list[float]
    eval_loss: float


AfterStep = Callable[[int, nn.Module, float], None]


CACHE = ROOT / "runs/aligned_channels"


@functools.cache
def pretrained(
    seed: int, steps: int = PRETRAINING_STEPS
) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor, int]]:
    """Return the weights of a model that has learnt in BF16, and `corpus()`; kept in `CACHE`."""
    path = CACHE / f"pretrained_{seed}_{steps}.pt"
    if path.is_file():
        kept: tuple[dict[str, Tensor], tuple[Tensor, Tensor, int]] = torch.load(path)
        return kept
    data = corpus()
    model = _built(seed, data[2])
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0
    )
    schedule = get_cosine_schedule_with_warmup(optimizer, steps // 20, 2 * steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        loss_of(model, windows(data[0], BATCH, generator)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    made = {k: v.clone() for k, v in model.state_dict().items()}, data
    CACHE.mkdir(parents=True, exist_ok=True)
    torch.save(made, path)
    return made


def _built(seed: int, vocab_size: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return tiny_llama.build(vocab_size, HIDDEN, LAYERS, pad_token_id=0, eos_token_id=1)


def train(
    config: FP8Config | None,
    seed: int,
    faults: Faults = NO_FAULTS,
    steps: int = STEPS,
    after_step: AfterStep | None = None,
    start: tuple[dict[str, Tensor], tuple[Tensor, Tensor, int]] | None = None,
    prepare: Callable[[nn.Module, torch.optim.Optimizer], None] | None = None,
) -> Run:
    """Train one model on from where BF16 has left it.

    Args:
        config: of FP8; None: BF16.
        seed: of the weights before the pretraining, and of the data's order.
        faults: what is planted.
        after_step: called with the step, the model and the loss when a step is done.
        start: what `pretrained` returns; None: it is asked.
        prepare: called with the model, converted, and its optimizer before the first step.
    """
    weights, (tokens, held_out, vocab_size) = pretrained(seed) if start is None else start
    model = _built(seed, vocab_size)
    model.load_state_dict(weights)
    if config is not None:
        convert_to_float8(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    if config is not None and config.opt_level != "O1":
        convert_optimizer(optimizer, config, model=model)
    schedule = get_cosine_schedule_with_warmup(optimizer, steps // 20, steps)
    generator = torch.Generator().manual_seed(seed + 1)
    planted = [PlantedMLP(layer.mlp, faults) for layer in model.model.layers]
    if prepare is not None:
        prepare(model, optimizer)
    losses: list[float] = []
    for step in range(steps):
        for mlp in planted:
            mlp.before_forward(step)
        loss = loss_of(model, windows(tokens, BATCH, generator))
        loss.backward()
        for mlp in planted:
            mlp.after_backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if after_step is not None:
            after_step(step, model, losses[-1])
    return Run(losses, _held_out_loss(model, held_out))


def _held_out_loss(model: LlamaForCausalLM, held_out: Tensor) -> float:
    model.eval()
    loss = evaluate(model, held_out)
    model.train()
    return loss


class PlantedMLP:
    """A gated MLP with children ``gate_proj``, ``up_proj`` and ``down_proj``, and its faults."""

    def __init__(self, mlp: nn.Module, faults: Faults) -> None:
        self.gate, self.up, self.down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.faults = faults
        self.factor = faults.magnitude ** (1 / faults.growth)
        self.spike: torch.utils.hooks.RemovableHandle | None = None
        self.column: Tensor | None = None

    @torch.no_grad()
    def before_forward(self, step: int) -> None:
        """Let the aligned channels grow, and add the outlier, if it is one of its steps."""
        faults = self.faults
        since = step - faults.start
        aligned = list(faults.aligned)
        if faults.magnitude != 1 and 0 <= since <= faults.growth:
            if since == 0:
                self.up.weight[aligned] = self.gate.weight[aligned]
            else:
                self.gate.weight[aligned] *= self.factor
                self.up.weight[aligned] *= self.factor
                self.down.weight[:, aligned] /= self.factor**2
        if faults.outlier != 1 and step % faults.every == faults.every - 1:
            self.column = self.down.weight[:, faults.spiking].clone()
            self.down.weight[:, faults.spiking] /= faults.outlier
            self.spike = self.up.register_forward_hook(self._with_outlier)

    @torch.no_grad()
    def after_backward(self) -> None:
        """Take the outlier away again, and keep planted channels from being trained."""
        faults = self.faults
        if self.spike is not None:
            self.spike.remove()
            self.down.weight[:, faults.spiking] = self.column
            self.down.weight.grad[:, faults.spiking] /= faults.outlier
            self.spike = None
        if faults.magnitude != 1:
            aligned = list(faults.aligned)
            for rows in (self.gate.weight.grad, self.up.weight.grad):
                rows[aligned] = 0
            self.down.weight.grad[:, aligned] = 0

    def _with_outlier(self, up: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        factors = output.new_ones(output.shape[-1])
        factors[self.faults.spiking] = self.faults.outlier
        return output * factors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--faults", nargs="+", choices=list(PLANTED), default=["both"])
    add_csv(parser, RESULTS.stem)
    parser.add_argument("--docs", action="store_true", help="draw the committed runs, and end")
    arguments = parser.parse_args()
    tell_kept(arguments.csv)
    if arguments.docs:
        draw(CURVES, PICTURE, ROOT / "docs/images" / PICTURE.name)  # the page shows its own
        return
    for seed in arguments.seeds:
        for faults in arguments.faults:
            for recipe, smooth in VARIANTS:
                run(arguments.csv, seed, faults, recipe, smooth)
    draw(arguments.csv.with_name(CURVES.name), arguments.csv.with_suffix(".png"))


def run(path: Path, seed: int, faults: str, recipe: str, smooth: bool) -> None:
    """Train one variant, unless its row is there, and add its rows to both files."""
    rows = read_rows(path)
    key = (faults, recipe, str(smooth), str(seed))
    if any((r["faults"], r["recipe"], r["smooth_swiglu"], r["seed"]) == key for r in rows):
        return
    config = None
    if recipe != BASELINE:
        config = FP8Config(recipe=recipe, smooth_swiglu=smooth, opt_level="O1")
    losses, eval_loss = train(config, seed, PLANTED[faults])
    same = [r for r in rows if (r["faults"], r["recipe"], r["seed"]) == (faults, BASELINE, key[3])]
    bf16 = float(same[0]["eval_loss"]) if same else eval_loss
    row = {
        **dict(zip(COLUMNS, key, strict=False)),
        "steps": len(losses),
        "eval_loss": f"{eval_loss:.6f}",
        "bf16_eval_loss": f"{bf16:.6f}",
        "rel_diff": f"{eval_loss / bf16 - 1:+.5f}",
        "torch": torch.__version__,
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "command": "nice -n 19 python -m benchmarks.aligned_channels",
    }
    append_rows(path, COLUMNS, [row])
    curve = [dict(zip((*COLUMNS[:4], "step", "loss"), (*key, step, f"{loss:.5f}"), strict=True))
             for step, loss in enumerate(losses)]  # fmt: skip
    append_rows(path.with_name(CURVES.name), [*COLUMNS[:4], "step", "loss"], curve)
    print(" ".join(key), row["eval_loss"], row["rel_diff"], flush=True)


def draw(curves: Path, *pictures: Path, seed: str = "0") -> None:
    """Draw the smoothed losses of one seed's runs with faults, and how far they are from BF16's."""
    from matplotlib import pyplot

    from benchmarks.plot import COLOURS

    losses: dict[tuple[str, str], list[float]] = {}
    for row in read_rows(curves):
        if (row["faults"], row["seed"]) == ("both", seed):
            losses.setdefault((row["recipe"], row["smooth_swiglu"]), []).append(float(row["loss"]))
    means = {
        variant: [
            sum(part) / len(part)
            for i in range(0, len(own), WINDOW)
            for part in [own[i : i + WINDOW]]
        ]
        for variant, own in losses.items()
    }
    figure, (axes, below) = pyplot.subplots(
        2, 1, figsize=(7, 5.6), layout="constrained", sharex=True, height_ratios=(3, 2)
    )
    order = dict(zip([(r, str(s)) for r, s in VARIANTS], ("#000000", *COLOURS), strict=False))
    base = means[BASELINE, "False"]
    steps = [WINDOW * (i + 0.5) for i in range(len(base))]
    for variant, colour in order.items():
        if variant not in means:
            continue
        recipe, smooth = variant
        label = "BF16" if recipe == BASELINE else recipe
        label += ", Smooth-SwiGLU" if smooth == "True" else ""
        style = {"color": colour, "linewidth": 1.8, "linestyle": "--" if smooth == "True" else "-"}
        axes.plot(steps, means[variant], label=label, **style)
        apart = [100 * (own / b - 1) for own, b in zip(means[variant], base, strict=True)]
        below.plot(steps, apart, **style)
    faults = Faults()
    for panel in (axes, below):
        panel.axvspan(faults.start, faults.start + faults.growth, color="#000000", alpha=0.06)
        for step in range(faults.every - 1, STEPS, faults.every):
            panel.axvline(step, color="#999999", linewidth=0.6, linestyle=":")
        panel.grid(alpha=0.25)
    axes.set(
        ylabel="training loss, nats per token",
        title="Planted: channels that align and grow (shaded), outliers (dotted)",
    )
    axes.legend(frameon=False)
    below.set_yscale("symlog", linthresh=0.5, linscale=1.0)
    ticks = (-0.5, 0, 0.5, 1, 10, 50)
    below.set_yticks(ticks, [f"{tick:+g} %" if tick else "0" for tick in ticks])
    below.minorticks_off()
    below.set(xlabel=f"step after {PRETRAINING_STEPS} in BF16", ylabel="difference to BF16")
    below.set_ylim(-0.6, 80)
    for path in pictures:
        figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
