"""`PayloadCache`: the FP8 payload of one weight between forwards without gradients.

Without gradients, later forwards reuse the payload of the first one, at one byte per parameter,
unless ``keep_eval_weights=False``. ``module.train()`` and the next forward with gradients free it.
It cannot be out of date in two cases:

* A weight in two halves (`torch_fp8.tensor.split_weight`) notices all writes: each one renews its
  `Halves.version`. What such a weight keeps for training is in its `Halves`, too, and serves here.
* Within `torch_fp8.rollout(model)`, and so within transformers' ``generate``, nothing writes to a
  weight. The Parameters that a layer has on entry stay valid until the scope ends.

Outside such a scope, other weights are not cached, because any code may write to a plain Parameter
unnoticed. A weight in memory that processes share is never cached, because another process may
write to it at any time. Weights that FSDP2 gathers have their own payload.

A CUDA graph reads the same memory in each replay. Outside a scope it casts the weight itself.
Inside a scope it reads the payload, whose memory is then kept; the next scope casts the weight into
it on entry.

Cached tensors are made outside ``torch.inference_mode()``, even when that is active, because
training uses them later.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_fp8.ops.hardware import is_capturing
from torch_fp8.ops.quantize import QuantizedTensor
from torch_fp8.tensor.base import in_shared_memory
from torch_fp8.tensor.halves import VERSIONS
from torch_fp8.tensor.split_weight import SplitWeight, stored


class PayloadCache:
    """The cache of one weight. Copies and pickles start empty.

    Args:
        keeps_evaluation: whether evaluation forwards reuse a payload.

    Attributes:
        payload: (N, K), quantized along K, for forwards without gradients, or None if not cached.
        operand: payload in the GEMM's layout, set by the first forward that multiplies.
        quantizer: quantizer of the input, set in the same way.
        captured: payload whose memory CUDA graphs read, or None if there are no graphs.
        scope: version number of the weight in the active scope, or None if no scope is active.
    """

    def __init__(self, keeps_evaluation: bool = True, *later: bool) -> None:
        # Pickles of 0.1.0 have another argument in front.
        self.keeps_evaluation = later[-1] if later else keeps_evaluation
        self.scope: int | None = None
        self._scoped_weight: Tensor | None = None
        self.release()

    def release(self) -> None:
        """Free all memory, including that of CUDA graphs, which must not be replayed afterwards."""
        self.captured: QuantizedTensor | None = None
        self.forget()

    def forget(self) -> None:
        """Free the memory that no CUDA graph reads."""
        self._version: Any = None
        self.payload: QuantizedTensor | None = None
        self.operand: Any = None
        self.quantizer: Any = None
        self.columns, self.device_type = 0, "cpu"

    def begin_scope(self, weight: Tensor) -> None:
        """Begin a scope in which nothing writes to `weight`."""
        self.scope, self._scoped_weight = next(VERSIONS), weight

    def end_scope(self, keep_graphs: bool) -> None:
        """End the scope; `keep_graphs` if CUDA graphs captured inside will be replayed."""
        self.forget()
        self.scope = self._scoped_weight = None
        if not keep_graphs:
            self.captured = None

    @property
    def in_scope(self) -> bool:
        """Whether a scope without writes to the weight is active."""
        return self.scope is not None

    def version_of(self, weight: Tensor) -> int | None:
        """Return a number unique to the weight's value, or None if changes are not detected."""
        scope = self.scope if weight is self._scoped_weight else None
        version = weight.halves.version if isinstance(weight, SplitWeight) else scope
        return None if version is None or in_shared_memory(stored(weight)) else version

    def evaluation_row(
        self, version: Any, cast: Callable[[], QuantizedTensor], device: torch.device
    ) -> QuantizedTensor:
        """Return the payload for a forward without gradients: cached, or cast now.

        Args:
            version: result of `version_of` for the weight, or None to cache nothing.
            cast: function that makes the payload.
            device: device of the weight.
        """
        capturing = is_capturing(device)
        if version is None or (capturing and not self.in_scope):
            return cast()
        if self.payload is not None and version == self._version:
            if capturing:
                self.captured = self.payload
            return self.payload
        if capturing or not self.keeps_evaluation:
            return cast()
        self.forget()
        with torch.inference_mode(False), torch.no_grad():
            payload = self._in_captured_memory(cast())
        self._version, self.payload, self.operand = version, payload, None
        self.columns, self.device_type = payload.qdata.shape[1], device.type
        return payload

    def is_current(self, weight: Tensor) -> bool:
        """Return whether `payload` is valid for the weight's current value; False in a capture."""
        version = self.version_of(weight)
        if self.payload is None or version is None or version != self._version:
            return False
        return not is_capturing(weight.device)

    def _in_captured_memory(self, payload: QuantizedTensor) -> QuantizedTensor:
        """Copy a payload into the memory that CUDA graphs read, if there are any, and return it."""
        old = self.captured
        if old is None:
            return payload
        if old.qdata.shape != payload.qdata.shape or old.scale.shape != payload.scale.shape:
            self.captured = None  # it belongs to a weight of another shape
            return payload
        old.qdata.copy_(payload.qdata)
        old.scale.copy_(payload.scale)
        return old

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors in the cache now, each once."""
        payloads = self.payload, self.captured, getattr(self.operand, "operand", None)
        tensors = [tensor for x in payloads if x is not None for tensor in (x.qdata, x.scale)]
        return list({id(tensor): tensor for tensor in tensors}.values())

    def __reduce__(self) -> Any:
        return PayloadCache, (self.keeps_evaluation,)
