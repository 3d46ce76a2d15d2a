"""The FP8 payload of a weight, kept between optimizer steps: ``FP8Config(cache_weights=True)``.

Without it a weight is cast in every forward; with it once, by the optimizer's step, for one more
byte per parameter. Kernels of the step find the largest new weight on their way; the cast, which
needs it for its scale, is a launch of its own after them.

A payload must never be stale, and a weight can be written in three ways:

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
from torch_fp8.scaling import scale_from_amax


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
    """The payload of one module's weight. Copies and pickles start empty."""

    def __init__(self) -> None:
        self._stamp: _Stamp | None = None
        self._payload: QuantizedTensor | None = None

    def row(self, weight: Tensor, spec: CastSpec) -> QuantizedTensor:
        """The weight, (N, K), quantized along K; cast anew only if it was written since.

        Args:
            weight: (N, K).
            spec: of the cast.
        """
        stamp = _stamp(weight)
        if self._payload is not None and stamp is not None and stamp == self._stamp:
            return self._payload
        payload, _ = quantize_layouts(weight, spec, None, row=True, col=False)
        assert payload is not None
        self._stamp, self._payload = (None, None) if stamp is None else (stamp, payload)
        return payload

    def refill(self, weight: Tensor, spec: CastSpec, amax: Tensor | None = None) -> None:
        """Cast a weight that the optimizer has just written, for the next forward.

        Args:
            weight: (N, K).
            spec: of the cast.
            amax: () float32 of the weight, if the step has it: a scale per tensor then takes no
                read of its own.
        """
        scale = None
        if amax is not None and spec.granularity == "tensorwise":
            scale = scale_from_amax(amax, spec.format, spec.power_of_two)
        self._payload, _ = quantize_layouts(weight, spec, scale, row=True, col=False)
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
        return [] if self._payload is None else [self._payload.qdata, self._payload.scale]

    def __reduce__(self) -> Any:
        return WeightCache, ()


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
