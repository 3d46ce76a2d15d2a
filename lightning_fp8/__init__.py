"""FP8 for Lightning: ``precision="fp8-mixed"`` in Trainer and Fabric, and the plugin behind it.

If torch's autoload of extensions is on, the flag works without any import. If it is off, import
this package, before or after Lightning, to register the flag.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import _fp8_autoload

if TYPE_CHECKING:
    from lightning_fp8.fsdp import FP8FSDPStrategy
    from lightning_fp8.precision import FP8Precision
    from torch_fp8 import FP8Config

__all__ = ["FP8Config", "FP8FSDPStrategy", "FP8Precision"]

_fp8_autoload.load("lightning_fp8")


def __getattr__(name: str) -> Any:
    # Lazily, because Lightning's import also imports this module in runs without FP8.
    if name == "FP8Monitor":
        raise ImportError(
            "lightning_fp8.FP8Monitor was removed: use plugins=[FP8Precision(monitor=100)] or "
            "TORCH_FP8_CONFIG='{\"monitor\": 100}'"
        )
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    homes = {"FP8Config": "torch_fp8", "FP8FSDPStrategy": "lightning_fp8.fsdp"}
    module = import_module(homes.get(name, "lightning_fp8.precision"))
    if name == "FP8FSDPStrategy":
        module.register_as_strategy()
    return getattr(module, name)
