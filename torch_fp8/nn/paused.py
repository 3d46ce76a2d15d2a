"""Layers that multiply in high precision for a while, and go on in FP8 afterwards.

A paused layer stays what it is, with its histories and its place in checkpoints: a class in front
of its own says that it does not run in FP8 now. What hands over its input, and what gathers its
weight, asks that already. A layer that was never paused pays nothing for it.
"""

from torch import nn

from torch_fp8.nn.class_swap import add_mixin, remove_mixin
from torch_fp8.nn.linear import Float8Layer


class Paused(nn.Module):
    """The part of a layer that stands in front while it does not run in FP8."""

    runs_fp8 = False

    def drop_scaling(self) -> None:
        """Drop it as the layer does, which is converted anew, or back, and no longer paused."""
        remove_mixin(self, Paused)
        self.drop_scaling()


def is_paused(layer: nn.Module) -> bool:
    """Return whether a layer is paused."""
    return isinstance(layer, Paused)


def pause(layer: Float8Layer) -> None:
    """Run a layer in high precision from now on; a repeated call changes nothing."""
    if is_paused(layer):
        return
    if layer.fp8_payloads is not None:
        layer.fp8_payloads.forget()
    add_mixin(layer, Paused)


def resume(layer: nn.Module) -> None:
    """Run a paused layer in FP8 again, with empty histories: it has seen nothing meanwhile."""
    if not is_paused(layer):
        return
    remove_mixin(layer, Paused)
    if isinstance(layer, Float8Layer):
        layer.reset_scaling()
