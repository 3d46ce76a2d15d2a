"""`PayloadCache`: the FP8 payload of one weight, or its scale, while it is valid.

Without a cache, every forward casts the weight, and every backward casts it again, transposed. A
cached payload cannot be out of date in two cases:

* A weight in two halves (`torch_fp8.tensor.split_weight`) notices all writes: each one renews its
  `Halves.version`.
* Within `torch_fp8.rollout(model)`, and so within transformers' ``generate``, nothing writes to a
  weight. The Parameters that a layer has on entry stay valid until the scope ends.

Outside such a scope, other weights are not cached, because any code may write to a plain Parameter
unnoticed. Nothing is cached of a weight in memory that processes share, because another process may
write to it at any time. Weights that FSDP2 gathers have their own payload.

Between optimizer steps a weight in two halves keeps its amax (`Halves.amax`), which a graph of
torch.compile takes as an input; with ``FP8Config(cache_weights=True)`` the cache keeps the payload,
with ``"both"`` its transpose, too. Bytes read and written to quantize an element of such a weight,
with a scale per tensor:

| kept | at the step | per micro-batch |
|---|---|---|
| nothing (plain Parameters, no `model` at conversion) | | 8 |
| amax (all compiled layers) | 0 | 6: cast by row, and by column in backward |
| payload, +1 byte of memory | 1: the step writes it | 2: it is transposed in backward |
| payload and its transpose, +2 bytes | 2: the step writes both | 0 |

The step itself writes payloads with a scale per tensor or per 128 x 128 elements, while it has the
weight in registers (`torch_fp8.kernels.weight_cast`). Such scales are powers of two if payloads are
cached, so that they rarely change from step to step. Other payloads, and weights of odd sizes, are
cast after the step, for 2 more bytes.

In evaluation, later forwards reuse the payload of the first one, at one byte per parameter, unless
``keep_eval_weights=False``. ``module.train()`` and the next forward with gradients free it.

A CUDA graph reads the same memory in each replay. Outside a scope it casts the weight itself.
Inside a scope it reads the payload, whose memory is then kept; the next scope casts the weight into
it on entry.

The cache of a fused expert weight keeps forward's payload between steps, with ``"both"`` also that
of backward, which has other scales (`PayloadCache.stacked`). It keeps nothing for CUDA graphs.

Cached tensors are made outside ``torch.inference_mode()``, even when that is active, because
training uses them later.
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
from torch_fp8.tensor.shared_parts import in_shared_memory
from torch_fp8.tensor.split_weight import SplitWeight, stored


class PayloadCache:
    """The cache of one weight. Copies and pickles start empty.

    Args:
        transposed: whether the weight is stored as (K, N), while its layer multiplies by (N, K).
        keeps_evaluation: whether evaluation forwards reuse a payload.

    Attributes:
        between_steps: cached parts between optimizer steps: nothing (False), the payload (True), or
            payload and transpose (``"both"``).
        payload: (N, K), quantized along K, for forwards without gradients; None: not cached.
        operand: payload in the GEMM's layout, set by the first forward that multiplies.
        quantizer: quantizer of the input, set in the same way.
        captured: payload whose memory CUDA graphs read; None: there are no graphs.
        scope: version number of the weight in the active scope; None: no scope is active.
    """

    def __init__(self, transposed: bool = False, keeps_evaluation: bool = True) -> None:
        self.transposed, self.keeps_evaluation = transposed, keeps_evaluation
        self.between_steps: bool | str = False
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
        # The stored weight (R, C) quantized along C, and its transpose (C, R) quantized along R.
        self._row: QuantizedTensor | None = None
        self._col: QuantizedTensor | None = None
        self.forget_evaluation()

    def forget_evaluation(self) -> None:
        """Free the payload for forwards without gradients."""
        self.payload: QuantizedTensor | None = None
        self.operand: Any = None
        self.quantizer: Any = None
        self.columns, self.device_type = 0, "cpu"

    def begin_scope(self, weight: Tensor) -> None:
        """Begin a scope in which nothing writes to `weight`."""
        self.scope, self._scoped_weight = next(VERSIONS), weight

    def end_scope(self, keep_graphs: bool) -> None:
        """End the scope; `keep_graphs`: whether CUDA graphs captured inside will be replayed."""
        self.forget_evaluation()
        self.scope = self._scoped_weight = None
        if not keep_graphs:
            self.captured = None

    @property
    def in_scope(self) -> bool:
        """Whether a scope without writes to the weight is active."""
        return self.scope is not None

    def version_of(self, weight: Tensor) -> int | None:
        """Return a number unique to the weight's current value; None: changes
        cannot be detected.
        """
        if isinstance(weight, SplitWeight):
            version: int | None = weight.halves.version
        else:
            version = self.scope if weight is self._scoped_weight else None
        return None if version is None or in_shared_memory(stored(weight)) else version

    def training_row(self, weight: SplitWeight, spec: CastSpec) -> QuantizedTensor:
        """Return the weight (N, K), quantized along K: cached between steps, or cast now."""
        version = self.version_of(weight)
        if version is None or version != self._version:
            self.forget()
        row = _layout(self._row, self._col, self.transposed)
        if row is not None:
            return row
        if version is None:
            layouts = self._cast(weight, spec, False)
        else:
            with torch.inference_mode(False), torch.no_grad():
                layouts = self._cast(weight, spec, self.between_steps)
            self._keep(version, *layouts)
        row = _layout(*layouts, self.transposed)
        assert row is not None
        return row

    def col(self, weight: SplitWeight) -> QuantizedTensor | None:
        """Return the cached transpose (K, N), or that of the cached payload; None: cast it."""
        if self._version is None or self.version_of(weight) != self._version:
            return None
        return _layout(self._row, self._col, not self.transposed)

    def stacked(
        self, weight: Tensor, cast: Callable[[], QuantizedTensor], *, dgrad: bool, trains: bool
    ) -> QuantizedTensor:
        """Return the payload of an expert weight (E, R, C): cached, or cast now.

        Args:
            weight: weight in its stored layout.
            cast: function that makes the payload.
            dgrad: whether this is for backward.
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
        """Return the payload for a forward without gradients: cached, or cast now.

        Args:
            version: result of `version_of` for the weight; None: do not cache.
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
        if version != self._version:
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

    def _cast(
        self, weight: SplitWeight, spec: CastSpec, keep: bool | str
    ) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
        """Return the layouts to cache, or without `keep` the one that forward reads."""
        if keep == "both":
            row = col = True
        else:
            # For a transposed weight, the step's kernel writes the stored layout, and forward
            # transposes that if both layouts have the same scales.
            col = self.transposed and not (keep and spec.granularity in SQUARE)
            row = not col
        return cast_weight(weight, spec, rowwise=row, columnwise=col)

    def _keep(
        self, version: int | None, row: QuantizedTensor | None, col: QuantizedTensor | None
    ) -> None:
        self._version, self._row, self._col = version, row, col

    def to_overwrite(self, spec: CastSpec, new_scale: Tensor) -> WeightPayload | None:
        """Return the payload's memory for the optimizer's step to overwrite; None: cast later.

        Args:
            spec: format and granularity of the cast.
            new_scale: () float32, memory for a tensorwise scale.
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
        weight: SplitWeight,
        spec: CastSpec,
        written: WeightPayload | None = None,
    ) -> None:
        """Cache what the next forward needs of a weight that the optimizer has just written.

        Args:
            weight: weight in its stored layout.
            spec: format and granularity of the cast.
            written: payload, if the step wrote it; or None.
        """
        self.forget()
        version = self.version_of(weight)
        if version is None:
            return
        if written is not None:
            self._keep(version, *_layouts(written))
        elif self.between_steps:
            self._keep(version, *self._cast(weight, spec, self.between_steps))

    @property
    def num_layouts(self) -> int:
        """Number of payload bytes per element that are cached between steps: 0, 1 or 2."""
        return 2 if self.between_steps == "both" else int(self.between_steps or 0)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors in the cache now, each once."""
        held = [self._row, self._col, self.payload, self.captured]
        held.append(None if self.operand is None else self.operand.operand)
        payloads = [x for x in held if x is not None]
        tensors = [tensor for x in payloads for tensor in (x.qdata, x.scale)]
        return list({id(tensor): tensor for tensor in tensors}.values())

    def __reduce__(self) -> Any:
        return PayloadCache, (self.transposed, self.keeps_evaluation)


def keeps_amax(spec: CastSpec) -> bool:
    """Return whether keeping the amax pays: computing it takes a separate read."""
    return spec.granularity == "tensorwise" and not spec.delayed


def cast_weight(
    weight: SplitWeight, spec: CastSpec, *, rowwise: bool, columnwise: bool
) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
    """Cast a weight in its stored layout, with a scale from the amax that it keeps, if it does."""
    amax = weight.halves.current_amax() if keeps_amax(spec) else None
    options = CastOptions.of(spec, None, amax, rowwise=rowwise, columnwise=columnwise)
    return quantize_layouts(weight.halves.high, options)


def _layout(
    row: QuantizedTensor | None, col: QuantizedTensor | None, flip: bool
) -> QuantizedTensor | None:
    """Return one layout, or transpose the other; None: neither exists, or scales differ."""
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
