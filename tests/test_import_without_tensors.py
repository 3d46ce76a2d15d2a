"""No module makes a tensor while it loads: it would be on the user's default device and dtype.

A module that is imported late loads inside whatever surrounds its first use: the
``torch.device("meta")`` of an empty initialization, another default dtype, or inference mode.
"""

from pathlib import Path

import pytest

from tests.processes import ran

ROOT = Path(__file__).parent.parent

SCRIPT = """
import importlib, pkgutil, sys
import torch
from torch.overrides import TorchFunctionMode


class Refused(TorchFunctionMode):
    '''Refuses a tensor that one of our modules makes on the default device while it loads.'''

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        frame = sys._getframe()
        while frame is not None and frame.f_code.co_name != "<module>":
            frame = frame.f_back
        name = "" if frame is None else frame.f_globals.get("__name__", "")
        ours = name.split(".")[0] in PACKAGES
        if ours and isinstance(result, torch.Tensor) and result.is_meta:
            raise AssertionError(f"{name}:{frame.f_lineno} makes a tensor while it loads")
        return result


PACKAGES = sys.argv[1:]
count = 0
with torch.device("meta"), Refused():
    for package in PACKAGES:
        names = [package]
        folder = getattr(importlib.import_module(package), "__path__", None)
        for found in pkgutil.walk_packages(folder, package + "."):
            if not found.name.endswith("__main__"):
                importlib.import_module(found.name)
                count += 1
print(count)
"""


def _imported(python, *packages, code=SCRIPT, cwd=None):
    return int(ran(python, "-c", code, *packages, cwd=cwd).stdout.split()[-1])


@pytest.mark.parametrize(
    "package", ["torch_fp8", "torch_fp8_tools", "lightning_fp8", "accelerate_fp8"]
)
def test_no_module_makes_a_tensor_while_it_loads(forked_python, package):
    modules = [p for p in (ROOT / package).rglob("*.py") if p.stem not in ("__main__", "__init__")]
    assert _imported(forked_python, package) >= len(modules)
