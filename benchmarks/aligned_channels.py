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
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, get_cosine_schedule_with_warmup

from benchmarks.pretraining import BATCH, LEARNING_RATE, corpus, evaluate, loss_of, windows
from examples import tiny_llama
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8

PRETRAINING_STEPS, STEPS = 1500, 300
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


class Run(NamedTuple):
    """Losses of each step's batch and of the held-out text at the end, in nats per token."""

    losses: list[float]
    eval_loss: float


AfterStep = Callable[[int, nn.Module, float], None]


@functools.cache
def pretrained(
    seed: int, steps: int = PRETRAINING_STEPS
) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor, int]]:
    """Return the weights of a model that has learnt in BF16, and `corpus()`."""
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
    return {k: v.clone() for k, v in model.state_dict().items()}, data


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
