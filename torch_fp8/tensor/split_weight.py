"""`SplitWeight`: a float32 weight that is stored as a BF16 half and a residual.

It is the Parameter of a trained weight at O2 and O3. To code that reads, writes, copies or saves
it, it looks like the float32 Parameter that it replaces:

* An operator that reads it joins the halves first (`torch_fp8.quantization.split_float`).
* An operator that writes to it splits the float32 result exactly, into BF16 and 16 bits. The
  optimizer's next step keeps 8 of these bits, by stochastic rounding.
* Aliases (``p.data``, ``p.detach()``) and views share the halves. ``deepcopy`` of a Parameter
  copies the halves. Other copies and pickles are plain float32 tensors. A process to which torch's
  multiprocessing sends the weight shares its halves.

FP8 layers, embeddings and output layers use the BF16 half (`torch_fp8.tensor.weight_half`), and
their gradients are BF16. ``p.grad`` shows such a gradient as float32 (`WideGrad`).
"""

import functools
import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torch_fp8.autograd.function import outside_inference_mode
from torch_fp8.ops.quantize import QuantizedTensor
from torch_fp8.quantization.scaling import scale_in_table
from torch_fp8.quantization.split_float import EXACT_BITS, RESIDUAL_BITS
from torch_fp8.tensor.base import in_shared_memory, wrapper
from torch_fp8.tensor.dtensor import local
from torch_fp8.tensor.encoded import Encoded, check_address, plain
from torch_fp8.tensor.exchange import SwappedParameter, attributes_of, exchange, stored_grad
from torch_fp8.tensor.halves import Halves
from torch_fp8.tensor.readable import swappable
from torch_fp8.tensor.wide_grad import WideGrad, WideHook, adapt_hooks

_aten: Any = torch.ops.aten


class SplitTensor(Encoded):
    """A float32 tensor over `Halves`, but not a Parameter: a weight on its way to a device."""

    halves: Halves

    @staticmethod
    def __new__(cls: Any, halves: Halves, requires_grad: bool = True) -> Any:
        if isinstance(halves, Tensor):  # other code calls type(p)(x)
            return nn.Parameter(halves, requires_grad)
        high = halves.high
        self = wrapper(cls, high.shape, torch.float32, high.device, strides=high.stride())
        self.halves = halves
        return self

    def dequantize(self) -> Tensor:
        """Return the float32 weight as a plain tensor."""
        with torch.no_grad():
            return self.halves.join()

    @torch.no_grad()
    def store(self, x: Tensor) -> None:
        x = plain(x).to(self.device, torch.float32).expand(self.shape)
        self.halves.write(x.contiguous())

    def alias(self) -> Any:
        return type(self)(self.halves)

    def stored_part(self) -> Tensor:
        return self.halves.high

    def share_memory_(self) -> Tensor:
        if self.halves.bits != EXACT_BITS:
            self.halves.write(self.halves.join())  # later writes are in place
        for half in self.halves.tensors:
            half.share_memory_()
        return self

    def is_shared(self) -> bool:
        return self.halves.high.is_shared()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), self._plain())

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Join on the CPU, so that saving needs no second model on the device.
        return self._plain(torch.device("cpu")).__reduce_ex__(protocol)

    def _plain(self, device: torch.device | None = None) -> Tensor:
        with torch.no_grad():
            joined = self.halves.join(device)
        return nn.Parameter(joined, self.requires_grad) if _is_parameter(self) else joined

    def __repr__(self, **options: Any) -> str:
        return repr(self._plain())


class SplitWeight(SplitTensor):
    """A Parameter, or an alias of one, over `Halves`."""

    def take(self, x: Tensor) -> None:
        """Replace the halves by those of `x`, or by its split values. Aliases keep the old ones."""
        old = self.halves
        self.halves = x.halves if isinstance(x, SplitTensor) else Halves.of(plain(x), EXACT_BITS)
        self.halves.keep_like(old)

    def become(self, x: Tensor) -> None:
        grad = self.grad
        if type(x) is not SplitTensor:
            exchange(self, nn.Parameter(plain(x), self.requires_grad))
        elif swappable(self):  # model.to(device)
            exchange(self, _parameter(x.halves, self))
        else:
            del self.grad
            torch.Tensor.data.__set__(self, _parameter(x.halves, self))
            self.halves = x.halves
        if grad is not None:  # keep its dtype, as torch does, but move it to the device
            self.grad_dtype = None
            self.grad = plain(grad).to(self.device)

    @property
    def grad(self) -> Tensor | None:
        grad = stored_grad(self)
        if grad is None or grad.dtype != torch.bfloat16 or isinstance(grad, Encoded):
            return grad
        wide: WideGrad | None = vars(self).get("_wide_grad")
        if wide is None or wide.stored is not grad:
            wide = WideGrad(grad)
            if not wide.is_inference():  # or it would outlive an evaluation
                self._wide_grad = wide
        return wide

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.__dict__.pop("_wide_grad", None)
        value = value.stored if isinstance(value, WideGrad) else value
        if isinstance(value, Tensor) and value.dtype != torch.float32:
            if value.dtype != torch.bfloat16:  # torch would accept any dtype
                raise RuntimeError(f"the gradient of a float32 weight cannot be {value.dtype}")
            self.grad_dtype = None
        torch.Tensor.grad.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.__dict__.pop("_wide_grad", None)
        torch.Tensor.grad.__delete__(self)

    def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        return super().register_hook(WideHook(hook))

    def requires_grad_(self, requires_grad: bool = True) -> "SplitWeight":
        super().requires_grad_(requires_grad)
        if requires_grad:
            self.grad_dtype = None  # BF16 from layers, float32 from other code
            if self._backward_hooks is None:
                adapt_hooks(self, None, is_split=True)
        return self

    def data_ptr(self) -> int:
        """Return 0 for the Parameter, and for an alias the address of a joined float32 copy, which
        lives as long as the alias.
        """
        check_address()
        copy = self._copy()
        return super().data_ptr() if copy is None else copy.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        copy = self._copy()
        return super().untyped_storage() if copy is None else copy.untyped_storage()

    def _copy(self) -> Tensor | None:
        is_traced = torch.compiler.is_compiling() or type(self.halves.high) is not Tensor
        if is_traced or _is_parameter(self):
            return None
        known = None if in_shared_memory(self.halves.high) else self.halves.copy
        copy = known[1]() if known is not None and known[0] == self.halves.version else None
        if copy is None:
            copy = self.dequantize()
            self.halves.copy = self.halves.version, weakref.ref(copy)
        self._joined = copy
        return copy

    def _use_count(self) -> int:
        # torch.utils.swap_tensors calls this for both tensors, twice if they are the same.
        if _is_parameter(self):
            if super()._use_count() > 1:  # an earlier graph refers to it
                grad = stored_grad(self)
                exchange(self, _parameter(self.halves, self))
                self.grad = grad
            if self.__dict__.pop("_swapped", None) is None:
                again = functools.partial(split_parameter, bits=EXACT_BITS)
                self._swapped = SwappedParameter(self, attributes_of(self), again)
        return super()._use_count()

    def share_memory_(self) -> Tensor:
        return _unswapped(super().share_memory_())

    @outside_inference_mode
    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if not _is_parameter(self):
            return super().__deepcopy__(memo)
        # Copy the halves, so that a copied layer multiplies by the same BF16 half.
        return memo.setdefault(id(self), _parameter(self.halves.mapped(torch.clone), self))

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        halves = self.halves  # guards and wrappers of graphs call this twice for each weight
        names = ["high"] if halves.residual is None else ["high", "residual"]
        if halves.cast is not None:
            names += ["fp8_payload"] if halves.row is not None else ["fp8_payload", "fp8_scale"]
        elif halves.amax is not None:
            names += ["fp8_amax"]
        return names, (halves.bits, halves.cast, halves.row)

    # Inputs of graphs, which each call reads in this order: the payload is renewed with its scale.
    high = property(operator.attrgetter("halves.high"))
    residual = property(operator.attrgetter("halves.residual"))
    fp8_amax = property(operator.attrgetter("halves.graph_amax"))
    fp8_payload = property(operator.attrgetter("halves.graph_codes"))
    fp8_scale = property(operator.attrgetter("halves.payload.scale"))

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> "SplitWeight":
        weight = SplitWeight(Halves.unflattened(inner, context))
        weight.grad_dtype = None  # a compiled layer's gradient is BF16, too
        return weight


def _unswapped(weight: SplitWeight) -> Tensor:
    """Return a result for which ``Module._apply`` does not swap the Parameter.

    A swap would lose the hooks of the Parameter's gradient.
    """
    apply = _is_parameter(weight) and not torch.is_grad_enabled()
    return SplitTensor(weight.halves) if apply else weight


def _method(name: str) -> Any:
    def method(self: SplitWeight, *args: Any, **options: Any) -> Tensor:
        result: Tensor = getattr(torch.Tensor, name)(self, *args, **options)
        return result if result is not self or torch.compiler.is_compiling() else _unswapped(self)

    return method


for _name in ("to", "cpu", "cuda", "float", "type"):
    setattr(SplitWeight, _name, _method(_name))


def halves_of(weight: Tensor) -> Halves | None:
    """Return the halves of a split weight, or of this rank's shard, or None if it is not split."""
    shard = local(weight)
    return shard.halves if isinstance(shard, SplitWeight) else None


def scales_of_block(weight: Tensor) -> Tensor | None:
    """Return the table of scales that a graph takes with a weight, or None; Dynamo traces it."""
    table = weight.halves.table if isinstance(weight, SplitWeight) else None
    return None if table is None else table.scales


def read_scale(weight: Tensor, scales: Tensor | None) -> None:
    """Give a weight in a graph its payload, whose scale is in a table from `scales_of_block`.

    Code that does not call this casts the weight again, to the same bits.
    """
    halves: Any = weight.halves if isinstance(weight, SplitWeight) else None
    if halves is not None and scales is not None and halves.codes is not None:
        scale = scale_in_table(scales, halves.row)
        halves.payload = QuantizedTensor(halves.codes, scale, halves.cast.spec.granularity)


def stored(weight: Tensor) -> Tensor:
    """Return the BF16 half of a `SplitWeight` without a copy; any other tensor unchanged."""
    return weight.halves.high if isinstance(weight, SplitWeight) else weight


@torch.no_grad()
def split_parameter(parameter: Tensor, bits: int = RESIDUAL_BITS) -> SplitWeight:
    """Turn a float32 Parameter into a `SplitWeight`, the same object, rounding to nearest.

    Args:
        parameter: leaf that is not sharded.
        bits: number of residual bits until the next step: 8, or 16 to keep the weight exactly.
    """
    halves = Halves.of(parameter.data, bits)  # the profiler would record detach()
    grad = parameter.grad
    exchange(parameter, _parameter(halves, parameter))
    assert isinstance(parameter, SplitWeight)
    if grad is not None:
        parameter.grad = grad.to(torch.bfloat16) if type(grad) is Tensor else grad
    return parameter


@torch.no_grad()
def join_parameter(parameter: Tensor) -> None:
    """Turn a `SplitWeight` back into a plain float32 Parameter, the same object."""
    if isinstance(parameter, SplitWeight):
        grad = parameter.grad
        exchange(parameter, nn.Parameter(parameter.dequantize(), parameter.requires_grad))
        parameter.grad = None if grad is None else plain(grad).to(torch.float32)


def _parameter(halves: Halves, like: Tensor) -> SplitWeight:
    parameter = SplitWeight(halves).requires_grad_(like.requires_grad)
    parameter._is_param = True
    return parameter


def _is_parameter(x: Tensor) -> bool:
    return "_is_param" in vars(x)


def _to_copy(weight: SplitWeight, *, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    if dtype not in (None, torch.float32) or device is None:
        return NotImplemented
    device = torch.device(device)
    if _is_parameter(weight):  # model.to(device)
        return _moved(weight, device, lambda half: half.to(device))
    return weight.halves.join(device)


def _moved(weight: SplitWeight, device: torch.device, move: Callable[[Tensor], Tensor]) -> Any:
    """Return the weight on another device, in the form that ``Module._apply`` needs.

    From or to the meta device, torch swaps the Parameter instead of setting ``p.data``.
    """
    swapped = "meta" in (device.type, weight.device.type)
    return (SplitWeight if swapped else SplitTensor)(weight.halves.mapped(move))


def _empty_like(weight: SplitWeight, *, device: Any = None, **options: Any) -> Any:
    if not _is_parameter(weight) or device is None or options.get("dtype") is not None:
        return NotImplemented
    empty = functools.partial(torch.empty_like, device=device)  # model.to_empty(device=device)
    return _moved(weight, torch.device(device), empty)


def _copy(weight: SplitWeight, source: Any, non_blocking: bool = False) -> Any:
    if isinstance(source, Tensor) and source.shape == weight.shape:
        weight.store(source.detach())
        return weight
    return NotImplemented


SplitWeight.handlers = {
    _aten._to_copy.default: _to_copy,
    _aten.copy_.default: _copy,
    _aten.empty_like.default: _empty_like,
}
