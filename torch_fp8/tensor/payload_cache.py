"""`PayloadCache`: the FP8 payload of one weight, or its scale, for as long as it is valid.

A weight is cast in every forward and once more, transposed, in every backward. Two kinds of weights
can spare that, because what is kept of them cannot be stale:

* A weight in two halves (`torch_fp8.tensor.split_weight`) sees each of its writes by itself: its
  `Halves.version` is another number after every write, whoever wrote.
* Within `torch_fp8.rollout(model)`, and so within ``generate`` of transformers, nobody writes to a
  weight. Any Parameter that a layer has when the scope begins is valid until the scope ends.

Nothing is kept of other weights outside of such a scope (any code may write to a plain Parameter's
memory unseen), nor of those that FSDP2 gathers, which bring a payload of their own.

Between steps of the optimizer the scale is kept, or with ``FP8Config(cache_weights=True)`` the
payload, with ``"both"`` its transpose too. Bytes read and written to quantize an element of a
weight in two halves, with a scale per tensor:

| kept | at the step | per micro-batch |
|---|---|---|
| nothing (plain Parameters, compiled layers, no `model` at conversion) | | 8 |
| scale | 0 | 6: cast by row, and by column in backward |
| payload, +1 byte of memory | 1: the step writes it | 2: it is transposed in backward |
| payload and its transpose, +2 bytes | 2: the step writes both | 0 |

The step writes payloads whose scales belong to the tensor or to 128 x 128 elements, and it has the
weight in registers then (see `torch_fp8.kernels.weight_cast`). Such scales are powers of two where
payloads are kept: from one step to the next they hardly ever change. Others, and weights of odd
sizes, are cast after the step: 2 bytes more.

In evaluation the payload of the first forward serves the next ones, one byte per parameter, unless
``keep_eval_weights=False``. It goes with ``module.train()`` and with the next forward that takes
gradients.

A CUDA graph reads in each replay what it read when it was captured. Outside of a scope it casts the
weight itself. Within one it reads the payload, whose memory then stays: the next scope begins with
casting the weight into it.

A fused expert weight keeps forward's payload between steps, with ``"both"`` that of backward as
well, which has other scales (`PayloadCache.stacked`); in a CUDA graph it keeps nothing.

What is kept is made outside of ``torch.inference_mode()`` also within it, for training goes on with
it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_fp8.kernels.arguments import CastOptions, WeightPayload
from torch_fp8.ops.hardware import is_capturing
from torch_fp8.ops.quantize import QuantizedTensor, quantize_layouts, transposed
from torch_fp8.quantization.payload_shape import SQUARE
from torch_fp8.quantization.recipe import CastSpec
from torch_fp8.tensor.halves import VERSIONS
from torch_fp8.tensor.split_weight import SplitWeight, stored


class PayloadCache:
    """What is kept of one weight. Copies and pickles start empty.

    Args:
        transposed: whether the weight is stored as (K, N) where its layer multiplies by (N, K).
        keeps_evaluation: whether a payload is kept from one evaluation forward to the next.

    Attributes:
        between_steps: what is kept from one step of the optimizer to the next: nothing (None), the
            scale (False), the payload (True), it and its transpose (``"both"``).
        payload: (N, K), quantized along K, for forwards without gradients; None: nothing is kept.
        operand: the payload as the GEMM takes it, laid out by whoever multiplies first.
        quantizer: the input's, likewise.
        captured: the payload whose memory CUDA graphs read; None: there are none.
        scope: the version of weights in the scope that goes on; None: there is none.
    """

    __slots__ = (
        *("__weakref__", "_amax", "_col", "_row", "_scale"),
        *("_scoped_weight", "_version", "between_steps", "captured", "columns", "device_type"),
        *("keeps_evaluation", "operand", "payload", "quantizer", "scope", "transposed"),
    )

    def __init__(self, transposed: bool = False, keeps_evaluation: bool = True) -> None:
        self.transposed, self.keeps_evaluation = transposed, keeps_evaluation
        self.between_steps: bool | str | None = None
        self.scope: int | None = None
        self._scoped_weight: Tensor | None = None
        self.release()

    def release(self) -> None:
        """Free all memory, that of CUDA graphs too, which must not be replayed any more."""
        self.captured: QuantizedTensor | None = None
        self.forget()

    def forget(self) -> None:
        """Free the memory that no CUDA graph reads."""
        self._version: Any = None
        # As the weight is stored, (R, C) quantized along C, and (C, R) quantized along R.
        self._row: QuantizedTensor | None = None
        self._col: QuantizedTensor | None = None
        self._scale: Tensor | None = None
        self._amax: Tensor | None = None
        self.forget_evaluation()

    def forget_evaluation(self) -> None:
        """Free what is kept for forwards without gradients."""
        self.payload: QuantizedTensor | None = None
        self.operand: Any = None
        self.quantizer: Any = None
        self.columns, self.device_type = 0, "cpu"

    def begin_scope(self, weight: Tensor) -> None:
        """Begin a scope in which nobody writes to `weight`."""
        self.scope, self._scoped_weight = next(VERSIONS), weight

    def end_scope(self, keep_graphs: bool) -> None:
        """End it; `keep_graphs` says whether CUDA graphs captured within will be replayed."""
        self.forget_evaluation()
        self.scope = self._scoped_weight = None
        if not keep_graphs:
            self.captured = None

    @property
    def in_scope(self) -> bool:
        """Whether a scope goes on in which nobody writes to the weight."""
        return self.scope is not None

    def version_of(self, weight: Tensor) -> int | None:
        """Return a number that no other value of a weight has; None: nobody can tell."""
        if isinstance(weight, SplitWeight):
            return weight.halves.version
        return self.scope if weight is self._scoped_weight else None

    def training_row(self, weight: SplitWeight, spec: CastSpec) -> QuantizedTensor:
        """The weight (N, K), quantized along K, as kept between steps, or cast now by `spec`."""
        version = self.version_of(weight)
        if version != self._version:
            self.forget()
        row = _layout(self._row, self._col, self.transposed)
        if row is not None:
            return row
        if self.between_steps or self._scale is None:
            with torch.inference_mode(False), torch.no_grad():
                layouts = self._cast(weight, spec, self.between_steps)
            self._keep(version, *layouts)
        else:
            layouts = self._cast(weight, spec, False)
        row = _layout(*layouts, self.transposed)
        assert row is not None
        return row

    def col(self, weight: SplitWeight) -> QuantizedTensor | None:
        """The transposed weight, (K, N), as kept or from the payload; None: it has to be cast."""
        if self._version is None or self.version_of(weight) != self._version:
            return None
        return _layout(self._row, self._col, not self.transposed)

    def stacked(
        self, weight: Tensor, cast: Callable[[], QuantizedTensor], *, dgrad: bool, trains: bool
    ) -> QuantizedTensor:
        """Return the payload of an expert weight (E, R, C): as kept, or cast now.

        Args:
            weight: weight as it is stored.
            cast: makes the payload.
            dgrad: whether backward asks, and not forward.
            trains: whether the forward belongs to training.
        """
        version = self.version_of(weight)
        if version is None or is_capturing(weight.device):
            return cast()
        if not (trains or self.between_steps):
            return self.evaluation_row(version, cast, weight.device)
        if version != self._version or not self.between_steps:
            self.forget()  # before a new payload takes memory
        payload = self._col if dgrad else self._row
        if payload is not None:
            return payload
        if self.between_steps != "both" and (dgrad or not self.between_steps):
            return cast()
        with torch.inference_mode(False), torch.no_grad():
            payload = cast()
        self._row, self._col = (self._row, payload) if dgrad else (payload, self._col)
        self._version = version
        return payload

    def evaluation_row(
        self, version: Any, cast: Callable[[], QuantizedTensor], device: torch.device
    ) -> QuantizedTensor:
        """The payload for a forward without gradients: that of the last one, or cast now.

        Args:
            version: what `version_of` says of the weight; None: nothing is kept.
            cast: makes the payload.
            device: where the weight lies.
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
        if version != self._version:
            self.forget()
        with torch.inference_mode(False), torch.no_grad():
            payload = self._in_captured_memory(cast())
        self._version, self.payload, self.operand = version, payload, None
        self.columns, self.device_type = payload.qdata.shape[1], device.type
        return payload

    def is_current(self, weight: Tensor) -> bool:
        """Whether `payload` is that of the weight now, and not for a CUDA graph of its own."""
        version = self.version_of(weight)
        if self.payload is None or version is None or version != self._version:
            return False
        return not is_capturing(weight.device)

    def _in_captured_memory(self, payload: QuantizedTensor) -> QuantizedTensor:
        """Return a payload in the memory that CUDA graphs read, if there are any."""
        old = self.captured
        if old is None:
            return payload
        if old.qdata.shape != payload.qdata.shape or old.scale.shape != payload.scale.shape:
            self.captured = None  # of another weight
            return payload
        old.qdata.copy_(payload.qdata)
        old.scale.copy_(payload.scale)
        return old

    def _cast(
        self, weight: Tensor, spec: CastSpec, keep: bool | str | None
    ) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
        """The layouts to keep, or without `keep` the one that forward takes."""
        if keep == "both":
            row = col = True
        else:
            # Of a transposed weight the step's kernel writes the layout that it is stored in, and
            # forward turns that around, where both have the same scales.
            col = self.transposed and not (keep and spec.granularity in SQUARE)
            row = not col
        amax = self._amax if self._scale is None else None
        options = CastOptions.of(spec, self._scale, amax, rowwise=row, columnwise=col)
        return quantize_layouts(stored(weight), options)

    def _keep(
        self, version: int | None, row: QuantizedTensor | None, col: QuantizedTensor | None
    ) -> None:
        self._version = version
        self._row, self._col = (row, col) if self.between_steps else (None, None)
        either = col if row is None else row
        assert either is not None
        self._scale = either.scale if either.granularity == "tensorwise" else None

    def to_overwrite(self, spec: CastSpec, new_scale: Tensor) -> WeightPayload | None:
        """The payload's memory, where the optimizer's step can write the next one to it.

        Args:
            spec: format and granularity of the cast.
            new_scale: () float32, for a scale of the tensor.
        """
        row, col = self._row, self._col
        if row is None or row.granularity not in ("tensorwise", "block_128x128"):
            return None
        if col is not None and col.qdata.shape[1] != row.qdata.shape[0]:  # padded: cast it anew
            return None
        assert row.granularity == spec.granularity
        assert spec.power_of_two
        blocks = row.granularity == "block_128x128"
        return WeightPayload(
            row.granularity,
            row.qdata,
            row.scale,
            row.scale if blocks else new_scale,
            None if col is None else col.qdata,
            col.scale if blocks and col is not None else None,
        )

    def refill(
        self,
        weight: Tensor,
        spec: CastSpec,
        amax: Tensor | None = None,
        written: WeightPayload | None = None,
    ) -> None:
        """Keep what the next forward needs of a weight that the optimizer has just written.

        Args:
            weight: as it is stored.
            spec: format and granularity of the cast.
            amax: () float32 of the weight, if the step has it: a scale per tensor then takes no
                read of its own.
            written: the payload, where the step has written it.
        """
        self.forget()
        self._amax = amax if spec.granularity == "tensorwise" else None
        if written is not None:
            self._keep(None, *_layouts(written))
        elif self.between_steps:
            self._keep(None, *self._cast(weight, spec, self.between_steps))
        self._version = self.version_of(weight)

    @property
    def num_layouts(self) -> int:
        """Count the bytes of payload that are kept per element between steps."""
        return 2 if self.between_steps == "both" else int(self.between_steps or 0)

    @property
    def tensors(self) -> list[Tensor]:
        """What the cache holds now, each once."""
        held = [self._row, self._col, self.payload, self.captured]
        held.append(None if self.operand is None else self.operand.operand)
        payloads = [x for x in held if x is not None]
        tensors = [tensor for x in payloads for tensor in (x.qdata, x.scale)]
        if not payloads:
            scale = self._amax if self._scale is None else self._scale
            tensors = [] if scale is None else [scale]
        return list({id(tensor): tensor for tensor in tensors}.values())

    def __reduce__(self) -> Any:
        return PayloadCache, (self.transposed, self.keeps_evaluation)


def keeps_scale(spec: CastSpec) -> bool:
    """Whether the scale alone is worth keeping: it would take a read of its own."""
    return spec.granularity == "tensorwise" and not spec.delayed


def _layout(
    row: QuantizedTensor | None, col: QuantizedTensor | None, flip: bool
) -> QuantizedTensor | None:
    """The one that is asked for, or made of the other; None where the other has other scales."""
    wanted, other = (col, row) if flip else (row, col)
    if wanted is None and other is not None:
        return transposed(other)
    return wanted


def _layouts(written: WeightPayload) -> tuple[QuantizedTensor, QuantizedTensor | None]:
    row = QuantizedTensor(written.qdata, written.new_scale, written.granularity)
    if written.qdata_t is None:
        return row, None
    scale_t = written.new_scale if written.scale_t is None else written.scale_t
    return row, QuantizedTensor(written.qdata_t, scale_t, written.granularity)
