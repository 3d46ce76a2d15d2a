"""Reports which extension points of a host are extended; runs in its own process.

``python -m torch_fp8_tools.env.host_points MODULE ...`` imports torch and these modules of one
host, as a script would, and prints the state of the points below as JSON. So a broken host, or one
that ends the process, affects nothing else.
"""

import importlib
import inspect
import json
import sys
import warnings
from dataclasses import asdict
from typing import Any, get_args

import _fp8_points
from torch_fp8_tools.env.result import FAILED, OK, Result, last_line, one_line

SECTION, _FLAG = "hosts", "fp8-mixed"

POINTS: dict[str, dict[str, tuple[str, ...]]] = {}
"""The names that `lightning_fp8` and `accelerate_fp8` extend, by host and module."""
for _module, _names in _fp8_points.POINTS.items():
    POINTS.setdefault(_module.partition(".")[0], {})[_module] = tuple(_names)


def fault_of(module: Any, name: str) -> str:
    """Return why FP8 does not work through a dotted name of a module; empty if it is extended."""
    value: Any = module
    for part in name.split("."):
        try:
            value = inspect.getattr_static(value, part)
        except AttributeError:
            return "does not exist in this version, so the flag cannot work through it"
    held = _FLAG in get_args(value) if get_args(value) else is_ours(value)
    return "" if held else "is not extended: the flag has no effect here"


def is_ours(value: Any) -> bool:
    """Return whether a function or property of a host is one of our wrappers."""
    if isinstance(value, property):
        value = value.fget
    return inspect.isfunction(value) and "_fp8_original" in vars(value)


def inspect_host(modules: list[str]) -> dict[str, Any]:
    """Return what `python -m` prints: version, warnings on FP8, and fields of a line per point."""
    host = modules[0].partition(".")[0]
    faults: dict[str, str] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in modules:
            try:
                module = importlib.import_module(name)
            except BaseException as error:  # a host may raise anything
                faults[name] = f"cannot be imported: {last_line(error)}"
                continue
            faults |= {f"{name}:{point}": fault_of(module, point) for point in POINTS[host][name]}
    said = [one_line(str(w.message)) for w in caught if "FP8" in str(w.message)]
    lines = []
    for name, fault in faults.items():
        about = [text for text in said if f" {name.partition(':')[0]}:" in text]
        detail = "; ".join([fault, *about]) if fault else "extended"
        lines.append(Result(SECTION, name, FAILED if fault else OK, detail, part=not fault))
    return {
        "version": getattr(sys.modules.get(host), "__version__", None),
        "said": [text for text in said if not any(f" {module}:" in text for module in modules)],
        "lines": [asdict(line) for line in lines],
    }


if __name__ == "__main__":
    output, sys.stdout = sys.stdout, sys.stderr  # keep hosts' prints off stdout
    json.dump(inspect_host(sys.argv[1:]), output)
