"""`KeptWeight`: a weight in FP8 from one forward without gradients to the next.

Generation runs a forward for each token, evaluation one for each batch, and the weight is the same
in all of them: it is cast in the first, and its payload, laid out for the GEMM, is kept, one byte
per parameter. Training does not pay for it: the payload goes with ``module.train()``, at the latest
with the next forward that takes gradients, and the gradients, 2 bytes per parameter at O2, are not
there yet. It is not bounded, for each token reads all weights, and a part of them kept would save a
part of the time; ``FP8Config(keep_eval_weights=False)`` keeps nothing, for a model that is only
evaluated and fills the memory by itself.

A payload is never stale. It is used while the stamp of the weight is what it was
(`torch_fp8.nn.weight_cache.Stamp`: version, uses of ``.data``, collectives and steps, address), and
only while nobody holds the weight's memory beside the Parameter: no view, no array of NumPy, and no
tensor of another library (DLPack), which could write to it unseen. A weight that FSDP2 gathers is
a Parameter that it has made, whose writes are not counted: nothing is kept of it. Nor with delayed
scaling in training mode, where each forward records an amax.

A CUDA graph reads in each replay what it read when it was captured. Outside of a rollout it
therefore casts the weight itself. Within one (`torch_fp8.nn.rollout`) it reads the payload, whose
memory then stays: the next rollout begins with casting the weight into it.

In training mode a forward without gradients may be a part of the model that is frozen, or the first
pass of a reentrant checkpoint: there a payload is made from the second forward in a row on, and
dropped in such a pass.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_fp8.autograd.current_pass import in_reentrant_checkpoint
from torch_fp8.nn.weight_cache import Stamp, WatchedParameter, stamp
from torch_fp8.ops.quantize import QuantizedTensor
from torch_fp8.tensor.split_weight import SplitWeight

_storage_of, _use_count = torch.Tensor.untyped_storage, torch._C._storage_Use_Count
_ALONE = 2
"""References to the memory of a tensor that has it alone: its own, and that of who asks."""


class KeptWeight:
    """The payload of one layer's weight. Copies and pickles start empty.

    Attributes:
        holds: whether anything is remembered.
        payload: (N, K), quantized along K; None: nothing is kept.
        columns, device_type: K, and where it lies.
        training: whether the layer was in training mode.
        operand: the payload as the GEMM takes it, laid out by whoever multiplies first.
        quantizer: of the input, likewise.
        serving: whether a rollout goes on, in which the weight stays what it is.
        captured: the payload whose memory graphs read; None: there are none.
    """

    __slots__ = (
        *("_history", "_recorded", "_seen", "_stamp", "captured", "columns", "device_type"),
        *("holds", "operand", "payload", "quantizer", "serving", "training"),
    )

    def __init__(self) -> None:
        self.serving = False
        self.release()

    def release(self) -> None:
        """Free the memory, that of CUDA graphs, too, which must not be replayed any more."""
        self.captured: QuantizedTensor | None = None
        self.forget()

    def forget(self) -> None:
        """Free the memory that no CUDA graph reads."""
        self.columns, self.device_type, self.training = 0, "cpu", False
        self.holds = False
        self._stamp: Stamp | None = None
        self._seen: Stamp | None = None
        self._history: Tensor | None = None
        self._recorded = 0
        self.payload: QuantizedTensor | None = None
        self.operand: Any = None
        self.quantizer: Any = None

    def is_current(self, weight: Tensor) -> bool:
        """Whether the payload is that of the weight as it is now, and not for a CUDA graph."""
        return self._is_of(weight) and not is_capturing(weight)

    def _is_of(self, weight: Tensor) -> bool:
        if self.payload is None or self._stamp is None:
            return False
        if type(weight) is SplitWeight:
            current = stamp(weight) == self._stamp
            history = self._history
            return current and (history is None or history._version == self._recorded)
        if type(weight) is not WatchedParameter:
            return False
        # As `_stamp(weight)` does, but no further than it is equal: each layer asks for each token.
        # The uses come before the version, which an inference tensor has not: only `.data` can
        # have made the weight one.
        identity, version, uses, address = self._stamp
        if weight.uses != uses or weight.is_lent or id(weight) != identity:
            return False
        if weight._version != version or weight.data_ptr() != address or not _is_alone(weight):
            return False
        return self._history is None or self._history._version == self._recorded

    def row(
        self,
        weight: Tensor,
        cast: Callable[[], QuantizedTensor],
        history: Tensor | None,
        training: bool,
    ) -> QuantizedTensor:
        """The payload of the weight as it is now.

        Args:
            weight: as it is stored.
            cast: makes the payload.
            history: of delayed scaling, whose changes change the scale; None: there is none.
            training: whether the layer is in training mode.
        """
        if is_capturing(weight):
            if not self.serving or self.payload is None or not self._is_of(weight):
                return cast()
            self.captured = self.payload
            return self.payload
        if training and in_reentrant_checkpoint():
            self.forget()
            return cast()
        if self.payload is not None and self._is_of(weight):
            return self.payload
        seen = self._seen
        self.forget()
        if _stamp(weight) is None:
            return cast()
        # Made for whoever comes: not within inference mode.
        with torch.inference_mode(False), torch.no_grad():
            made = self._in_place(cast())
        self.holds = True
        now = _stamp(weight)  # the cast itself has used the weight
        if training and seen != now:
            self._seen = now
            return made
        self._stamp, self._seen, self.payload = now, now, made
        self.columns, self.training = made.qdata.shape[1], training
        self.device_type = weight.device.type
        if history is not None:
            self._history, self._recorded = history, history._version
        return made

    def _in_place(self, made: QuantizedTensor) -> QuantizedTensor:
        """Return a payload in the memory that CUDA graphs read, if there are any."""
        old = self.captured
        if old is None:
            return made
        if old.qdata.shape != made.qdata.shape or old.scale.shape != made.scale.shape:
            self.captured = None  # of another weight
            return made
        old.qdata.copy_(made.qdata)
        old.scale.copy_(made.scale)
        return old

    @property
    def tensors(self) -> list[Tensor]:
        """What is held now."""
        if self.payload is None:
            return [] if self.captured is None else [self.captured.qdata, self.captured.scale]
        kept = [self.payload] if self.operand is None else [self.payload, self.operand.operand]
        return [tensor for x in kept for tensor in (x.qdata, x.scale)]

    def __reduce__(self) -> Any:
        return KeptWeight, ()


def _stamp(weight: Tensor) -> Stamp | None:
    """Return what `stamp_of` does in eager mode; None also where a write could stay unseen."""
    if type(weight) is SplitWeight:
        return stamp(weight)
    if type(weight) is not WatchedParameter or weight.is_lent or weight.is_inference():
        return None
    return stamp(weight) if _is_alone(weight) else None


def _is_alone(weight: Tensor) -> bool:
    """Whether nobody holds the weight's memory beside itself."""
    count: int = _use_count(_storage_of(weight)._cdata)
    return count == _ALONE


def is_capturing(weight: Tensor) -> bool:
    """Whether a CUDA graph is being captured."""
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()
