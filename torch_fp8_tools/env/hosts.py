"""Checks of the installed hosts: their versions, and the state of their extension points."""

import importlib.util
import json
import os
import site
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch_fp8
from torch_fp8._version import distribution_version
from torch_fp8_tools.env.host_points import HELD, MOVED, POINTS
from torch_fp8_tools.env.result import FAILED, INFO, OK, Result, one_line

SECTION = "hosts"
_DISTRIBUTIONS = {
    "lightning": ("lightning",),
    "pytorch_lightning": ("pytorch-lightning",),
    "lightning_fabric": ("lightning-fabric", "pytorch-lightning"),
    "accelerate": ("accelerate",),
    "transformers": ("transformers",),
    "trl": ("trl",),
    "peft": ("peft",),
    "transformer_engine": ("transformer-engine", "transformer-engine-torch"),
    "torchao": ("torchao",),
}
"""The distributions that contain each top-level module."""
_LIMIT_S = 120


def is_installed(host: str) -> bool:
    """Return whether a top-level module can be found, without importing it."""
    try:
        return importlib.util.find_spec(host) is not None
    except (ImportError, ValueError):
        return False


def child_environment() -> dict[str, str]:
    """Return the environment for a process that must find this very package."""
    root = str(Path(torch_fp8.__file__).parent.parent)
    installed = {*site.getsitepackages(), site.getusersitepackages()}
    first = [] if root in installed else [root]
    search = os.pathsep.join(first + list(filter(None, [os.environ.get("PYTHONPATH")])))
    return {**os.environ, **({"PYTHONPATH": search} if search else {})}


def hosts() -> list[Result]:
    """Check all hosts; those installed and extended are imported, each in its own process."""
    installed = [host for host in POINTS if is_installed(host)]
    with ThreadPoolExecutor(max(1, min(4, os.cpu_count() or 1))) as pool:
        looked = dict(zip(installed, pool.map(_extended, installed), strict=True))
    results = []
    for host, names in _DISTRIBUTIONS.items():
        if host in looked:
            results += looked[host]
        else:
            version = distribution_version(*names) if is_installed(host) else None
            results.append(Result(SECTION, host, INFO, version or "not installed"))
    return results


def _extended(host: str) -> list[Result]:
    version = distribution_version(*_DISTRIBUTIONS[host])
    report = _look(host)
    if isinstance(report, str):
        return [Result(SECTION, host, FAILED, f"{version or 'version unknown'}, {report}")]
    version = report["version"] or version or "version unknown"
    lines = [
        _point(module, name, state, report["warnings"])
        for module, states in report["points"].items()
        for name, state in states.items()
    ]
    lines += [
        Result(SECTION, module, FAILED, f"cannot be imported: {error}")
        for module, error in report["errors"].items()
    ]
    bad = sum(line.status == FAILED for line in lines)
    held = f"{version}, {len(lines) - bad} of {len(lines)} extension points are active"
    told = [one_line(text) for text in report["warnings"] if not _is_about_a_point(host, text)]
    return [Result(SECTION, host, FAILED if bad else OK, "; ".join([held, *told])), *lines]


def _is_about_a_point(host: str, warning: str) -> bool:
    return any(f" {module}:" in warning for module in POINTS[host])


def _point(module: str, name: str, state: str, warnings: list[str]) -> Result:
    full = f"{module}:{name}"
    if state == HELD:
        return Result(SECTION, full, OK, "extended", part=True)
    about = [one_line(warning) for warning in warnings if f" {module}:" in warning]
    if state == MOVED:
        detail = "does not exist in this version, so the flag cannot work through it"
    else:
        detail = "is not extended: the flag has no effect here"
    return Result(SECTION, full, FAILED, "; ".join([detail, *about]))


def _look(host: str) -> dict[str, Any] | str:
    """Return the output of `host_points`, or a text that says why there is none."""
    try:
        process = subprocess.run(
            [sys.executable, "-m", "torch_fp8_tools.env.host_points", *POINTS[host]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=child_environment(),
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return f"importing it took more than {_LIMIT_S} s"
    try:
        report: dict[str, Any] = json.loads(process.stdout)
    except ValueError:
        last = one_line((process.stderr.strip() or "nothing was printed").splitlines()[-1])
        return f"importing it ended the process with status {process.returncode}: {last}"
    return report
