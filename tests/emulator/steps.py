"""Trains small models on an emulated card and on the CPU; prints, as JSON, how far apart they are.

Run by test_steps.py in a process of its own: operators register both of their implementations when
`torch_fp8` is imported. Products are computed in float64 on both, the emulated card's with the
demands of torch's CUDA operator; all else that a card would run is launched and emulated.

Each call that launches casts, producers or AdamW is compared with its reference on the arguments
that it got, as `tests.emulator.compared` says, and none may be unequal. Whole steps are further
apart. A float32 sum in another order, such as a norm's, moves an element to the next FP8 value here
and there, and Adam's first update of a weight is the sign of its gradient, however small. How far
that carries, another run on the CPU shows: the same but for rstd, which is the next float32 above,
and for noise of a millionth in the first gradients, where these are not in 8 bits.

    python -m tests.emulator.steps --csv benchmarks/results/emulated_steps.csv
"""

import argparse
import contextlib
import csv
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tests.emulator.card_process import steps  # before torch_fp8

# isort: split
import torch
from torch import Tensor, nn

from tests.emulator.compared import Comparison
from tests.emulator.driver import emulated
from tests.emulator.place import on_card
from tests.emulator.scaled_gemm import exact_product, scaled_mm
from tests.emulator.step_cases import CASES, KINDS, Case
from tests.emulator.step_models import MODELS
from tests.golden.training import adamw, batch
from tests.internals import Float8Grad
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8
from torch_fp8.ops import scaled_mm as products

_RAW = argparse.RawDescriptionHelpFormatter
NOISE = tuple(f"{kind} by noise" for kind in KINDS)
COLUMNS = (
    *("case", "model", "recipe", "level", "target"),
    *(*KINDS, *NOISE, "equal", "tensors", "calls", "unequal calls", "launches", "kernels"),
)
"""The largest distance of each kind, relative to the size of what is compared; the same of the
run with noise; how many tensors were equal; calls of launching functions that were compared.

Where the optimizer releases gradients there are none to compare.
"""
LENGTHS = (32, 37, 32)
"""Tokens of the steps' texts."""


@contextlib.contextmanager
def next_rstd() -> Iterator[None]:
    """Take the next float32 above for each reciprocal root, as another order of sums does."""
    exact = Tensor.rsqrt

    def next_above(x: Tensor) -> Tensor:
        root = exact(x)
        return torch.nextafter(root, torch.full_like(root, torch.inf))

    with mock.patch.object(Tensor, "rsqrt", next_above, create=True):
        yield


def add_noise(model: nn.Module) -> None:
    """Change gradients by a millionth of their size, as sums in another order do."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        grad = parameter.grad
        if grad is not None and not isinstance(grad, Float8Grad):
            noise = torch.randn(grad.shape, generator=generator)
            grad.add_((1e-6 * grad.float().square().mean().sqrt() * noise).to(grad.dtype))


def train(case: Case, noisy: bool = False) -> dict[str, Any]:
    """Train a model for a few steps, then decode two tokens.

    Args:
        noisy: whether noise is added to the first gradients.

    Returns:
        Losses, gradients before the last step, weights and states behind it, logits.
    """
    options = case.options
    if options["recipe"] == "delayed":
        options = options | {"amax_history_len": 8}
    config = FP8Config(**options)
    model = MODELS[case.model]()
    optimizer = adamw(model)
    convert_to_float8(model, config)
    convert_optimizer(optimizer, config, model=model)
    losses, grads, first = [], {}, {}
    for number, tokens in enumerate(LENGTHS):
        ids = batch(case.first_batch + number, tokens, 0)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.detach())
        named = list(model.named_parameters())
        grads = {n: _plain(p.grad) for n, p in named if p.grad is not None}
        first = first or grads
        if noisy and number == 0:
            add_noise(model)
        optimizer.step()
        optimizer.zero_grad()
    results = {f"loss {i}": loss for i, loss in enumerate(losses)}
    results |= {f"first grad of {name}": grad for name, grad in first.items()}
    results |= {f"last grad of {name}": grad for name, grad in grads.items()}
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    results |= {f"weight {name}": _plain(p) for name, p in trained}
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        past = None
        for i, ids in enumerate((batch(5, 7, 0)[:1], batch(5, 8, 0)[:1, 7:])):
            out = model(input_ids=ids, past_key_values=past, use_cache=True)
            past = out.past_key_values
            results[f"logits {i}"] = out.logits
    return results


def _plain(x: Tensor) -> Tensor:
    return x.detach().float().clone()


@contextlib.contextmanager
def card(capability: tuple[int, int] = (9, 0)) -> Iterator[Any]:
    """Run within on the emulated card."""
    with contextlib.ExitStack() as stack:
        emulation = stack.enter_context(emulated(capability=capability))
        capturing = mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False)
        stack.enter_context(capturing)
        stack.enter_context(mock.patch.object(torch, "_scaled_mm_v2", off_card_product))
        # As Hopper has it, with cuBLASLt of CUDA 12.9.
        dtype = torch.float32 if capability == (9, 0) else torch.bfloat16
        wide = mock.patch.object(products, "_rowwise_dtype", return_value=dtype)
        stack.enter_context(wide)
        for name in ("_with_payload", "_step_on"):
            stub = _for_cpu(steps, getattr(steps, name))
            stack.enter_context(mock.patch.object(steps, name, stub))
        stack.enter_context(on_card())
        yield emulation


def off_card_product(*args: Any) -> Tensor:
    with on_card(False):
        return scaled_mm(*args)


def _for_cpu(module: Any, function: Any) -> Any:
    """Return a function that takes tensors of type "cpu" for tensors on CUDA."""
    source = inspect.getsource(function).replace('"cuda"', '"cpu"')
    names = dict(vars(module))
    exec(source, names)
    return names[function.__name__]


def distance(got: Tensor, want: Tensor) -> float:
    size = float(want.double().norm()) or 1.0
    return float((got.double() - want.double()).norm()) / size


def compare(name: str) -> dict[str, Any]:
    """Train on the CPU, there with another rstd, and on the emulated card."""
    case = CASES[name]
    with mock.patch.object(products, "_emulated", exact_product):
        want = train(case)
        with next_rstd():
            noisy = train(case, noisy=True)
    with card(case.capability) as emulation:
        comparison = Comparison(emulation.launches)
        with comparison.all_functions():
            got = train(case)
    apart = {key: distance(got[key], x) for key, x in want.items()}
    noise = {key: distance(noisy[key], x) for key, x in want.items()}
    for difference in sorted(set(comparison.unequal.values())):
        print(f"{name}: {difference}", file=sys.stderr)
    return {
        "model": case.model,
        "recipe": case.options["recipe"],
        "level": case.options.get("opt_level", "O2"),
        "target": f"sm_{10 * case.capability[0]}",
        **{kind: _largest(apart, kind) for kind in KINDS},
        **{f"{kind} by noise": _largest(noise, kind) for kind in KINDS},
        "equal": sum(v == 0 for v in apart.values()),
        "tensors": len(apart),
        "calls": comparison.compared,
        "unequal calls": len(set(comparison.unequal.values())),
        "launches": len(emulation.launches),
        "kernels": len({launched.name for launched in emulation.launches}),
    }


def _largest(distances: dict[str, float], kind: str) -> float:
    return max((v for key, v in distances.items() if key.startswith(kind)), default=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_RAW)
    parser.add_argument("cases", nargs="*", help="names; none: all that --csv does not have")
    parser.add_argument("--csv", type=Path, help="file to which rows are added")
    chosen = parser.parse_args()
    if chosen.csv is None:
        json.dump({case: compare(case) for case in chosen.cases}, sys.stdout)
        return
    done = []
    if chosen.csv.exists():
        with chosen.csv.open() as file:
            done = list(csv.DictReader(file))
    there = {row["case"] for row in done if row["calls"]}
    for case in chosen.cases or [name for name in CASES if name not in there]:
        done = [row for row in done if row["case"] != case]
        done.append({"case": case, **compare(case)})
        with chosen.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(done)


if __name__ == "__main__":
    main()
