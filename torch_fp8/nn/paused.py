"""Pausing FP8 in a layer: it runs in high precision until it is resumed.

A paused layer keeps its class, its buffers and its keys in checkpoints. The modules that produce
its input and gather its weight already check `Float8Layer.runs_fp8`.
"""

from torch import nn

from torch_fp8.nn.linear import Float8Layer


def is_paused(layer: nn.Module) -> bool:
    """Return whether a layer is paused."""
    return isinstance(layer, Float8Layer) and layer.fp8.paused


def pause(layer: Float8Layer) -> None:
    """Run a layer in high precision from now on; a second call has no effect."""
    if not layer.fp8.paused:
        layer.fp8.payloads.forget()
        layer.fp8.paused = True


def resume(layer: nn.Module) -> None:
    """Run a paused layer in FP8 again, with empty histories: it recorded nothing meanwhile."""
    if isinstance(layer, Float8Layer) and layer.fp8.paused:
        layer.fp8.paused = False
        layer.reset_scaling()
