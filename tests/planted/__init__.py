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


def _faults(room: str) -> list[Fault]:
    """Read a room's table: names, right and wrong texts in turn, by file and tests."""
    table = importlib.import_module(f"tests.planted.{room}").FAULTS
    return [
        Fault(name, file, right, wrong, tests)
        for (file, tests), texts in table.items()
        for name, right, wrong in zip(texts[::3], texts[1::3], texts[2::3], strict=True)
    ]


FAULTS = {room: _faults(room) for room in ROOMS}
