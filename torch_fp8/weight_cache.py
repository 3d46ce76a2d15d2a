"""What is kept of a weight from one optimizer step to the next: its scale, or its FP8 payload.

A weight is cast in every forward and once more, transposed, in every backward. With a scale for the
tensor each cast would need a read for the amax; but the kernels of the optimizer's step find the
largest new weight on their way, and until the next step it stays what it is. With
``FP8Config(cache_weights=True)`` the payload is kept, too, for one more byte per parameter. Bytes
read and written to quantize a BF16 weight, for each of its elements, with a scale per tensor:

| kept | at the step | per micro-batch |
|---|---|---|
| nothing (O1, the user's own optimizer, compiled layers, no `model` at conversion) | | 8 |
| scale | 0 | 6: cast by row, and by column in backward |
| payload | 3: cast by row | 2: the payload is transposed in backward |

Nothing kept must ever be stale, and a weight can be written in three ways:

* in place, by an optimizer, a loader, ``p.copy_()`` or through ``p.detach()``: that moves
  ``p._version``;
* by ``p.data = x``, and through ``p.data`` (EMA, merging of adapters), which moves nothing. Hence
  the Parameter's class is swapped for one that counts each use of ``.data``, be it for reading;
* by another Parameter in its place (``load_state_dict(assign=True)``, sharding): that one has not
  the class, and is not cached.

Writes past torch (through NumPy or raw memory) show nowhere and are not seen.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_fp8.quantize import QuantizedTensor, quantize_layouts, transposed
from torch_fp8.recipe import CastSpec


class WatchedParameter(nn.Parameter):
    """A Parameter that counts the uses of its ``.data``; otherwise a Parameter."""

    uses: int = 0

    @property
    def data(self) -> Tensor:
        self.uses += 1
        plain: Tensor = torch.Tensor.data.__get__(self)
        return plain

    @data.setter
    def data(self, value: Tensor) -> None:
        self.uses += 1
        torch.Tensor.data.__set__(self, value)


class _Stamp(NamedTuple):
    """What any write that torch can see changes."""

    weight: int
    version: int
    uses: int
    address: int


class WeightCache:
    """The scale or the payload of one module's weight. Copies and pickles start empty.

    Args:
        payload: whether to keep the payload.
    """

    def __init__(self, payload: bool = True) -> None:
        self.keeps_payload = payload
        self._forget()

    def _forget(self) -> None:
        self._stamp: _Stamp | None = None
        self._payload: QuantizedTensor | None = None
        self._scale: Tensor | None = None
        self._amax: Tensor | None = None

    def row(self, weight: Tensor, spec: CastSpec) -> QuantizedTensor:
        """The weight, (N, K), quantized along K; what is kept is used unless it was written since.

        Args:
            weight: (N, K).
            spec: of the cast.
        """
        stamp = _stamp(weight)
        if stamp is None or stamp != self._stamp:
            self._forget()
        if self._payload is not None:
            return self._payload
        payload, _ = quantize_layouts(
            weight, spec, self._scale, row=True, col=False, amax=self._amax
        )
        assert payload is not None
        if stamp is not None:
            self._keep(stamp, payload)
        return payload

    def _keep(self, stamp: _Stamp | None, payload: QuantizedTensor) -> None:
        self._stamp = stamp
        self._payload = payload if self.keeps_payload else None
        self._scale = payload.scale if payload.granularity == "tensorwise" else None

    def refill(self, weight: Tensor, spec: CastSpec, amax: Tensor | None = None) -> None:
        """Keep what the next forward needs of a weight that the optimizer has just written.

        Args:
            weight: (N, K).
            spec: of the cast.
            amax: () float32 of the weight, if the step has it: a scale per tensor then takes no
                read of its own.
        """
        self._forget()
        self._amax = amax if spec.granularity == "tensorwise" else None
        if self.keeps_payload:
            payload, _ = quantize_layouts(weight, spec, None, row=True, col=False, amax=self._amax)
            assert payload is not None
            self._keep(_stamp(weight), payload)
        self._stamp = _stamp(weight)

    def col(self, weight: Tensor) -> QuantizedTensor | None:
        """The transposed weight, (K, N), from the payload; None: it has to be cast.

        See `torch_fp8.quantize.transposed`.
        """
        stamp = _stamp(weight)
        if self._payload is None or stamp is None or stamp != self._stamp:
            return None
        return transposed(self._payload)

    @property
    def tensors(self) -> list[Tensor]:
        """What the cache holds now."""
        if self._payload is not None:
            return [self._payload.qdata, self._payload.scale]
        return [t for t in (self._amax if self._scale is None else self._scale,) if t is not None]

    def __reduce__(self) -> Any:
        return WeightCache, (self.keeps_payload,)


def keeps_scale(spec: CastSpec) -> bool:
    """Whether the scale alone is worth keeping: it would take a read of its own."""
    return spec.granularity == "tensorwise" and not spec.delayed


def watch(weight: nn.Parameter) -> None:
    """Make a Parameter one whose writes are seen, in place."""
    if type(weight) is nn.Parameter:
        weight.__class__ = WatchedParameter


def unwatch(weight: nn.Parameter) -> None:
    """Undo `watch`."""
    if type(weight) is WatchedParameter:
        weight.__class__ = nn.Parameter
        weight.__dict__.pop("uses", None)


def _stamp(weight: Tensor) -> _Stamp | None:
    if type(weight) is not WatchedParameter or torch.compiler.is_compiling():
        return None
    return _Stamp(id(weight), weight._version, weight.uses, weight.data_ptr())
