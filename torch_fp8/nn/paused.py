"""Layers that multiply in high precision for a while, and go on in FP8 afterwards.

A paused layer stays what it is, with its histories and its place in checkpoints. What hands over
its input, and what gathers its weight, asks `Float8Layer.runs_fp8` already.
"""

from torch import nn

from torch_fp8.nn.linear import Float8Layer


def is_paused(layer: nn.Module) -> bool:
    """Return whether a layer is paused."""
    return isinstance(layer, Float8Layer) and layer.fp8.paused


def pause(layer: Float8Layer) -> None:
    """Run a layer in high precision from now on; a repeated call changes nothing."""
    if not layer.fp8.paused:
        layer.fp8.payloads.forget()
        layer.fp8.paused = True


def resume(layer: nn.Module) -> None:
    """Run a paused layer in FP8 again, with empty histories: it has seen nothing meanwhile."""
    if isinstance(layer, Float8Layer) and layer.fp8.paused:
        layer.fp8.paused = False
        layer.reset_scaling()
