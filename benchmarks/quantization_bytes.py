"""Bytes that quantization reads and writes in a linear layer's forward and backward, and launches.

    python -m benchmarks.quantization_bytes

A `Float8Linear` runs once per recipe and circumstance, its real kernels in Triton's interpreter
(`benchmarks.launches`), and every load and store is counted. Written to
``results/quantization_bytes.csv``: for input, gradient and weight the bytes per element, the
launches, and the bytes that programs asked for, which come from L2 where all read the same few kB
(a history of amaxes, partial maxima). Bytes and launches do not depend on the card.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.launches import Launch, count_launches  # before torch_fp8

# isort: split
import torch
from torch import Tensor, nn

from benchmarks.measurement import RESULTS, environment, print_table, write_rows
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8

TOKENS = IN = OUT = 512
RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise")
OPERANDS = ("input", "gradient", "weight")
COLUMNS = (
    *("recipe", "case", "tensor", "bytes_per_element", "requested_per_element"),
    *("kernels", "torch_operators", "gemms", "launched", "torch", "triton", "commit", "date"),
    "command",
)


@dataclass(frozen=True)
class Case:
    """A circumstance.

    Attributes:
        name: of it.
        options: of the `FP8Config`.
        bias: whether the layer has one.
        frozen: ``weight``, ``input`` or nothing.
        steps: whether the optimizer is ours, and has stepped before.
        ending: what is counted: ``backward`` (with the forward), ``inference`` or ``refill``.
    """

    name: str
    options: tuple[tuple[str, object], ...] = ()
    bias: bool = False
    frozen: str = ""
    steps: bool = True
    ending: str = "backward"


CASES = (
    Case("training"),
    Case("training, user's optimizer", (("opt_level", "O1"),), steps=False),
    Case("training, bias", bias=True),
    Case("training, frozen weight", frozen="weight", steps=False),
    Case("training, frozen input", frozen="input"),
    Case("training, wgrad in BF16", (("wgrad", "bf16"),)),
    Case("inference", ending="inference"),
    Case("micro-batch, payload cache", (("cache_weights", True),)),
    Case("optimizer step, payload cache", (("cache_weights", True),), ending="refill"),
    Case("amax given", ending="amax"),
)


def applies(recipe: str, case: Case) -> bool:
    """Whether a recipe can be in a circumstance."""
    if case.ending == "amax":
        return recipe == "tensorwise"
    return not (dict(case.options).get("cache_weights") and recipe == "delayed")


def count(recipe: str, case: Case) -> tuple[list[Launch], dict[str, Tensor]]:
    """What a layer launches, and its operands."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(IN, OUT, bias=case.bias, dtype=torch.bfloat16))
    config = FP8Config(recipe=recipe, **dict(case.options))
    convert_to_float8(model, config)
    linear, weight = model[0], model[0].weight
    weight.requires_grad_(case.frozen != "weight")
    x = torch.randn(TOKENS, IN, dtype=torch.bfloat16, requires_grad=case.frozen != "input")
    grad = torch.randn(TOKENS, OUT, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    if case.steps:
        convert_optimizer(optimizer, config, model=model)

    def forward_and_backward() -> None:
        model(x).backward(grad)

    def inference() -> None:
        with torch.no_grad():
            model.eval()(x)

    def refill() -> None:
        linear.fp8_weight_cache.refill(weight, linear.fp8_recipe.weight, amax)

    def both_layouts() -> None:
        spec = linear.fp8_recipe.input
        torch.ops.torch_fp8.quantize_2d(
            x, None, spec.format.dtype, "tensorwise", False, True, True, amax
        )

    amax = torch.ones(())
    count_launches(forward_and_backward)  # histories are filled, the weight is known
    if case.steps:
        optimizer.step()
    x.grad = None
    model.zero_grad()
    run: dict[str, Callable[[], None]] = {
        "backward": forward_and_backward,
        "inference": inference,
        "refill": refill,
        "amax": both_layouts,
    }
    operands = {"input": x, "gradient": grad, "weight": weight}
    cache = linear.fp8_weight_cache
    kept = [] if cache is None else cache.tensors
    launches = count_launches(run[case.ending], **operands | {"weight": [weight, *kept]})
    return launches, operands


def rows(recipe: str, case: Case) -> list[dict[str, object]]:
    """One for each operand, and one for what belongs to none."""
    launches, operands = count(recipe, case)
    assert not [name for launch in launches for name in launch.sources if name not in OPERANDS]
    made = []
    for name, tensor in operands.items():
        own = [k for k in launches if k.sources == (name,) and k.kind != "gemm"]
        if not own:
            continue
        made.append(
            {
                "recipe": recipe,
                "case": case.name,
                "tensor": name,
                "bytes_per_element": f"{sum(k.moved for k in own) / tensor.numel():.3f}",
                "requested_per_element": f"{sum(k.requested for k in own) / tensor.numel():.3f}",
                **_launched(own),
            }
        )
    return [*made, {"recipe": recipe, "case": case.name, "tensor": "all", **_launched(launches)}]


def _launched(launches: list[Launch]) -> dict[str, object]:
    kinds = [launch.kind for launch in launches]
    return {
        "kernels": kinds.count("kernel"),
        "torch_operators": kinds.count("torch"),
        "gemms": kinds.count("gemm"),
        "launched": " ".join(launch.name for launch in launches),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, default=RESULTS / "quantization_bytes.csv")
    options = parser.parse_args()
    about = environment(torch.device("cpu"))
    made = []
    for recipe in RECIPES:
        for case in CASES:
            if applies(recipe, case):
                made += [row | about for row in rows(recipe, case)]
        write_rows(options.csv, COLUMNS, [{c: row.get(c, "") for c in COLUMNS} for row in made])
    print_table(COLUMNS[:9], made)


if __name__ == "__main__":
    main()
