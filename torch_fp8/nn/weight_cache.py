"""What is kept of a weight from one optimizer step to the next: its scale, or its FP8 payload.

A weight is cast in every forward and once more, transposed, in every backward. With a scale for the
tensor each cast would need a read for the amax; but the kernels of the optimizer's step find the
largest new weight on their way, and until the next step it stays what it is. With
``FP8Config(cache_weights=True)`` the payload is kept, too, with ``"both"`` also its transpose.
Bytes read and written to quantize a BF16 weight, for each element, with a scale per tensor:

| kept | at the step | per micro-batch |
|---|---|---|
| nothing (O1, the user's own optimizer, compiled layers, no `model` at conversion) | | 8 |
| scale | 0 | 6: cast by row, and by column in backward |
| payload, +1 byte of memory | 1: the step writes it | 2: it is transposed in backward |
| payload and its transpose, +2 bytes | 2: the step writes both | 0 |

The step writes payloads whose scales belong to the tensor or to 128 x 128 elements, and it has the
weight in registers then (see `torch_fp8.kernels.weight_cast`). Such scales are powers of
two where payloads are kept, tensorwise ones too: from one step to the next they hardly ever change.
Others, and weights of odd sizes, are cast after the step: 2 bytes more.

Nothing kept must ever be stale, and a weight can be written in four ways:

* in place, by an optimizer, a loader, ``p.copy_()`` or through ``p.detach()``: that moves
  ``p._version``;
* by an optimizer whose kernels write past torch: of the operators of torch 2.13 that write lists
  of tensors, ``_fused_adam_``, ``_fused_adamw_``, ``_fused_sgd_`` and ``_fused_adagrad_`` move no
  version, and other libraries' optimizers are like them. Hence the ``step()`` of each optimizer
  counts as a use of its weights (`count_step`);
* by ``p.data = x``, and through ``p.data`` (EMA, merging of adapters), which moves nothing; nor do
  ``broadcast``, ``all_reduce`` and ``scatter`` into p, with torch 2.11 and 2.13; nor does whoever
  has its memory from ``p.detach()`` (NumPy, DLPack) or ``p.untyped_storage()``. Hence the
  Parameter's class is swapped for one that counts each use of these, be it for reading:
  `WatchedParameter`;
* by another Parameter in its place (``load_state_dict(assign=True)``, sharding): that one has not
  the class, and is not cached.

Not seen is who has taken the memory before and writes to it past torch later: an array of NumPy or
a storage that is kept from step to step, ``p.data_ptr()``, a collective into a view ``p.view(-1)``;
nor are ``reduce`` and a blocking ``recv`` into p, nor ``torch._fused_adamw_`` without its
optimizer. Such code says so itself, with torch's
``torch.autograd.graph.increment_version(p)``. To compare the weight with a sample of it would see
them, too, but the host must not wait for the answer, and on the device it takes two launches for
each forward where the scale that is kept saves a read of 2 bytes an element.

What is kept is made outside of ``torch.inference_mode()`` also within it, for training goes on with
it.
"""

import functools
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from torch_fp8.kernels.arguments import CastOptions, WeightPayload
from torch_fp8.ops.quantize import QuantizedTensor, quantize_layouts, transposed
from torch_fp8.quantization.payload_shape import SQUARE
from torch_fp8.quantization.recipe import CastSpec
from torch_fp8.tensor.split_weight import SplitWeight, stored

_CHECKPOINTS = "torch.utils.checkpoint"


class WatchedParameter(nn.Parameter):
    """A Parameter that counts the uses of its ``.data`` and of what else can lead to its memory.

    Collectives show by the question that they ask of each tensor, whether it is complex.
    """

    uses: int = 0
    is_lent: bool = False
    """Whether an array of NumPy or another library's tensor may write to the memory at any time."""

    @property
    def data(self) -> Tensor:
        self.uses += 1
        plain: Tensor = torch.Tensor.data.__get__(self)
        return plain

    @data.setter
    def data(self, value: Tensor) -> None:
        self.uses += 1
        torch.Tensor.data.__set__(self, value)

    def detach(self) -> Tensor:
        # What a checkpoint saves of a weight while it repeats a forward is only read.
        if sys._getframe(1).f_globals.get("__name__") != _CHECKPOINTS:
            self.uses += 1
        return super().detach()

    def untyped_storage(self) -> torch.UntypedStorage:
        self.uses += 1
        return super().untyped_storage()

    def is_complex(self) -> bool:
        self.uses += 1
        return super().is_complex()

    def numpy(self, **options: Any) -> Any:
        self.is_lent = True
        return super().numpy(**options)

    def __array__(self, *args: Any) -> Any:
        self.is_lent = True
        return super().__array__(*args)

    def __dlpack__(self, **options: Any) -> Any:
        self.is_lent = True
        return super().__dlpack__(**options)


Stamp = tuple[int, int, int, int]
"""What any write that can be seen changes: a tensor's id, version, uses and address."""


class WeightCache:
    """The scale or the payload of one module's weight. Copies and pickles start empty.

    Args:
        payload: whether to keep the payload; ``"both"``: and its transpose.
        transposed: whether the weight is stored as (K, N) where its layer multiplies by (N, K).
    """

    def __init__(self, payload: bool | str = True, transposed: bool = False) -> None:
        self.keeps_payload, self.transposed = payload, transposed
        self._forget()

    def _forget(self) -> None:
        self._stamp: Stamp | None = None
        # As the weight is stored, (R, C) quantized along C, and (C, R) quantized along R.
        self._row: QuantizedTensor | None = None
        self._col: QuantizedTensor | None = None
        self._scale: Tensor | None = None
        self._amax: Tensor | None = None

    @property
    def num_layouts(self) -> int:
        """Count the bytes of payload that are kept per element."""
        return 2 if self.keeps_payload == "both" else int(self.keeps_payload)

    def row(self, weight: Tensor, spec: CastSpec) -> QuantizedTensor:
        """The weight, (N, K), quantized along K; what is kept is used unless it was written since.

        Args:
            weight: (N, K), or (K, N) if `transposed`.
            spec: of the cast.
        """
        stamp = stamp_of(weight)
        if stamp is None or stamp != self._stamp:
            self._forget()
        kept = _layout(self._row, self._col, self.transposed)
        if kept is not None:
            return kept
        if stamp is not None and (self.keeps_payload or self._scale is None):
            with torch.inference_mode(False), torch.no_grad():
                made = self._cast(weight, spec, self.keeps_payload)
            self._keep(stamp_of(weight), *made)  # the cast itself has used the weight
            return self._for_forward(*made)
        return self._for_forward(*self._cast(weight, spec, False))

    def _for_forward(
        self, row: QuantizedTensor | None, col: QuantizedTensor | None
    ) -> QuantizedTensor:
        layout = _layout(row, col, self.transposed)
        assert layout is not None
        return layout

    def _cast(
        self, weight: Tensor, spec: CastSpec, keep: bool | str
    ) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
        """The layouts to keep, or without `keep` the one that forward takes."""
        if keep == "both":
            row = col = True
        else:
            # Of a transposed weight the step's kernel writes the layout that it is stored in, and
            # forward turns that around, where both have the same scales.
            col = self.transposed and not (keep and spec.granularity in SQUARE)
            row = not col
        options = CastOptions.of(spec, self._scale, self._amax, rowwise=row, columnwise=col)
        return quantize_layouts(stored(weight), options)

    def _keep(
        self, stamp: Stamp | None, row: QuantizedTensor | None, col: QuantizedTensor | None
    ) -> None:
        self._stamp = stamp
        self._row, self._col = (row, col) if self.keeps_payload else (None, None)
        made = col if row is None else row
        assert made is not None
        self._scale = made.scale if made.granularity == "tensorwise" else None

    def to_overwrite(self, spec: CastSpec, new_scale: Tensor) -> WeightPayload | None:
        """The payload's memory, where the optimizer's step can write the next one to it.

        Args:
            spec: of the cast.
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
            spec: of the cast.
            amax: () float32 of the weight, if the step has it: a scale per tensor then takes no
                read of its own.
            written: the payload, where the step has written it.
        """
        self._forget()
        self._amax = amax if spec.granularity == "tensorwise" else None
        if written is not None:
            self._keep(None, *_layouts(written))
        elif self.keeps_payload:
            self._keep(None, *self._cast(weight, spec, self.keeps_payload))
        self._stamp = stamp_of(weight)

    def col(self, weight: Tensor) -> QuantizedTensor | None:
        """The transposed weight, (K, N), as kept or from the payload; None: it has to be cast.

        See `torch_fp8.ops.quantize.transposed`.
        """
        stamp = stamp_of(weight)
        if stamp is None or stamp != self._stamp:
            return None
        return _layout(self._row, self._col, not self.transposed)

    @property
    def tensors(self) -> list[Tensor]:
        """What the cache holds now."""
        kept = [x for x in (self._row, self._col) if x is not None]
        if kept:
            return list({id(t): t for x in kept for t in (x.qdata, x.scale)}.values())
        return [t for t in (self._amax if self._scale is None else self._scale,) if t is not None]

    def __reduce__(self) -> Any:
        return WeightCache, (self.keeps_payload, self.transposed)


def keeps_scale(spec: CastSpec) -> bool:
    """Whether the scale alone is worth keeping: it would take a read of its own."""
    return spec.granularity == "tensorwise" and not spec.delayed


def watch(weight: nn.Parameter) -> None:
    """Make a Parameter one whose writes are seen, in place."""
    if type(weight) is nn.Parameter:
        _count_steps()
        weight.__class__ = WatchedParameter


@functools.cache
def _count_steps() -> Any:
    """Have all optimizers' steps counted from the first weight on that is watched."""
    return register_optimizer_step_post_hook(count_step)


def count_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Count a use of each watched weight that an optimizer has stepped.

    Args:
        optimizer: any. A converted one moves the versions itself, before it fills caches.
        args, kwargs: of its ``step()``.
    """
    if hasattr(optimizer, "fp8_caches"):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, WatchedParameter):
                parameter.uses += 1


def unwatch(weight: nn.Parameter) -> None:
    """Undo `watch`."""
    if type(weight) is WatchedParameter:
        weight.__class__ = nn.Parameter
        for name in ("uses", "is_lent"):
            weight.__dict__.pop(name, None)


def _layout(
    row: QuantizedTensor | None, col: QuantizedTensor | None, flip: bool
) -> QuantizedTensor | None:
    """The one that is asked for, or made of the other; None where the other has other scales."""
    wanted, other = (col, row) if flip else (row, col)
    if wanted is None and other is not None:
        return transposed(other)
    return wanted


def stamp_of(weight: Tensor) -> Stamp | None:
    """What differs after each write to a watched Parameter that can be seen.

    Returns:
        None where nothing can be told: `weight` is not watched, has no version (an inference
        tensor), or is being compiled.
    """
    if torch.compiler.is_compiling() or not isinstance(weight, (SplitWeight, WatchedParameter)):
        return None
    if weight.is_inference():
        return None
    return stamp(weight)


def stamp(weight: WatchedParameter | SplitWeight) -> Stamp:
    """What `stamp_of` returns of a Parameter that is watched, has a version and is not compiled."""
    if isinstance(weight, SplitWeight):
        halves = weight.halves
        return id(weight), halves.writes, 0, id(halves)
    return id(weight), weight._version, weight.uses, weight.data_ptr()


def _layouts(written: WeightPayload) -> tuple[QuantizedTensor, QuantizedTensor | None]:
    row = QuantizedTensor(written.qdata, written.new_scale, written.granularity)
    if written.qdata_t is None:
        return row, None
    scale_t = written.new_scale if written.scale_t is None else written.scale_t
    return row, QuantizedTensor(written.qdata_t, scale_t, written.granularity)
