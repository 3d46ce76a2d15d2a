"""`ScalingBuffers`: where a layer keeps the amax histories of delayed scaling.

They are non-persistent buffers, moved with the module and kept out of ``state_dict``.
"""

from typing import Any

import torch
from torch import Tensor, nn

from torch_fp8.config import FP8Config
from torch_fp8.ops.quantize_delayed import EXTRA
from torch_fp8.quantization.recipe import Recipe
from torch_fp8.tensor.dtensor import local

INPUT, WEIGHT, GRAD_OUTPUT = range(3)
BUFFERS = ("fp8_scaling", "fp8_grad_scaling")
"""Buffers of delayed scaling: a row for each operand of a forward, (2, H + 4), and the gradient's;
see `History.of_operand`.

A row holds all there is: torch.compile pays for each tensor that a graph takes.
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
        width = self.fp8_config.amax_history_len + EXTRA
        for name, shape in zip(BUFFERS, ((2, width), (width,)), strict=True):
            empty = torch.empty(shape, dtype=torch.float32, device=self.weight.device)
            self.register_buffer(name, empty, persistent=False)
        self.reset_scaling()

    @property
    def fp8_amax_history(self) -> Tensor:
        """The amaxes of input and weight, (2, H), the newest first."""
        return self.scaling_buffers()[0][:, :-EXTRA]

    @property
    def fp8_grad_amax_history(self) -> Tensor:
        """The amaxes of the gradient, (H,), the newest first."""
        return self.scaling_buffers()[1][:-EXTRA]

    @property
    def fp8_last_scale(self) -> Tensor:
        """The scales that input and weight were cast with last, (2,)."""
        return self.scaling_buffers()[0][:, -EXTRA]

    @property
    def scaling_state(self) -> tuple[Tensor, Tensor]:
        """Delayed scaling's amaxes (3, H), the newest first, and last scales (2,)."""
        amaxes = torch.cat([self.fp8_amax_history, self.fp8_grad_amax_history[None]])
        return amaxes, self.fp8_last_scale.clone()

    def load_scaling_state(self, history: Tensor, last_scale: Tensor) -> None:
        """Go on from what `scaling_state` was."""
        self.reset_scaling()  # progress of no launch, wherever its memory is from
        self.fp8_amax_history.copy_(history[:GRAD_OUTPUT])
        self.fp8_grad_amax_history.copy_(history[GRAD_OUTPUT])
        self.fp8_last_scale.copy_(last_scale)

    def reset_scaling(self) -> None:
        """Empty the histories, of a module on the meta device that was materialised."""
        if "fp8_scaling" in self._buffers:
            for buffer in self.scaling_buffers():
                buffer.zero_()
            self.fp8_last_scale.fill_(1)

    def drop_scaling(self) -> None:
        """Remove what `init_scaling` made."""
        for name in BUFFERS:
            self._buffers.pop(name, None)
            self._non_persistent_buffers_set.discard(name)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # Amaxes follow the device only: Module.to(bfloat16) casts, to_empty leaves garbage.
        kept = {n: b for n, b in self._buffers.items() if n.startswith("fp8_") and b is not None}
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            moved = self._buffers[name]
            if moved is not None and moved is not buffer and not buffer.is_meta:
                self._buffers[name] = buffer.to(moved.device)
        if any(buffer.is_meta for buffer in kept.values()):
            self.reset_scaling()
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        buffers = [self._buffers.get(name) for name in BUFFERS]
        if not self.weight.is_meta and any(b is not None and b.is_meta for b in buffers):
            ScalingBuffers.init_scaling(self)  # the weight was assigned, which left these behind
