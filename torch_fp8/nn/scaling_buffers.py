"""`ScalingBuffers`: where a layer keeps the amax histories of delayed scaling.

They are non-persistent buffers, moved with the module and kept out of ``state_dict``.
"""

from typing import Any

import torch
from torch import Tensor, nn

from torch_fp8.config import FP8Config
from torch_fp8.quantization.recipe import Recipe
from torch_fp8.tensor.dtensor import local

INPUT, WEIGHT, GRAD_OUTPUT = range(3)
BUFFERS = (
    *("fp8_amax_history", "fp8_cast_progress", "fp8_last_scale"),
    *("fp8_grad_amax_history", "fp8_grad_cast_progress"),
)
"""Buffers of delayed scaling, see `History`: a row for each operand of a forward, one for the
gradient.

These are apart, for torch.compile gives backward the values that a tensor had after its own
forward, if both write to it: what another forward has recorded since would be lost.
"""


class ScalingBuffers(nn.Module):
    """The part of a layer that remembers amaxes; nothing unless its recipe is delayed."""

    weight: nn.Parameter
    fp8_recipe: Recipe
    fp8_config: FP8Config

    def scaling_buffers(self) -> tuple[Any, ...]:
        """The tensors named in `BUFFERS`."""
        return tuple(local(getattr(self, name)) for name in BUFFERS)

    def init_scaling(self) -> None:
        """Create the buffers of delayed scaling, if the recipe has them, with empty histories."""
        if not self.fp8_recipe.delayed:
            return
        length, device = self.fp8_config.amax_history_len, self.weight.device
        made = (
            torch.zeros(2, length, device=device),
            torch.zeros(2, 2, dtype=torch.int32, device=device),
            torch.ones(2, device=device),
            torch.zeros(length, device=device),
            torch.zeros(2, dtype=torch.int32, device=device),
        )
        for name, buffer in zip(BUFFERS, made, strict=True):
            self.register_buffer(name, buffer, persistent=False)

    @property
    def scaling_state(self) -> tuple[Tensor, Tensor]:
        """Delayed scaling's amaxes (3, H), the newest first, and last scales (2,)."""
        amaxes, _, last, of_grad, _ = self.scaling_buffers()
        return torch.cat([amaxes, of_grad[None]]), last

    def load_scaling_state(self, history: Tensor, last_scale: Tensor) -> None:
        """Go on from what `scaling_state` was."""
        none = torch.zeros(2, device="cpu")  # progress of no launch, wherever its memory is from
        state = (history[:GRAD_OUTPUT], none, last_scale, history[GRAD_OUTPUT], none)
        for buffer, value in zip(self.scaling_buffers(), state, strict=True):
            buffer.copy_(value)

    def reset_scaling(self) -> None:
        """Empty the histories, of a module on the meta device that was materialised."""
        for name in self._buffers.keys() & set(BUFFERS):
            getattr(self, name).fill_(1 if name == "fp8_last_scale" else 0)

    def drop_scaling(self) -> None:
        """Remove what `init_scaling` made."""
        for name in BUFFERS:
            self._buffers.pop(name, None)
            self._non_persistent_buffers_set.discard(name)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # Module.to(bfloat16) casts every floating buffer; amaxes follow the device only.
        kept = {n: b for n, b in self._buffers.items() if n.startswith("fp8_") and b is not None}
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            moved = self._buffers[name]
            if moved is not None and moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self
