"""Checks that the precision flag is registered in this interpreter."""

import os
import sys
from importlib import metadata

from torch_fp8.config import ENV_VAR, FP8Config
from torch_fp8.environment.result import FAILED, INFO, OK, Result, last_line

SECTION = "autoload"
VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"
GROUP, MODULE = "torch.backends", "_fp8_autoload"
_EXPLICITLY = "`import lightning_fp8` or `import accelerate_fp8` registers it explicitly"


def autoload() -> list[Result]:
    """Check entry point, the variable that disables it, finder, and ``TORCH_FP8_CONFIG``."""
    return [_entry_point(), _variable(), _finder(), _configuration()]


def _entry_point() -> Result:
    entries = [e for e in metadata.entry_points(group=GROUP) if e.value.startswith(f"{MODULE}:")]
    if entries:
        return Result(
            SECTION, "entry point", OK, f"{GROUP}: {entries[0].name} = {entries[0].value}"
        )
    return Result(
        SECTION,
        "entry point",
        FAILED,
        "torch-fp8 is not installed in this environment, so torch cannot load it: install it with "
        f"pip. Until then {_EXPLICITLY}",
    )


def _variable() -> Result:
    value = os.environ.get(VARIABLE)
    if value is None or value == "1":
        return Result(SECTION, VARIABLE, OK, "not set" if value is None else "1")
    detail = f"{value!r}: torch loads no extension, so the flag has no effect; {_EXPLICITLY}"
    return Result(SECTION, VARIABLE, FAILED, detail)


def _finder() -> Result:
    if any(type(finder).__module__ == MODULE for finder in sys.meta_path):
        return Result(SECTION, "this interpreter", OK, "hosts are extended when they are imported")
    return Result(
        SECTION,
        "this interpreter",
        FAILED,
        "no finder in sys.meta_path: hosts are not extended, so the flag has no effect; "
        f"{_EXPLICITLY}",
    )


def _configuration() -> Result:
    try:
        config = FP8Config.from_env()
    except Exception as error:
        return Result(SECTION, ENV_VAR, FAILED, last_line(error))
    return Result(SECTION, ENV_VAR, INFO, "not set" if config is None else config.to_json())
