"""Bytes that quantization reads and writes in a linear layer's forward and backward, and launches.

    python -m benchmarks.evidence.quantization_bytes    # --block: only a whole block's rows

A `Float8Linear` runs once per recipe and case, its real kernels in Triton's interpreter
(`benchmarks.evidence.launches`), and every load and store is counted. For input, gradient and
weight, ``quantization_bytes.csv`` gets the bytes per element, the launches, and the bytes that
programs requested. Those come from L2 if all programs read the same few kB
(partial maxima). Bytes and launches do not depend on the card. Rows of a block
have the bytes that it adds to BF16's (`benchmarks.evidence.block_bytes`).
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.evidence import block_bytes  # before torch_fp8
from benchmarks.evidence.launches import Launch, count_launches

# isort: split
import torch
from torch import Tensor, nn

from benchmarks.measurement import environment, print_table
from benchmarks.rows import add_csv, read_rows, write_rows
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8
from torch_fp8.kernels.adamw import adamw_step
from torch_fp8.kernels.arguments import CastOptions, StepScalars, WeightMatrix, WeightPayload
from torch_fp8.nn.delayed_scaling import renew_scales
from torch_fp8.nn.linear import Float8Linear
from torch_fp8.quantization.payload_shape import SQUARE
from torch_fp8.tensor.split_weight import SplitWeight, halves_of, stored

TOKENS = IN = OUT = 512
STEP_IN, STEP_OUT = (
    128,
    256,
)  # of a weight in the optimizer's step, which takes the interpreter long
RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise")
OPERANDS = ("input", "gradient", "weight")
COLUMNS = (
    *("recipe", "case", "tensor", "bytes_per_element", "requested_per_element"),
    *("kernels", "torch_operators", "gemms", "launched", "torch", "triton", "commit", "date"),
    "command",
)


@dataclass(frozen=True)
class Case:
    """The circumstances under which a layer is counted.

    Attributes:
        name: the circumstance in words.
        options: fields of the `FP8Config`.
        bias: whether the layer has one.
        frozen: ``weight``, ``input`` or nothing.
        steps: whether the optimizer is ours, and has stepped before.
        ending: the counted part: ``backward`` (with the forward), ``inference``, ``amax``, or
            ``step``: the payload's part of the optimizer's step.
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
    Case("optimizer step, payload cache", (("cache_weights", True),), ending="step"),
    Case("amax given", ending="amax"),
)


def applies(recipe: str, case: Case) -> bool:
    """Return whether a recipe can be in a circumstance."""
    if case.ending == "amax":
        return recipe == "tensorwise"
    return not (dict(case.options).get("cache_weights") and recipe == "delayed")


def count(recipe: str, case: Case) -> tuple[list[Launch], dict[str, Tensor]]:
    """Return the launches of a layer, and its operands."""
    torch.manual_seed(0)
    num_in, num_out = (STEP_IN, STEP_OUT) if case.ending == "step" else (IN, OUT)
    model = nn.Sequential(nn.Linear(num_in, num_out, bias=case.bias, dtype=torch.bfloat16))
    config = FP8Config(recipe=recipe, **dict(case.options))
    if case.steps:  # it is stored in two halves
        model[0].weight = nn.Parameter(model[0].weight.float())
    convert_to_float8(model, config)
    linear, weight = model[0], model[0].weight
    weight.requires_grad_(case.frozen != "weight")
    x = torch.randn(TOKENS, num_in, dtype=torch.bfloat16, requires_grad=case.frozen != "input")
    grad = torch.randn(TOKENS, num_out, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    if case.steps:
        convert_optimizer(optimizer, config, model=model)

    def forward_and_backward() -> None:
        model(x).backward(grad)

    def inference() -> None:
        with torch.no_grad():
            model.eval()(x)

    def both_layouts() -> None:
        dtype = linear.fp8.recipe.input.format.dtype
        options = CastOptions(dtype, "tensorwise", False, True, True, amax=amax)
        torch.ops.torch_fp8.quantize_2d(x, *options)

    amax = torch.ones(())
    count_launches(forward_and_backward)  # scales can be made, the weight is known
    if case.steps:
        optimizer.step()
    else:  # as the user's would
        renew_scales([linear])
    x.grad = None
    model.zero_grad()
    if case.ending == "step":
        return count_step(linear, optimizer.state[weight]), {"weight": stored(weight)}
    run: dict[str, Callable[[], None]] = {
        "backward": forward_and_backward,
        "inference": inference,
        "amax": both_layouts,
    }
    operands = {"input": x, "gradient": grad, "weight": stored(weight)}
    halves = halves_of(weight)
    kept = [] if halves is None else halves.kept
    launches = count_launches(run[case.ending], **operands | {"weight": [stored(weight), *kept]})
    return launches, operands


def count_step(linear: Float8Linear, state: dict[str, Any]) -> list[Launch]:
    """Return the launches of a step of a layer's weight, including its payload."""
    weight, spec = linear.weight, linear.fp8.recipe.weight
    assert isinstance(weight, SplitWeight)
    halves, amax = weight.halves, torch.zeros(4)[:1].view(())
    assert halves.payload is not None
    if spec.granularity not in SQUARE:  # cast after the step
        halves.filled = 0
        return count_launches(lambda: halves.current_payload(halves.cast), weight=halves.high)
    qdata, scale, granularity = halves.payload
    payload = WeightPayload(granularity, spec.power_of_two, qdata, scale)
    matrix = WeightMatrix(
        halves.high,
        halves.residual,
        torch.randn_like(halves.high),
        state["exp_avg"].codes,
        state["exp_avg_sq"].codes,
        row=0,
        col=0,
        row_length=weight.shape[1],
        amax=amax if spec.granularity == "tensorwise" else None,
        payload=payload,
    )
    scalars = StepScalars(0.1, 0.999, 0.001, 1e-6, 1.0, 1e-8, 1.0, 0.0, False, 1)
    payload_tensors = [t for t in payload if isinstance(t, Tensor)]
    others = [matrix.residual, matrix.grad, *matrix.exp_avg, *matrix.exp_avg_sq]
    return count_launches(
        lambda: adamw_step([(matrix, scalars)]),
        payload=[*payload_tensors, amax],
        weight=halves.high,
        other=others,
    )


def step_rows(recipe: str, case: Case) -> list[dict[str, object]]:
    """Return what the payload adds to the step: traffic of its own memory, launches beyond the
    first.
    """
    launches, operands = count(recipe, case)
    by_name = [item for launch in launches for item in launch.tensors.items()]
    written = [traffic for name, traffic in by_name if name.startswith("payload")]
    traffic = written or [traffic for _, traffic in by_name]  # or casts after the step
    numel = operands["weight"].numel()
    return [
        {
            "recipe": recipe,
            "case": case.name,
            "tensor": "weight",
            "bytes_per_element": f"{sum(t.read + t.written for t in traffic) / numel:.3f}",
            "requested_per_element": f"{sum(t.requested for t in traffic) / numel:.3f}",
            **_launched(launches),
        }
    ]


def rows(recipe: str, case: Case) -> list[dict[str, object]]:
    """Return a row for each operand, and one for the rest."""
    if case.ending == "step":
        return step_rows(recipe, case)
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
    add_csv(parser, "quantization_bytes")
    parser.add_argument("--block", action="store_true", help="count only the rows of the block")
    options = parser.parse_args()
    about = environment(torch.device("cpu"))
    made: list[dict[str, object]] = []
    if options.block:
        made += [row for row in read_rows(options.csv) if row["case"] != block_bytes.CASE]
    for recipe in () if options.block else RECIPES:
        for case in CASES:
            if applies(recipe, case):
                made += [row | about for row in rows(recipe, case)]
        write_rows(options.csv, COLUMNS, [{c: row.get(c, "") for c in COLUMNS} for row in made])
    for recipe in block_bytes.RECIPES:
        made += [row | about for row in block_bytes.rows(recipe)]
    write_rows(options.csv, COLUMNS, [{c: row.get(c, "") for c in COLUMNS} for row in made])
    print_table(COLUMNS[:9], made)


if __name__ == "__main__":
    main()
