"""Checks of the installed hosts (versions, extended modules) and of the flag's registration.

``python -m torch_fp8_tools.env.hosts MODULE ...`` imports these modules of one host, as a script
would, and prints as JSON what is wrong with each. So a broken host, or one that ends the process,
affects nothing else.
"""

import importlib.util
import json
import os
import site
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import _fp8_autoload
import _fp8_points
import torch_fp8
from torch_fp8._version import distribution_version
from torch_fp8.config import ENV_VAR, FP8Config
from torch_fp8_tools.env.result import FAILED, INFO, OK, Result, last_line, one_line

SECTION = "hosts"
MODULES: dict[str, list[str]] = {}
"""The modules that `lightning_fp8` and `accelerate_fp8` extend, by host."""
for _module in _fp8_autoload.EXTENSIONS:
    MODULES.setdefault(_module.partition(".")[0], []).append(_module)
_DISTRIBUTIONS = {
    **_fp8_points.DISTRIBUTIONS,
    "transformer_engine": ("transformer-engine", "transformer-engine-torch"),
    "torchao": ("torchao",),
}
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
    installed = [host for host in MODULES if is_installed(host)]
    with ThreadPoolExecutor(max(1, min(4, os.cpu_count() or 1))) as pool:
        looked = dict(zip(installed, pool.map(_extended, installed), strict=True))
    results = []
    for host, names in _DISTRIBUTIONS.items():
        version = distribution_version(*names) if is_installed(host) else None
        results += looked.get(host, [Result(SECTION, host, INFO, version or "not installed")])
    return results


def _extended(host: str) -> list[Result]:
    """Return a line for a host, and one for each extended module, from a process of its own."""
    version = distribution_version(*_DISTRIBUTIONS[host]) or "version unknown"
    try:
        process = subprocess.run(
            [sys.executable, "-m", __name__, *MODULES[host]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=child_environment(),
            timeout=_LIMIT_S,
        )
        faults = json.loads(process.stdout)
    except subprocess.TimeoutExpired:
        detail = f"{version}, importing it took more than {_LIMIT_S} s"
        return [Result(SECTION, host, FAILED, detail)]
    except ValueError:
        last = one_line((process.stderr.strip() or "nothing was printed").splitlines()[-1])
        ended = f"importing it ended the process with status {process.returncode}: {last}"
        return [Result(SECTION, host, FAILED, f"{version}, {ended}")]
    lines = [
        Result(SECTION, name, FAILED if fault else OK, fault or "extended", part=not fault)
        for name, fault in faults.items()
    ]
    held = sum(line.status == OK for line in lines)
    detail = f"{version}, {held} of {len(lines)} modules are extended"
    return [Result(SECTION, host, OK if held == len(lines) else FAILED, detail), *lines]


def import_modules(names: list[str]) -> dict[str, str]:
    """Import modules of a host, and return why FP8 does not work through each; empty if it does."""
    faults = {}
    for name in names:
        try:
            importlib.import_module(name)
        except BaseException as error:  # a host may raise anything
            faults[name] = f"cannot be imported: {last_line(error)}"
            continue
        status = _fp8_autoload._finder.status.get(name, "not extended: the flag has no effect here")
        too_old = _fp8_points.refusal(name.partition(".")[0])
        faults[name] = too_old or status.removeprefix("extended")
    return faults


_AUTOLOAD = "autoload"
VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"
GROUP, MODULE = "torch.backends", "_fp8_autoload"
_EXPLICITLY = "`import lightning_fp8` or `import accelerate_fp8` registers it explicitly"


def autoload() -> list[Result]:
    """Check entry point, the variable that disables it, finder, and ``TORCH_FP8_CONFIG``."""
    checks = {
        "entry point": _entry_point,
        VARIABLE: _variable,
        "this interpreter": _finder,
        ENV_VAR: _configuration,
    }
    return [Result(_AUTOLOAD, name, *check()) for name, check in checks.items()]


def _entry_point() -> tuple[str, str]:
    entries = [e for e in metadata.entry_points(group=GROUP) if e.value.startswith(f"{MODULE}:")]
    if entries:
        return OK, f"{GROUP}: {entries[0].name} = {entries[0].value}"
    return FAILED, (
        "torch-fp8 is not installed in this environment, so torch cannot load it: install it with "
        f"pip. Until then {_EXPLICITLY}"
    )


def _variable() -> tuple[str, str]:
    value = os.environ.get(VARIABLE)
    if value is None or value == "1":
        return OK, "not set" if value is None else "1"
    return FAILED, f"{value!r}: torch loads no extension, so the flag has no effect; {_EXPLICITLY}"


def _finder() -> tuple[str, str]:
    if any(type(finder).__module__ == MODULE for finder in sys.meta_path):
        return OK, "hosts are extended when they are imported"
    return FAILED, (
        "no finder in sys.meta_path: hosts are not extended, so the flag has no effect; "
        f"{_EXPLICITLY}"
    )


def _configuration() -> tuple[str, str]:
    try:
        config = FP8Config.from_env()
    except Exception as error:
        return FAILED, last_line(error)
    return INFO, "not set" if config is None else config.to_json()


if __name__ == "__main__":
    output, sys.stdout = sys.stdout, sys.stderr  # keep hosts' prints off stdout
    json.dump(import_modules(sys.argv[1:]), output)
