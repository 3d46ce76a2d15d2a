"""Checks that the precision flag is registered in this interpreter."""

import os
import sys
from importlib import metadata

from torch_fp8.config import ENV_VAR, FP8Config
from torch_fp8_tools.env.result import FAILED, INFO, OK, Result, last_line

SECTION = "autoload"
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
    return [Result(SECTION, name, *check()) for name, check in checks.items()]


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
