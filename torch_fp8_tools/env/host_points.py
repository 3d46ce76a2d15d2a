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
from typing import Any, get_args

import _fp8_points
from torch_fp8_tools.env.result import last_line

_FLAG = "fp8-mixed"

POINTS: dict[str, dict[str, tuple[str, ...]]] = {}
"""The names that `lightning_fp8` and `accelerate_fp8` extend, by host and module."""
for _module, _names in _fp8_points.POINTS.items():
    POINTS.setdefault(_module.partition(".")[0], {})[_module] = tuple(_names)

HELD, NOT_EXTENDED, MOVED = "held", "not extended", "moved"


def state_of(module: Any, name: str) -> str:
    """Return whether the name (dotted) in a module is extended, present, or missing."""
    value: Any = module
    for part in name.split("."):
        try:
            value = inspect.getattr_static(value, part)
        except AttributeError:
            return MOVED
    if get_args(value):
        return HELD if _FLAG in get_args(value) else NOT_EXTENDED
    return HELD if is_ours(value) else NOT_EXTENDED


def is_ours(value: Any) -> bool:
    """Return whether a function or property of a host is one of our wrappers."""
    if isinstance(value, property):
        value = value.fget
    return inspect.isfunction(value) and "_fp8_original" in vars(value)


def inspect_host(modules: list[str]) -> dict[str, Any]:
    """Return what `python -m` prints: version, error, warnings, and state of each point."""
    report: dict[str, Any] = {"version": None, "errors": {}, "warnings": [], "points": {}}
    host = modules[0].partition(".")[0]
    points = POINTS[host]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for name in modules:
            try:
                module = importlib.import_module(name)
            except BaseException as error:  # a host may raise anything
                report["errors"][name] = last_line(error)
                continue
            report["points"][name] = {point: state_of(module, point) for point in points[name]}
    report["warnings"] = [str(w.message) for w in said if "FP8" in str(w.message)]
    report["version"] = getattr(sys.modules.get(host), "__version__", None)
    return report


if __name__ == "__main__":
    output, sys.stdout = sys.stdout, sys.stderr  # keep hosts' prints off stdout
    json.dump(inspect_host(sys.argv[1:]), output)
