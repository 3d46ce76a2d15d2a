"""`ScalingBuffers`: what a layer with delayed scaling remembers of the amaxes of its operands.

A cast raises the operand's *slot*, () float32, to the largest magnitude of what it casts. When an
optimizer has made a step, the slots of all layers are pushed into the histories, and the scales of
the next step are made of these (`torch_fp8.nn.delayed_scaling`). Until a layer's first step its
casts take the scales of the tensors at hand.

All of it lies in non-persistent buffers, moved with the module and kept out of ``state_dict``. The
operands are input (0), weight (1) and gradient of the output (2).
"""

from typing import Any

import torch
from torch import Tensor, nn

from torch_fp8.config import FP8Config
from torch_fp8.nn import delayed_scaling
from torch_fp8.quantization.recipe import Recipe
from torch_fp8.quantization.scaling import push_amax
from torch_fp8.tensor.dtensor import local
from torch_fp8.tensor.payload_cache import PayloadCache, is_capturing
from torch_fp8.tensor.scale_source import ScaleSource

INPUT, WEIGHT, GRAD_OUTPUT = range(3)
BUFFERS = ("fp8_amax_history", "fp8_scales", "fp8_amaxes", "fp8_grad_amax")
"""Buffers of delayed scaling: histories (3, H), the newest amax first; scales (3, 4), each four
times, since GEMMs take scales at multiples of 16 bytes, and 0 where they are not known; the slots
of input and weight (2,); the slot of the gradient (1,).

Forward and backward write slots in tensors of their own, as graphs of torch.compile ask for.
"""
_VIEWS = ("_fp8_sources", "_fp8_quantizers")


class ScalingBuffers(nn.Module):
    """The part of a layer that remembers amaxes; nothing unless its recipe is delayed."""

    weight: nn.Parameter
    fp8_recipe: Recipe
    fp8_config: FP8Config
    fp8_payloads: PayloadCache | None = None
    fp8_ready: bool = False
    """Whether the scales are known."""
    fp8_recorded: bool = False
    """Whether an eager forward in training mode has recorded amaxes since an optimizer's step."""

    def scaling_buffers(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The tensors named in `BUFFERS`."""
        history, scales, amaxes, grad_amax = (local(getattr(self, name)) for name in BUFFERS)
        return history, scales, amaxes, grad_amax

    def init_scaling(self) -> None:
        """Create the buffers of delayed scaling, if the recipe has them, with empty histories."""
        if not self.fp8_recipe.delayed:
            return
        shapes = (3, self.fp8_config.amax_history_len), (3, 4), (2,), (1,)
        for name, shape in zip(BUFFERS, shapes, strict=True):
            empty = torch.empty(shape, dtype=torch.float32, device=self.weight.device)
            self.register_buffer(name, empty, persistent=False)
        self.reset_scaling()
        delayed_scaling.track(self)

    def scale_sources(self) -> tuple[ScaleSource, ...]:
        """What knows the scales of the operands, and takes their amaxes, in eager code.

        The slots of input and weight are raised in training mode alone.
        """
        sources = self._sources()
        if self.training:
            return sources[:3]
        return *sources[3:], sources[GRAD_OUTPUT]

    def _sources(self) -> tuple[ScaleSource, ...]:
        """Return the sources of all operands, and those of input and weight in evaluation."""
        sources: tuple[ScaleSource, ...] | None = self.__dict__.get("_fp8_sources")
        if sources is None:
            with torch.inference_mode(False):
                _, scales, amaxes, grad_amax = self.scaling_buffers()
                slots = *amaxes.unbind(), grad_amax[0], None, None
                sources = tuple(ScaleSource(None, slot) for slot in slots)
                self.__dict__["_fp8_sources"] = sources
                if self.fp8_ready:
                    self.take_scales(scales.clone())
        return sources

    def take_scales(self, scales: Tensor) -> None:
        """Cast with other scales from now on.

        Args:
            scales: (3, 4) float32, as in the buffer; nobody writes to it any more.
        """
        own = scales[:, 0].unbind()
        for source, scale in zip(self._sources(), (*own, *own[:2]), strict=True):
            if source.scale is not None and is_capturing(scale.device):
                source.scale.copy_(scale)  # where the casts of a CUDA graph of a whole step read it
            else:
                source.scale = scale
        self.fp8_ready = True
        if self.fp8_payloads is not None:
            self.fp8_payloads.forget_evaluation()

    def forget_scales(self) -> None:
        """Drop what was made of the buffers."""
        for name in _VIEWS:
            self.__dict__.pop(name, None)
        if self.fp8_payloads is not None:
            self.fp8_payloads.forget_evaluation()

    def pushed_history(self) -> Tensor:
        """The histories (3, H) with what was recorded since the last step of an optimizer."""
        history, _, amaxes, grad_amax = self.scaling_buffers()
        recorded = torch.cat([amaxes, grad_amax])
        return push_amax(history, recorded, self.fp8_config.amax_compute_algo)

    @property
    def scaling_state(self) -> tuple[Tensor, Tensor]:
        """Delayed scaling's amaxes (3, H), the newest first; scales of input and weight (2,).

        What was recorded since the last step of an optimizer is among the amaxes.
        """
        history = self.pushed_history()
        return history, delayed_scaling.scales_of(self, history[None])[0, :2]

    def load_scaling_state(self, history: Tensor, last_scale: Tensor) -> None:
        """Go on from what `scaling_state` was; the history suggests the scales."""
        self.reset_scaling()
        self.scaling_buffers()[0].copy_(history)
        if history.any():
            self.fp8_ready = True
            delayed_scaling.restore_scales([self])

    def reset_scaling(self) -> None:
        """Empty the histories, of a module on the meta device that was materialised."""
        if BUFFERS[0] in self._buffers:
            for buffer in self.scaling_buffers():
                buffer.zero_()
            self.fp8_ready = self.fp8_recorded = False
            self.forget_scales()

    def drop_scaling(self) -> None:
        """Remove what `init_scaling` made."""
        self.forget_scales()
        delayed_scaling.untrack(self)
        for name in BUFFERS:
            self._buffers.pop(name, None)
            self._non_persistent_buffers_set.discard(name)
        for name in ("fp8_ready", "fp8_recorded"):
            self.__dict__.pop(name, None)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # Amaxes follow the device only: Module.to(bfloat16) casts, to_empty leaves garbage.
        own = {n: b for n, b in self._buffers.items() if n.startswith("fp8_") and b is not None}
        super()._apply(fn, recurse)
        for name, buffer in own.items():
            moved = self._buffers[name]
            if moved is not None and moved is not buffer and not buffer.is_meta:
                self._buffers[name] = buffer.to(moved.device)
        if own:
            self.forget_scales()
        if any(buffer.is_meta for buffer in own.values()):
            self.reset_scaling()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for name in (*_VIEWS, delayed_scaling.NUMBER):
            self.__dict__.pop(name, None)
        if BUFFERS[0] in self._buffers:
            delayed_scaling.track(self)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        buffers = [self._buffers.get(name) for name in BUFFERS]
        if not self.weight.is_meta and any(b is not None and b.is_meta for b in buffers):
            ScalingBuffers.init_scaling(self)  # the weight was assigned, which left these behind
