"""FP8 training for Hugging Face Accelerate, transformers, TRL and PEFT, with one flag.

With this distribution installed, ``accelerate launch --mixed_precision fp8 script.py`` and
``Accelerator(mixed_precision="fp8")`` run their linear layers through the engine `torch_fp8`;
scripts need not import this package. You can import it for two purposes:

* pass ``accelerate_fp8.FP8Kwargs(FP8Config(...))`` in ``Accelerator(kwargs_handlers=[...])`` to
  choose the configuration in the script;
* ``import accelerate_fp8`` registers the flag if torch's autoload is off
  (``TORCH_DEVICE_BACKEND_AUTOLOAD=0``).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import _fp8_autoload

if TYPE_CHECKING:
    from accelerate_fp8.flags import FP8Kwargs
    from torch_fp8 import FP8Config

__all__ = ["FP8Config", "FP8Kwargs"]
_REMOVED = ("RoutingRecord", "RoutingReplay", "record_routing", "routing_replay")
"""Names that were public, which `torch_fp8` refuses with the reason."""

_fp8_autoload.load("accelerate_fp8")


def __getattr__(name: str) -> Any:
    # Lazily, because this package is imported while Accelerate is only half imported, and in runs
    # without FP8.
    if name not in (*__all__, *_REMOVED):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = f"{__name__}.flags" if name == "FP8Kwargs" else "torch_fp8"
    try:
        return getattr(import_module(home), name)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"accelerate_fp8.{name} needs {error.name}: pip install accelerate"
        ) from error
