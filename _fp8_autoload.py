"""Extends Lightning and Accelerate for FP8 when, and only when, they are imported.

torch calls `load`, an entry point of ``torch.backends``, at the end of ``import torch``. A finder
in front of ``sys.meta_path`` calls our function for each module of `EXTENSIONS` after its import.
An exception here would break ``import torch`` in a whole environment, so this module, like
`_fp8_points`, only uses the standard library, and it raises nothing (a failure is one warning). It
may be called twice.
"""

import contextlib
import os
import sys
import warnings
from importlib import import_module
from typing import Any

from _fp8_points import POINTS

EXTENSIONS = {
    name: f"{'lightning' if 'lightning' in name else 'accelerate'}_fp8._register:extend"
    for name in POINTS
}
"""The function that extends each module; a copied name is extended where it is defined."""


class ExtensionFinder:
    """A finder; `status` of a module is "waiting" (for its import), "extended", or an error."""

    def __init__(self) -> None:
        self.extensions: dict[str, str] = {}
        self.status: dict[str, str] = {}
        self._searching: set[str] = set()

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Look up a module that is being imported: one look-up in the common case."""
        if fullname not in self.extensions or fullname in self._searching:
            return None
        self._searching.add(fullname)
        try:
            others = [f for f in sys.meta_path if f is not self and hasattr(f, "find_spec")]
            spec = next(filter(None, (f.find_spec(fullname, path, target) for f in others)), None)
            if spec is not None:
                self._extend_after_import(spec)
            return spec
        except Exception as error:  # the import system asks them itself, and reports it
            self.status[fullname] = f"{type(error).__name__}: {error}"
            return None
        finally:
            self._searching.discard(fullname)

    def _extend_after_import(self, spec: Any) -> None:
        """Give `spec` a class that notices how the import system sets `_initializing` to False."""
        stock: Any = type(spec)

        def __setattr__(spec: Any, name: str, value: Any) -> None:
            stock.__setattr__(spec, name, value)
            if name == "_initializing" and not value:
                stock.__setattr__(spec, "__class__", stock)
                self.fire(spec.name, sys.modules.get(spec.name))  # None: the import failed

        if not hasattr(spec, "_fp8_watches"):
            body = {"__slots__": (), "__module__": stock.__module__, "_fp8_watches": True}
            spec.__class__ = type(stock.__name__, (stock,), {**body, "__setattr__": __setattr__})

    def add(self, name: str, function: str) -> None:
        """Have `function` extend module `name` when that is imported, after earlier functions."""
        known = self.extensions.get(name, "").split()
        if function not in known:
            self.extensions[name], self.status[name] = " ".join([*known, function]), "waiting"

    def extend_imported(self) -> None:
        """Extend modules that are already imported, or that finish their import later."""
        for name in [name for name, status in self.status.items() if status == "waiting"]:
            module = sys.modules.get(name)
            spec = getattr(module, "__spec__", None)
            if getattr(spec, "_initializing", False):
                self._extend_after_import(spec)
            # An extension may have fired already; another thread may have finished the import.
            if self.status[name] == "waiting" and not getattr(spec, "_initializing", False):
                self.fire(name, module)

    def fire(self, name: str, module: Any) -> None:
        """Extend `module`. A failure is a warning, and the host works as without this package."""
        if name not in self.extensions or module is None:
            return
        self.status[name] = "extended"
        for place in self.extensions[name].split():
            package, _, function = place.partition(":")
            try:
                getattr(import_module(package), function)(module)
            except Exception as error:
                self.status[name] = f"{type(error).__name__}: {error}"
                _warn(f"FP8 is not available through {name}: {self.status[name]}")


def _warn(message: str) -> None:
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=3)
    except Exception:  # warnings are configured as errors
        with contextlib.suppress(Exception):
            sys.stderr.write(f"{message}\n")


_finder = ExtensionFinder()


def load(package: str | None = None) -> None:
    """Register the extensions of `package` (``lightning_fp8`` or ``accelerate_fp8``), or all."""
    try:
        for name, function in EXTENSIONS.items():
            if package is None or function.startswith(f"{package}."):
                _finder.add(name, function)
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
        _finder.extend_imported()
        asking = [v for v in os.environ.items() if v[0].endswith(("PRECISION", "FP8_CONFIG"))]
        if "fp8" in str(asking).lower() and "torch.optim" in sys.modules:
            import_module("_fp8_check").install()  # must not be missing silently
        if os.environ.get("TORCH_FP8_COMPARE") and "torch.optim" in sys.modules:
            import_module("torch_fp8_tools.compare.child").install(_finder)
    except Exception as error:
        _warn(f"FP8 was not registered: {type(error).__name__}: {error}")
