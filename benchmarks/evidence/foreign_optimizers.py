"""Three steps of other libraries' optimizers over weights in two halves, against stock.

    pip install pytorch_optimizer torch_optimizer bitsandbytes galore-torch apollo-torch \\
        schedulefree grokadamw torch-optimi
    python -m benchmarks.evidence.foreign_optimizers    # runs/benchmarks/foreign_optimizers.csv

Both models start from the same weights and get the same BF16 gradients. ``update_sqnr_db`` is the
norm of stock's update over that of the difference, of the split weights. ``result`` is

* ``stepped``: the weights were split, or the reason why the optimizer keeps them in float32;
* ``stock: ...``: the error of the stock optimizer, which needs arguments or inputs of its own.

Each optimizer runs in its own process. Packages that are not installed have no rows.
"""

import argparse
import functools
import importlib
import importlib.metadata
import math
import multiprocessing
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.measurement import environment, print_table
from benchmarks.rows import add_csv, write_rows
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8
from torch_fp8.tensor.split_weight import SplitWeight

COLUMNS = ("optimizer", "package", "version", "level", "result", "update_sqnr_db")
ABOUT = ("torch", "commit", "date", "command")
STEPS, SECONDS = 3, 120
FIXED = {"relative_step": False, "scale_parameter": False, "warmup_init": False, "lr": 1e-3}
LOW_RANK = {"rank": 8, "update_proj_gap": 2, "scale": 0.25, "proj_type": "std"}
NAMES = ("AdamW", "AdamW8bit", "AdEMAMix", "AdEMAMix8bit", "Lion", "Lion8bit")
CLASSES: dict[str, tuple[str, Any]] = {
    "torch": (
        "torch.optim",
        [
            *("Adadelta", "Adafactor", "Adagrad", "Adamax", "ASGD", "LBFGS", "Muon", "NAdam"),
            *("RAdam", "RMSprop", "Rprop", "SGD"),
        ],
    ),
    "transformers": ("transformers", ("Adafactor",)),
    "torchao": ("torchao.optim", ("AdamW8bit", "AdamW4bit")),
    "bitsandbytes": (
        "bitsandbytes.optim",
        [
            *(prefix + name for name in NAMES for prefix in ("", "Paged")),
            *("RMSprop", "RMSprop8bit", "RMSprop32bit"),
        ],
    ),
    "galore-torch": ("galore_torch", ("GaLoreAdamW", "GaLoreAdafactor")),
    "apollo-torch": ("apollo_torch", ("APOLLOAdamW",)),
    "schedulefree": (
        "schedulefree",
        ("SGDScheduleFree", "AdamWScheduleFree", "RAdamScheduleFree"),
    ),
    "grokadamw": ("grokadamw", ("GrokAdamW",)),
    "torch-optimi": ("optimi", ("Adam", "AdamW", "Adan", "Lion", "RAdam", "Ranger", "SGD")),
}
"""The package, its module and classes, beside all of pytorch_optimizer and torch_optimizer."""
OPTIONS: dict[str, dict[str, Any]] = {
    "transformers.Adafactor": FIXED,
    "galore-torch.GaLoreAdafactor": FIXED,
    "torch.SGD": {"lr": 1e-2, "momentum": 0.9},
    "torch-optimi.SGD": {"lr": 1e-2},
    "bitsandbytes.PagedLion": {"lr": 1e-3},
}
RATE = {"torch-optimi": 1e-3, "bitsandbytes": 1e-3}
MATRICES = {"galore-torch": LOW_RANK, "apollo-torch": {**LOW_RANK, "proj": "random"}}
MATRICES["apollo-torch"] |= {"scale_type": "channel"}
"""Options of the group of matrices, by package."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_csv(parser, "foreign_optimizers")
    parser.add_argument("--packages", nargs="*", help="only these packages")
    parser.add_argument("--level", default="O2")
    arguments = parser.parse_args()
    about, rows = environment(torch.device("cpu")), []
    for name, package, make in _all(arguments.packages):
        result, sqnr = _in_a_process(functools.partial(compare, make, arguments.level))
        about_package = {"package": package, "version": importlib.metadata.version(package)}
        row = {"optimizer": name, **about_package, "level": arguments.level, "result": result}
        rows.append({**row, "update_sqnr_db": sqnr, **about})
        print(*(rows[-1][column] for column in COLUMNS), flush=True)
        write_rows(arguments.csv, (*COLUMNS, *ABOUT), rows)
    print_table(COLUMNS, rows)


Make = Callable[[nn.Module], Optimizer]


def _all(packages: list[str] | None) -> Iterator[tuple[str, str, Make]]:
    for package, (module, names) in CLASSES.items():
        if (packages and package not in packages) or not _installed(module):
            continue
        for name in names:
            cls = getattr(importlib.import_module(module), name, None)
            if cls is not None:
                yield name, package, functools.partial(_make, cls, package)
    for package in ("pytorch_optimizer", "torch_optimizer"):
        if (packages and package not in packages) or not _installed(package):
            continue
        library = importlib.import_module(package)
        for name, cls in sorted(vars(library).items()):
            optimizer = isinstance(cls, type) and issubclass(cls, Optimizer)
            if optimizer and "Base" not in name and cls.__module__.startswith(package):
                yield name, package, functools.partial(_make, cls, package)


def _installed(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def _make(cls: Any, package: str, model: nn.Module) -> Optimizer:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    options = OPTIONS.get(f"{package}.{cls.__name__}", {})
    if not options and package in RATE:
        options = {"lr": RATE[package]}
    if package in MATRICES:
        return cls([{"params": matrices, **MATRICES[package]}], **options)
    if cls is torch.optim.Muon:
        return cls(matrices, **options)
    every = list(model.parameters())
    error: Exception | None = None
    for arguments, others in (
        (every, {}),
        ([{"params": matrices, "use_muon": True}], {}),
        (model, {}),
        (every, {"base_optimizer": torch.optim.SGD, "lr": 0.1}),
        (every, {"num_data": 100}),
        (torch.optim.SGD(every, lr=0.1), {}),
    ):
        try:
            return cls(arguments, **options, **others)
        except Exception as failed:  # the first one is reported
            error = error or failed
    assert error is not None
    raise error


def compare(make: Make, level: str) -> tuple[str, float | str]:
    """Return the result and the update's SQNR in dB of one optimizer."""
    models = [_model(), _model()]
    config = FP8Config(recipe="tensorwise", opt_level=level)
    convert_to_float8(models[1], config)
    try:
        optimizers = [make(model) for model in models]
    except Exception as error:
        return f"stock: {_line(error)}", ""
    try:
        report = convert_optimizer(optimizers[1], config, model=models[1])
    except Exception as error:
        return f"conversion: {_line(error)}", ""
    if not report.converted:
        return str(report.reason), ""
    models[0].load_state_dict({k: v.clone() for k, v in models[1].state_dict().items()})
    starts = [p.detach().clone() for p in models[0].parameters()]
    for side, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        try:
            for step in range(STEPS):
                _step(model, optimizer, step)
        except Exception as error:
            return f"{'ours' if side else 'stock'}: {_line(error)}", ""
    signal = noise = 0.0
    for start, p, q in zip(starts, models[0].parameters(), models[1].parameters(), strict=True):
        if isinstance(q, SplitWeight):
            signal += float((p.detach() - start).double().square().sum())
            noise += float((q.detach() - p.detach()).double().square().sum())
    if not signal:
        return "stock: it moves no weight", ""
    if not math.isfinite(signal):
        return "stock: weights are not finite", ""
    return "stepped", round(10 * math.log10(signal / noise), 1) if noise else math.inf


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 64))


def _step(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    getattr(optimizer, "train", lambda: None)()

    def closure() -> Tensor:
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            grad = torch.randn(parameter.shape, generator=generator).bfloat16()
            parameter.grad = grad if isinstance(parameter, SplitWeight) else grad.float()
        return torch.tensor(1.0, requires_grad=True)

    closure()
    torch.manual_seed(step)
    try:
        optimizer.step()
    except (TypeError, RuntimeError, ValueError) as error:
        if "closure" not in str(error).lower():
            raise
        optimizer.step(closure)


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:160]


def _in_a_process(function: Callable[[], tuple[str, Any]]) -> tuple[str, Any]:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        sender.send(function())

    process = context.Process(target=run)
    process.start()
    sender.close()
    try:
        if receiver.poll(SECONDS):
            return receiver.recv()
        process.terminate()
        return f"ran past {SECONDS} s", ""
    except EOFError:
        process.join()
        return f"the process ended with {process.exitcode}", ""
    finally:
        process.join()


if __name__ == "__main__":
    main()
