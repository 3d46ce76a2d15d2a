"""FP8 training for Hugging Face Accelerate, transformers, TRL and PEFT, with one flag.

With this distribution installed, ``accelerate launch --mixed_precision fp8 script.py`` and
``Accelerator(mixed_precision="fp8")`` run their linear layers through the engine `torch_fp8`;
scripts need not import this package. You can import it for three purposes:

* pass ``accelerate_fp8.FP8Kwargs(FP8Config(...))`` in ``Accelerator(kwargs_handlers=[...])`` to
  choose the configuration in the script;
* ``import accelerate_fp8`` registers the flag if torch's autoload is off
  (``TORCH_DEVICE_BACKEND_AUTOLOAD=0``);
* ``accelerate_fp8.record_routing`` and ``accelerate_fp8.routing_replay`` train with the experts
  that a rollout chose.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import _fp8_autoload

if TYPE_CHECKING:
    from accelerate_fp8.flags import FP8Kwargs
    from accelerate_fp8.routing import (
        RoutingRecord,
        RoutingReplay,
        record_routing,
        routing_replay,
    )
    from torch_fp8 import FP8Config

__all__ = [
    "FP8Config",
    "FP8Kwargs",
    "RoutingRecord",
    "RoutingReplay",
    "record_routing",
    "routing_replay",
]

_fp8_autoload.load("accelerate_fp8")


def __getattr__(name: str) -> Any:
    # Lazily, because this package is imported while Accelerate is only half imported, and in runs
    # without FP8.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    homes = {"FP8Config": "torch_fp8", "FP8Kwargs": "accelerate_fp8.flags"}
    try:
        return getattr(import_module(homes.get(name, "accelerate_fp8.routing")), name)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"accelerate_fp8.{name} needs {error.name}: pip install accelerate"
        ) from error
