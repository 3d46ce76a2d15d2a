"""Which way to hold a weight keeps user code right: a table of properties of three designs.

    python -m benchmarks.weight_designs    # runs/benchmarks/weight_designs.csv

`benchmarks.weight_prototypes` has the designs, `benchmarks.weight_properties` what is asked of
them. ``stock`` has float32 weights, as BF16-mixed training leaves them. Each cell is:

* ``ok``: the result, all weights and all gradients equal stock's, bit for bit, or within the
  tolerance that the property names;
* ``wrong (what)``: they do not, without an error;
* ``raises (what)``: an error that stock does not give;
* ``refused``: an error that names what is refused.

Design b has two columns: a loop of one's own, where nobody enters its scope, and code within it.
Rows of the section ``cost`` are figures.
"""

import argparse
import collections
import contextlib
import io
import itertools
import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from benchmarks.measurement import environment, print_table
from benchmarks.rows import add_csv, write_rows
from benchmarks.weight_properties import DISTRIBUTED, NEAR, PROPERTIES, SIDE, Kit, Property, alone
from benchmarks.weight_prototypes import DESIGNS, Design, HalfLinear

COLUMNS = ("section", "property", *DESIGNS, "torch", "commit", "date", "command")
TWO = "0 two processes"


def measured(name: str, function: Property) -> Any:
    """Run a property; return its value, the weights and the gradients, or the error."""
    try:
        kit = Kit(DESIGNS[name])
        torch.manual_seed(1)
        with kit.scopes:
            value = kit.plain(function(kit))
        return value, kit.weights()
    except Exception as error:
        return error


def verdict(value: Any, reference: Any, near: float) -> str:
    """Compare what a design gives with what stock gives."""
    if isinstance(value, str):
        return value
    if isinstance(value, Exception):
        # What Dynamo adds names files of the machine.
        text = " ".join(str(value).partition("from user code")[0].split())[:70]
        if isinstance(value, AssertionError):
            return f"wrong ({text})"
        return "refused" if "refused" in text else f"raises ({type(value).__name__}: {text})"
    if isinstance(reference, Exception):
        return "ok"
    for label, got, want in zip(
        ("value", "weights", "gradients"), _parts(value), _parts(reference), strict=True
    ):
        if text := _difference(got, want, near):
            return f"wrong ({label}: {text})"
    return "ok"


def _parts(outcome: Any) -> tuple[Any, Any, Any]:
    value, (weights, grads) = outcome
    return value, weights, grads


def _difference(got: Any, want: Any, near: float) -> str:
    a, b = pytree.tree_leaves(got), pytree.tree_leaves(want)
    if len(a) != len(b):
        return f"{len(a)} for {len(b)}"
    for x, y in zip(a, b, strict=True):
        if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
            if not isinstance(x, torch.Tensor) and x == y:
                continue
            return f"{str(x)[:40]} for {str(y)[:40]}"
        if x.dtype != y.dtype or x.shape != y.shape:
            return f"{x.dtype} {tuple(x.shape)} for {y.dtype} {tuple(y.shape)}".replace(
                "torch.", ""
            )
        if not (x.isnan() | (x == y)).all():
            far = float((x.double() - y.double()).norm() / y.double().norm().clamp(min=1e-300))
            if not far <= near:
                return f"relative difference {far:.0e}"
    return ""


def table(sections: Any = None) -> list[dict[str, object]]:
    """Return a row for each property of one process."""
    rows = []
    for section, properties in sorted(PROPERTIES.items()):
        for name, function in properties.items() if sections is None or section in sections else ():
            outcomes = {design: measured(design, function) for design in DESIGNS}
            rows.append(_row(section, name, outcomes))
    return rows


def _row(section: str, name: str, outcomes: dict[str, Any]) -> dict[str, object]:
    near = NEAR.get(f"{section}/{name}", 0.0)
    cells = {d: verdict(o, outcomes["stock"], near) for d, o in outcomes.items()}
    return {"section": section, "property": name, **cells}


def _process(rank: int, folder: str, design: str, first: int) -> None:
    """Run properties on one of two ranks until one raises: the other rank then waits in vain."""
    for name, function in list(DISTRIBUTED.items())[first:]:
        store = dist.FileStore(f"{folder}/{design} {name} from {first}", 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        outcome = measured(design, function)
        if isinstance(outcome, Exception):
            _save(outcome.with_traceback(None), Path(folder), f"{design} {name} {rank}")
            os._exit(1)
        if rank == 0:
            _save(outcome, Path(folder), f"{design} {name} 0")
        dist.destroy_process_group()


def _save(outcome: Any, folder: Path, name: str) -> None:
    """Write a whole file or none: the end of the other rank ends this one at any moment."""
    part = folder / f"{name}.part"
    torch.save(outcome, part)
    part.rename(folder / name)


def two_processes() -> list[dict[str, object]]:
    """Return the rows of collectives, DDP and FSDP2; this process must have no threads yet."""
    outcomes: dict[str, dict[str, Any]] = {name: {} for name in DISTRIBUTED}
    with tempfile.TemporaryDirectory() as folder:
        for design, (i, name) in itertools.product(DESIGNS, enumerate(DISTRIBUTED)):
            if design == "b in scope" and name.startswith("FSDP2"):
                outcomes[name][design] = "not run: the prototype's scope knows no shards"
                continue
            files = [Path(f"{folder}/{design} {name} {rank}") for rank in range(2)]
            if not files[0].exists() and not files[1].exists():  # or the one before has ended it
                with contextlib.suppress(ProcessException):
                    torch.multiprocessing.start_processes(
                        _process, (folder, design, i), nprocs=2, start_method="fork"
                    )
            saved = [torch.load(f, weights_only=False) for f in files if f.exists()]
            errors = [outcome for outcome in saved if isinstance(outcome, Exception)]
            saved = errors or saved or [RuntimeError("the process died")]
            outcomes[name][design] = saved[0]
    return [_row(TWO, name, outcomes[name]) for name in DISTRIBUTED]


def held(design: Design) -> dict[str, str]:
    """Return bytes for each element of a weight: converted, after our step, and of its gradient."""
    torch.manual_seed(0)
    layer = HalfLinear(SIDE, SIDE, bias=False)
    design.convert(layer)
    size = layer.weight.numel()

    def count(x: Any) -> str:
        return f"{sum(part.nbytes for part in map(_raw, design.parts(x))) / size:g}"

    figures = {"bytes of a written weight": count(layer.weight)}
    layer(torch.randn(8, SIDE)).float().sum().backward()
    figures["bytes of its gradient"] = count(layer.weight.grad)
    if type(design) is not Design:
        design.write_step(layer.weight, design.joined(layer.weight) * 0.999)
    after = {"bytes after our step": count(layer.weight)}
    return {**figures, **after, "bytes in a bucket of DDP": f"{_bucket(layer) / size:g}"}


def _bucket(layer: torch.nn.Module) -> int:
    """Return the bytes of the bucket in which DDP reduces a layer's gradient."""
    seen = []

    def hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append(bucket.buffer().nbytes)
        future = torch.futures.Future[torch.Tensor]()
        future.set_result(bucket.buffer())
        return future

    alone(lambda: None)
    ddp = DistributedDataParallel(layer)
    ddp.register_comm_hook(None, hook)
    ddp(torch.randn(8, SIDE)).float().sum().backward()
    return seen[0]


def _raw(x: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(torch.Tensor) if type(x).__name__.startswith("Stored") else x


def host_time(repetitions: int = 300) -> dict[str, str]:
    """Time a small layer beside one with a plain BF16 Parameter, forward and backward, in pairs."""
    runs = {}
    for name, design in {**DESIGNS, "plain": Design()}.items():
        layer = HalfLinear(32, 32, bias=False)
        if name == "plain":
            layer.bfloat16()
        design.convert(layer)
        runs[name] = (layer, torch.randn(8, 32, requires_grad=True))
    grad = torch.ones(8, 32, dtype=torch.bfloat16)
    times: dict[str, list[float]] = collections.defaultdict(list)
    for _ in range(repetitions):
        for name, (layer, x) in runs.items():
            start = time.perf_counter()
            layer(x).backward(grad)
            times[name].append(time.perf_counter() - start)
            layer.weight.grad = x.grad = None
    paired = {
        n: statistics.median(map(lambda a, b: a - b, times[n], times["plain"])) for n in DESIGNS
    }
    base = statistics.median(times["plain"])
    return {name: f"{1e6 * extra:+.0f} us of {1e6 * base:.0f}" for name, extra in paired.items()}


def cost() -> list[dict[str, object]]:
    """Return the rows of bytes and host time."""
    figures = {name: held(design) for name, design in DESIGNS.items()}
    rows = [
        {"section": "cost", "property": what, **{name: figures[name][what] for name in DESIGNS}}
        for what in figures["stock"]
    ]
    label = "host time of a layer, against a plain BF16 Parameter"
    return [*rows, {"section": "cost", "property": label, **host_time()}]


def summary(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Count cells that are ok or refused, by section and design."""
    counts: dict[str, dict[str, object]] = {}
    for row in rows:
        if row["section"] == "cost":
            continue
        for section in (str(row["section"]), "all"):
            counted = counts.setdefault(
                section, {"section": section, "rows": 0, **dict.fromkeys(DESIGNS, 0)}
            )
            counted["rows"] += 1
            for design in DESIGNS:
                counted[design] += row[design] in ("ok", "refused")
    return [counts[s] for s in sorted(counts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_csv(parser, "weight_designs")
    path = parser.parse_args().csv
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    warnings.simplefilter("ignore")
    with contextlib.redirect_stderr(io.StringIO()):
        rows = [*two_processes(), *table(), *cost()]
    versions = environment(torch.device("cpu"))
    write_rows(path, COLUMNS, [{**row, **versions} for row in rows])
    print_table(COLUMNS[: 2 + len(DESIGNS)], rows)
    print_table(("section", "rows", *DESIGNS), summary(rows))


if __name__ == "__main__":
    main()
