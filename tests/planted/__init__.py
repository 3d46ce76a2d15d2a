"""Mistakes that the tests have to notice, by room; ``python -m tests.planted`` plants them."""

import importlib

from tests.planted.fault import Fault

ROOMS = (
    "quantization",
    "ops",
    "kernels",
    "tensor",
    "nn",
    "output_layer",
    "loss_head",
    "optim",
    "distributed",
    "conversion",
    "checkpoint",
    "monitor",
    "hosts",
    "tools",
    "compare",
)
FAULTS: dict[str, list[Fault]] = {
    room: importlib.import_module(f"tests.planted.{room}").FAULTS for room in ROOMS
}
