"""One optimizer step on a billion parameters: 8-bit AdamW against torch's fused one and torchao's.

    python -m benchmarks.bench_optimizer         # on a GPU; runs/benchmarks/optimizer.csv
    python -m benchmarks.bench_optimizer --toy   # a tiny model, also on a CPU: the reference path

The parameters of a TinyLlama-1.1B layout with tied embeddings: 200 tensors, 1.03e9 elements. All
variants step in this process, interleaved, with existing gradients. Before each call
the GPU has to wait, so that `median_ms` is the time on the GPU; `host_ms` is the time on the
host, which a training loop may hide behind the backward pass.

`bytes` are counted from the tensors: weights and states are read and written, gradients read, once
each, even if update clipping reads gradients and second moments first. Takes 90 GB of memory.
`floor_ms` is their time at the card's copy bandwidth, measured between the steps, and `copy_share`
the floor over the median; `speedup` is over torch's fused AdamW. `loss`: of a small regression that
the variant has trained for `LOSS_STEPS` steps.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks import peers
from benchmarks.card import copying, free
from benchmarks.measurement import (
    NOT_REACHED,
    Budget,
    Table,
    Timing,
    default_device,
    environment,
    interleaved,
    note_of,
    parser,
    print_table,
)
from benchmarks.plot import draw
from benchmarks.shapes import TINY_LLAMA_1_1B, TOY_LLAMA, parameter_shapes
from torch_fp8 import FP8Config, convert_optimizer
from torch_fp8.optim.state import is_large
from torch_fp8.tensor.exchange import stored_grad
from torch_fp8.tensor.float8_grad import Float8Grad
from torch_fp8.tensor.split_weight import split_parameter, stored
from torch_fp8_tools.plan.memory_tracker import plain_parts

COLUMNS = (
    *("variant", "tensors", "parameters", "median_ms", "p20_ms", "p80_ms", "host_ms"),
    *("bytes", "bytes_per_parameter", "gb_per_s", "floor_ms", "copy_share", "speedup"),
    *("loss", "note"),
)
FUSED = "torch AdamW, fp32"
FUSED_BF16 = "torch AdamW, bf16"
COPY = "copy"
# Name -> (update clipping, 8-bit gradients).
OURS = {
    "fp8, 8 residual bits": (False, False),
    "fp8, 8 residual bits, 8-bit gradients": (False, True),
    "fp8, 8 residual bits, update clipping": (True, False),
}
PEERS = tuple(f"torchao {name}" for name in peers.TORCHAO_OPTIMIZERS)
VARIANTS = (FUSED, FUSED_BF16, *OURS, *PEERS)
COPY_BYTES = 4 * 2**30
WAIT_MS = 30.0  # longer than the host takes for any step
LOSS_FEATURES, LOSS_STEPS = 128, 60


def main() -> None:
    arguments = parser("optimizer", __doc__)
    arguments.add_argument("--variants", nargs="+", choices=VARIANTS)
    arguments.add_argument("--repetitions", type=int, default=30)
    arguments = arguments.parse_args()
    # torchao's compile for each shape, minutes on a CPU.
    every = (FUSED, FUSED_BF16, *OURS) if arguments.toy else VARIANTS
    arguments.variants = arguments.variants or every
    if arguments.toy:
        arguments.repetitions = 2
    device = default_device()
    table = Table(arguments.csv, COLUMNS, COLUMNS[:3], environment(device))
    measure(arguments, device, table.add)
    draw(arguments.csv)
    columns = ("variant", "median_ms", "host_ms", "gb_per_s", "copy_share", "speedup", "loss")
    print_table((*columns, "note"), table.rows)


def measure(
    arguments: argparse.Namespace,
    device: torch.device,
    add: Callable[[list[dict[str, object]]], None],
) -> None:
    """Add a row per variant, and one of the copy; peers come last, since they may compile for long.

    Args:
        arguments: the command's arguments.
        device: device to run on.
        add: function of all rows so far, which replaces the earlier ones.
    """
    budget = Budget(arguments.budget)
    shapes = parameter_shapes(**(TOY_LLAMA if arguments.toy else TINY_LLAMA_1_1B))
    runs: dict[str, Callable[[], object]] = {}
    num_bytes: dict[str, int] = {}
    losses: dict[str, float] = {}
    notes: dict[str, str] = {}
    runs[COPY], num_bytes[COPY] = copying(2**20 if arguments.toy else COPY_BYTES, device)
    wait = 0.0 if arguments.toy else WAIT_MS
    theirs = [name for name in arguments.variants if name in PEERS]
    for names in ([name for name in arguments.variants if name not in PEERS], theirs):
        for name in names:
            if not budget.fits():
                notes[name] = NOT_REACHED
                continue
            with budget.piece():
                try:
                    losses[name] = training_loss(name, device)
                    optimizer = build(name, shapes, device)
                    optimizer.step()  # compiles, and makes the states
                except Exception as error:
                    notes[name] = note_of(error)
                    continue
            runs[name] = optimizer.step
            num_bytes[name] = moved_bytes(optimizer)
        if names is not theirs or runs.keys() & set(theirs):
            timings = interleaved(runs, device, arguments.repetitions, wait_ms=wait, failures=notes)
        add(rows_of(arguments.variants, shapes, timings, num_bytes, losses, notes))
    free(device)


def rows_of(
    variants: list[str],
    shapes: list[tuple[int, ...]],
    timings: dict[str, Timing],
    num_bytes: dict[str, int],
    losses: dict[str, float],
    notes: dict[str, str],
) -> list[dict[str, object]]:
    """Return the rows of variants with a time or a note."""
    copy_rate = num_bytes[COPY] / timings[COPY].median / 1e6
    parameters = sum(torch.Size(shape).numel() for shape in shapes)
    rows: list[dict[str, object]] = []
    for name in (*variants, COPY):
        if name not in timings and name not in notes:
            continue
        row: dict[str, object] = {"variant": name, "note": notes.get(name, "")}
        row |= {"tensors": len(shapes), "parameters": parameters}
        if name in timings:
            timing = timings[name]
            rate = num_bytes[name] / timing.median / 1e6
            row |= timing.columns() | {
                "host_ms": round(timing.host, 4),
                "bytes": num_bytes[name],
                "gb_per_s": round(rate, 1),
                "floor_ms": round(num_bytes[name] / copy_rate / 1e6, 4),
                "copy_share": round(rate / copy_rate, 3),
            }
        if name in timings and name != COPY:
            row["bytes_per_parameter"] = round(num_bytes[name] / parameters, 3)
            row["loss"] = round(losses[name], 6)
            if FUSED in timings:
                row["speedup"] = round(timings[FUSED].median / timings[name].median, 3)
        rows.append(row)
    return rows


def training_loss(name: str, device: torch.device) -> float:
    """Return the mean squared error of a small network that the variant has trained."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if name in (FUSED_BF16, *PEERS) else torch.float32
    width = LOSS_FEATURES
    network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    x, target = torch.randn(512, width), torch.randn(width, width) / width**0.5
    network, x, target = network.to(device, dtype), x.to(device), (x @ target).to(device)
    optimizer = make_optimizer(name, list(network.parameters()), 3e-3, device)
    for _ in range(LOSS_STEPS):
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            output = network(x)
        loss = (output.float() - target).square().mean()
        loss.backward()
        for parameter in network.parameters():
            parameter.grad = as_stored(name, parameter, parameter.grad)
        optimizer.step()
    return loss.item()


def make_optimizer(
    name: str, parameters: list[nn.Parameter], lr: float, device: torch.device
) -> torch.optim.Optimizer:
    """Return the variant's AdamW of these parameters."""
    if name in PEERS:
        return peers.torchao_optimizer(name.removeprefix("torchao "), parameters, lr=lr)
    fused = name not in OURS and device.type == "cuda"
    optimizer = torch.optim.AdamW(parameters, lr=lr, fused=fused)
    if name in OURS:
        convert_optimizer(optimizer, FP8Config(update_clipping=OURS[name][0]))
        for parameter in parameters:  # no model is there to show that they may be split
            if is_large(parameter) and type(parameter) is nn.Parameter:
                split_parameter(parameter)
    return optimizer


def as_stored(name: str, parameter: nn.Parameter, grad: Tensor) -> Tensor:
    """Return a gradient in the variant's format."""
    quantized = name in OURS and OURS[name][1] and is_large(parameter)
    return Float8Grad.quantize(grad) if quantized else grad


def build(name: str, shapes: list[tuple[int, ...]], device: torch.device) -> torch.optim.Optimizer:
    """Return an optimizer whose parameters have gradients."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if name in (FUSED_BF16, *PEERS) else torch.float32

    def random(shape: tuple[int, ...], size: float) -> Tensor:
        return torch.randn(shape, generator=generator, device=device) * size

    parameters = [nn.Parameter(random(shape, 0.02).to(dtype)) for shape in shapes]
    optimizer = make_optimizer(name, parameters, 1e-4, device)
    for parameter in parameters:
        grad = random(parameter.shape, 1e-3).to(stored(parameter).dtype)
        parameter.grad = as_stored(name, parameter, grad)
    return optimizer


def moved_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes that a step has to read and write."""
    total = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            states = [s for s in optimizer.state[parameter].values() if s.ndim]
            parts = [part for t in (parameter, *states) for part in plain_parts(t)]
            total += 2 * sum({id(part): part.nbytes for part in parts}.values())
            total += sum(part.nbytes for part in plain_parts(stored_grad(parameter)))
    return total


if __name__ == "__main__":
    main()
