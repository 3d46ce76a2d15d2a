"""The command ``torch-fp8``, and what only it uses. The engine `torch_fp8` imports nothing of it.

`env` describes and tests a machine, `plan` estimates a run, `check` proposes a recipe for each
layer, `report` draws what the monitor measured, and `commands` are those for files.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_fp8_tools.comm_counter import CommunicationCount, count_communication

__all__ = ["CommunicationCount", "count_communication"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    return getattr(importlib.import_module("torch_fp8_tools.comm_counter"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
