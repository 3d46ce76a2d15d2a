"""Extends Lightning and Accelerate for FP8 when, and only when, they are imported.

torch loads and calls every entry point of the group ``torch.backends`` at the end of ``import
torch``; `load` is one of them. It puts one finder in front of ``sys.meta_path`` that lets the
others find a module and, if it is one of `EXTENSIONS`, calls our function on it once it has run.

An exception here would break ``import torch`` for a whole environment. Hence: standard library
only, nothing is imported before a host is, nothing raises, everything may be called twice. What
cannot be extended stays as it is, with one warning.
"""

import contextlib
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_LIGHTNING = "lightning_fp8._register"
_ACCELERATE = "accelerate_fp8._register"
_CONNECTOR = "trainer.connectors.accelerator_connector"

# Module -> function that extends it. Per host in the order in which their modules are imported:
# where a name is copied by later modules, it is extended in the module that defines it.
EXTENSIONS: dict[str, str] = {
    "lightning.fabric.plugins.precision.precision": f"{_LIGHTNING}:extend_precision_choices",
    "lightning.fabric.connector": f"{_LIGHTNING}:extend_fabric_connector",
    f"lightning.pytorch.{_CONNECTOR}": f"{_LIGHTNING}:extend_trainer_connector",
    "lightning_fabric.plugins.precision.precision": f"{_LIGHTNING}:extend_precision_choices",
    "lightning_fabric.connector": f"{_LIGHTNING}:extend_fabric_connector",
    f"pytorch_lightning.{_CONNECTOR}": f"{_LIGHTNING}:extend_trainer_connector",
    "accelerate.utils.imports": f"{_ACCELERATE}:extend_imports",
    "accelerate.state": f"{_ACCELERATE}:extend_state",
    "accelerate.accelerator": f"{_ACCELERATE}:extend_accelerator",
    "transformers.training_args": f"{_ACCELERATE}:extend_training_args",
    "transformers.trainer": f"{_ACCELERATE}:extend_trainer",
    "trl.models.utils": f"{_ACCELERATE}:extend_trl_models",
}


class ExtensionFinder:
    """The finder. `extensions`: what is to be extended; `pending`: modules met half imported."""

    def __init__(self) -> None:
        self.extensions: dict[str, str] = {}
        self.pending: set[str] = set()
        self._searching: set[str] = set()

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Asked for every module that is not yet imported: one look-up in the common case."""
        if self.pending:
            self.fire_pending()
        if fullname not in self.extensions or fullname in self._searching:
            return None
        self._searching.add(fullname)
        try:
            spec = _find_elsewhere(self, fullname, path, target)
            if spec is not None and not self._extend_after_exec(spec.loader):
                self.pending.add(fullname)
            return spec
        except Exception:  # the import system asks the others itself, and reports what they raise
            return None
        finally:
            self._searching.discard(fullname)

    def _extend_after_exec(self, loader: Any) -> bool:
        """Set `exec_module` on the loader's instance: its type, and so get_source etc., stay."""
        if not hasattr(loader, "__dict__") or not hasattr(loader, "exec_module"):
            return False
        if "exec_module" in vars(loader):  # one loader may serve many modules
            return True
        original: Callable[[ModuleType], None] = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # the loader is stock again
            original(module)
            self.fire(module.__name__, module)

        loader.exec_module = exec_module
        return True

    def add(self, name: str, function: str) -> None:
        """Extend module `name` when it is imported, or now if it is."""
        if name in self.extensions:
            return
        self.extensions[name] = function
        if name in sys.modules:
            self.pending.add(name)

    def fire_pending(self) -> None:
        """Extend those pending modules that have been imported completely by now."""
        for name in self.extensions.copy():
            if name not in self.pending:  # extending another one may have come here before
                continue
            module = sys.modules.get(name)
            half_imported = getattr(getattr(module, "__spec__", None), "_initializing", False)
            if module is not None and not half_imported:
                self.pending.discard(name)
                self.fire(name, module)

    def fire(self, name: str, module: ModuleType) -> None:
        """Extend `module`. A failure is a warning: the host then works as without us."""
        if name not in self.extensions:
            return
        package, _, function = self.extensions[name].partition(":")
        try:
            getattr(import_module(package), function)(module)
        except Exception as error:
            _warn(f"FP8 is not available through {name}: {type(error).__name__}: {error}")


def _find_elsewhere(
    finder: ExtensionFinder, fullname: str, path: Any, target: Any
) -> ModuleSpec | None:
    for other in sys.meta_path:
        find_spec = getattr(other, "find_spec", None)
        if other is not finder and find_spec is not None:
            spec: ModuleSpec | None = find_spec(fullname, path, target)
            if spec is not None:
                return spec
    return None


def _warn(message: str) -> None:
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=3)
    except Exception:  # warnings were made errors
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
        _finder.fire_pending()
    except Exception as error:
        _warn(f"FP8 was not registered: {type(error).__name__}: {error}")
