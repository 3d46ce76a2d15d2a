"""Imports `torch_fp8` so that both implementations of its operators run on CPU tensors.

For processes of their own: import this before anything of `torch_fp8`.
"""

import importlib
import sys

from tests.emulator.place import either_implementation

assert "torch_fp8.ops" not in sys.modules, "import tests.emulator.card_process first"
with either_implementation():
    importlib.import_module("torch_fp8.ops")
steps = importlib.import_module("torch_fp8.optim.step")
"""Where the optimizer asks a device's type."""
