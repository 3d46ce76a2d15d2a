"""Saturation, underflow and SQNR of casts with the last step's amax, by the margin on it.

    python -m benchmarks.evidence.known_scales        # runs/benchmarks/known_scales.csv

The small models of `small_models_loss` train in BF16. Each step measures the input and the output's
gradient of every linear layer; ``down_proj`` has separate rows, because the product of a
gated MLP has the largest outliers. Tokens are the same in each step, or new. With a scale of
``2^margin`` times the amax of the previous step:

* ``saturated``: share of casts whose amax is beyond the largest number of the format;
* ``zero``: share of nonzero elements that become 0, the mean over casts;
* ``sqnr``, ``lost``: signal to noise in dB, the mean over casts, and how much less that is than
  with the current amax; the worst 1 % of casts in ``lost_worst``.
"""

import argparse
import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.evidence.small_models_loss import BASELINE, VOCABULARY, train
from benchmarks.measurement import environment, print_table
from benchmarks.rows import add_csv, write_rows
from torch_fp8.ops.quantize import cast_saturating
from torch_fp8.quantization.formats import E4M3, E5M2, Format
from torch_fp8.quantization.scaling import scale_from_amax

MARGINS = (0, 1, 2, 3, 4)
FORMATS = {"input": E4M3, "grad_output": E5M2}
COLUMNS = (
    *(
        "model",
        "tokens",
        "layers",
        "operand",
        "margin",
        "casts",
        "saturated",
        "zero",
        "sqnr",
        "lost",
    ),
    *("lost_worst", "steps", "torch", "commit", "date", "command"),
)
Losses = dict[tuple[str, str, int], list[tuple[float, float, float, float]]]


def losses_of(x: Tensor, amax: Tensor, format: Format) -> list[tuple[float, float, float, float]]:
    """Return for each margin the losses of a cast with another tensor's amax; see the module."""
    x = x.detach().float()
    current = x.abs().amax()
    best, _ = _quality(x, scale_from_amax(current, format), format)
    rows = []
    for margin in MARGINS:
        scale = scale_from_amax(amax, format) * 2.0**margin
        sqnr, zero = _quality(x, scale, format)
        saturated = float(current / scale > format.max * (1 + 1e-6))
        rows.append((saturated, zero, sqnr, best - sqnr))
    return rows


def _quality(x: Tensor, scale: Tensor, format: Format) -> tuple[float, float]:
    back = cast_saturating(x, scale, format).float() * scale
    noise = (x - back).double().square().sum()
    sqnr = 10 * torch.log10(x.double().square().sum() / noise.clamp(min=1e-300))
    nonzero = x != 0
    zero = (nonzero & (back == 0)).sum() / nonzero.sum().clamp(min=1)
    return float(sqnr), float(zero)


def watch(losses: Losses, every: int, data: str) -> Callable[[nn.Module], Callable[[int], None]]:
    """Return a `change` for `train` that measures the operands of every layer."""
    last: dict[tuple[str, str], Tensor] = {}
    step = 0

    def see(name: str, operand: str, x: Tensor) -> None:
        key, amax = (name, operand), x.detach().float().abs().amax()
        if key in last and step % every == 0 and amax > 0 and last[key] > 0:
            for layers in ("all", *(("down_proj",) if name.endswith("down_proj") else ())):
                rows = losses_of(x, last[key], FORMATS[operand])
                for margin, row in zip(MARGINS, rows, strict=True):
                    losses[layers, operand, margin].append(row)
        last[key] = amax

    def change(model: nn.Module) -> Callable[[int], None]:
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and name != "lm_head":
                module.register_forward_hook(_hook(name, see))

        def renew(module: nn.Module, tokens: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            generator = torch.Generator().manual_seed(step)
            return (torch.randint(2, VOCABULARY, tokens[0].shape, generator=generator),)

        if data == "new":
            model.get_input_embeddings().register_forward_pre_hook(renew)

        def before_step(left: int) -> None:
            nonlocal step
            step += 1

        return before_step

    return change


def _hook(name: str, see: Callable[[str, str, Tensor], None]) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            see(name, "input", inputs[0])
            output.register_hook(lambda grad: see(name, "grad_output", grad))

    return hook


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["llama", "gemma3", "t5"])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=2)
    add_csv(parser, "known_scales")
    options = parser.parse_args()
    torch.set_num_threads(1)
    about, rows = environment(torch.device("cpu")) | {"steps": options.steps}, []
    for model, data in itertools.product(options.models, ("same", "new")):
        losses: Losses = defaultdict(list)
        train(model, BASELINE, 0, options.steps, change=watch(losses, options.every, data))
        for (layers, operand, margin), values in losses.items():
            saturated, zero, sqnr, lost = (list(column) for column in zip(*values, strict=True))
            count = len(values)
            worst = sorted(lost)[-max(1, count // 100)]
            row = {
                "model": model,
                "tokens": data,
                "layers": layers,
                "operand": operand,
                "margin": margin,
            }
            row |= {"casts": count, "saturated": f"{sum(saturated) / count:.4f}"}
            row |= {"zero": f"{sum(zero) / count:.2e}", "sqnr": f"{sum(sqnr) / count:.2f}"}
            row |= {"lost": f"{sum(lost) / count:.3f}", "lost_worst": f"{worst:.2f}"}
            rows.append(about | row)
        write_rows(options.csv, COLUMNS, rows)
    print_table(COLUMNS[:11], rows)


if __name__ == "__main__":
    main()
