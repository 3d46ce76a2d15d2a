"""What a step moves and launches for a number of tokens that is no multiple of 16, beside one more.

    python -m benchmarks.token_bytes    # runs/benchmarks/token_bytes.csv

Batches that are padded to their longest sequence have any number of tokens. A linear layer with a
bias, and an RMSNorm with a gated MLP, run forward and backward with 4,096 tokens and with 4,095,
their real kernels in Triton's interpreter (`benchmarks.launches`): every load and store is counted,
and every launch, padding and layouts of GEMM operands included. Neither depends on the card.

* ``bytes_per_token``: read and written by kernels and torch's operators, GEMMs left out;
* ``kernels``, ``torch_operators``, ``gemms``: launches.

4,095 tokens move and launch what 4,096 do, within 0.9 % of the bytes.
"""

import argparse

from benchmarks.launches import Launch, count_launches  # before torch_fp8

# isort: split
import torch
from torch import Tensor, nn
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from benchmarks.measurement import environment, print_table
from benchmarks.rows import add_csv, write_rows
from torch_fp8 import FP8Config, convert_to_float8
from torch_fp8.nn.delayed_scaling import renew_scales
from torch_fp8.nn.scaling_buffers import ScalingBuffers

TOKENS = (4096, 4095)
HIDDEN, INNER = 128, 128
RECIPES = ("tensorwise", "blockwise", "delayed", "rowwise", "mxfp8")
COLUMNS = (
    *("recipe", "model", "tokens", "bytes_per_token", "kernels", "torch_operators", "gemms"),
    *("launched", "torch", "triton", "commit", "date", "command"),
)


class NormAndMLP(nn.Module):
    """The part of a decoder layer that has producers that cast."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = LlamaRMSNorm(HIDDEN)
        self.mlp = LlamaMLP(LlamaConfig(hidden_size=HIDDEN, intermediate_size=INNER))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(x))


MODELS = {
    "linear with a bias": lambda: nn.Sequential(nn.Linear(HIDDEN, INNER)),
    "norm and gated MLP": NormAndMLP,
}


def count(recipe: str, model: str, tokens: int) -> list[Launch]:
    """Return what forward and backward launch once scales are known."""
    torch.manual_seed(0)
    made = MODELS[model]().bfloat16()
    convert_to_float8(made, FP8Config(recipe=recipe, opt_level="O1"))
    x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    outer = INNER if model == "linear with a bias" else HIDDEN
    grad = torch.randn(tokens, outer, dtype=torch.bfloat16)

    def step() -> None:
        made(x).backward(grad)

    if recipe == "delayed":
        with torch.random.fork_rng():
            few = torch.randn(16, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
            count_launches(lambda: made(few).backward(grad[:16]))
        renew_scales(m for m in made.modules() if isinstance(m, ScalingBuffers))
    for tensor in (x, *made.parameters()):
        tensor.grad = None
    return count_launches(step, input=x, gradient=grad, parameters=[*made.parameters()])


def row(recipe: str, model: str, tokens: int) -> dict[str, object]:
    """Return one row of the table."""
    launches = count(recipe, model, tokens)
    kinds = [launch.kind for launch in launches]
    moved = sum(launch.moved for launch in launches if launch.kind != "gemm")
    return {
        "recipe": recipe,
        "model": model,
        "tokens": tokens,
        "bytes_per_token": f"{moved / tokens:.1f}",
        "kernels": kinds.count("kernel"),
        "torch_operators": kinds.count("torch"),
        "gemms": kinds.count("gemm"),
        "launched": " ".join(launch.name for launch in launches),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_csv(parser, "token_bytes")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    options = parser.parse_args()
    about = environment(torch.device("cpu"))
    made: list[dict[str, object]] = []
    for recipe in options.recipes:
        for model in MODELS:
            made += [row(recipe, model, tokens) | about for tokens in options.tokens]
        write_rows(options.csv, COLUMNS, [{c: r.get(c, "") for c in COLUMNS} for r in made])
    print_table(COLUMNS[:8], made)


if __name__ == "__main__":
    main()
