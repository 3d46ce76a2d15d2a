"""Counts GEMMs in a process that knows nothing of it: FP8 (scaled_mm) and plain ones (linear).

Python imports ``sitecustomize`` at start-up when its folder is on PYTHONPATH. At exit a process
that imported torch writes ``$FP8_PROBE_OUT/<pid>.json``.
"""

import atexit
import importlib.machinery
import json
import os
import sys
from multiprocessing import util

_counts = {"scaled_mm": 0, "linear": 0}


class _WrapFunctional:
    """Wraps ``scaled_mm`` and ``linear`` of torch.nn.functional as soon as it is imported."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != "torch.nn.functional":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            _wrap(module)

        spec.loader.exec_module = exec_module
        return spec


def _wrap(module):
    for name in _counts:
        setattr(module, name, _counting(name, getattr(module, name)))
    torch = module.torch
    if hasattr(torch, "_scaled_mm_v2"):  # which a card calls without the function before it
        torch._scaled_mm_v2 = _counting("scaled_mm", torch._scaled_mm_v2, "torch_fp8")
    if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU"):
        torch._scaled_mm = _counting("scaled_mm", torch._scaled_mm, "torch_fp8")  # torch 2.11


def _counting(name, function, caller=""):
    def counted(*args, **kwargs):
        _counts[name] += sys._getframe(1).f_globals["__name__"].startswith(caller)
        return function(*args, **kwargs)

    counted.__wrapped__ = function
    return counted


def _write():
    if "torch" in sys.modules:
        path = os.path.join(os.environ["FP8_PROBE_OUT"], f"{os.getpid()}.json")
        # Renamed when it is whole: a process that its launcher kills leaves nothing half written.
        with open(f"{path}.partial", "w") as file:
            json.dump({**_counts, "argv": sys.argv}, file)
        os.replace(f"{path}.partial", path)


def _count_in_fork(_):
    _counts.update(dict.fromkeys(_counts, 0))
    util.Finalize(None, _write, exitpriority=0)


if os.environ.get("FP8_PROBE_OUT"):
    if "torch.nn.functional" in sys.modules:  # the fork of a process that had imported it
        _wrap(sys.modules["torch.nn.functional"])
    else:
        sys.meta_path.insert(0, _WrapFunctional())
    atexit.register(_write)
    # A forked worker of multiprocessing leaves through os._exit, past atexit, but runs finalizers.
    util.register_after_fork(_WrapFunctional, _count_in_fork)
