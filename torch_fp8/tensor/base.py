"""`QuantizableTensor`: a tensor that brings its FP8 payloads along, or makes them on demand.

Three tensors do: what a converted norm or MLP returns (`torch_fp8.tensor.lazy_quantized`), an
activation that a group of ranks has gathered as FP8 bytes
(`torch_fp8.distributed.tensor_parallel.all_gather`), and a weight that FSDP2 has gathered so
(`torch_fp8.distributed.fsdp.unsharded_weight`). A linear layer hands its operands to a
`torch_fp8.tensor.quantizer.Quantizer`, which asks them for their payloads. Whoever else reads one
gets a plain tensor of the dtype that it passes for.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_fp8.autograd.current_pass import stand_in
from torch_fp8.ops.quantize import Payloads, QuantizedTensor
from torch_fp8.quantization.payload_shape import padded_rows, scale_shape
from torch_fp8.quantization.scaling import tensor_amax

_aten: Any = torch.ops.aten
_ALIASES = (_aten.detach.default, _aten.alias.default)
_VIEWS = (_aten.view.default, _aten._unsafe_view.default)


class QuantizableTensor(Tensor):
    """(..., C), read-only; a subclass says how its payloads come about.

    Aliases, and views that keep the last dimension, share what they are made from.

    Attributes:
        views: operators whose result may be such a view.
    """

    views: tuple[Any, ...] = _VIEWS

    def quantize(
        self,
        quantizer: Any,
        *,
        rowwise: bool,
        columnwise: bool,
        grad_output: Tensor | None = None,
    ) -> Payloads:
        """The payloads that are asked for.

        Args:
            quantizer: the `torch_fp8.tensor.quantizer.Quantizer` of the layer that asks.
            rowwise: whether to return the matrix (R, C) quantized along C.
            columnwise: whether to return its transpose (C, R) quantized along R.
            grad_output: the gradient with which a backward begins, of a weight there; see
                `torch_fp8.ops.quantize.transposed`.
        """
        raise NotImplementedError

    def stacked_payload(self, flip: bool) -> tuple[Tensor, Tensor]:
        """Codes (E, R, C) of stacked weights, and scales (E, R, 1) of their rows.

        No string beside them: torch.compile takes this method as one call, whose results it wants
        to be tensors.

        Args:
            flip: whether to return those of the transposes, (E, C, R).
        """
        raise NotImplementedError

    def amax(self) -> Tensor:
        """The largest magnitude, () float32, NaN if any element is."""
        return tensor_amax(self.dequantize())

    def dequantize(self) -> Tensor:
        """A plain tensor of this shape and dtype."""
        raise NotImplementedError

    def matrix(self) -> Tensor:
        """A plain tensor (R, C)."""
        plain = self.dequantize()
        return plain.reshape(-1, plain.shape[-1])

    def saved_for_backward(self) -> "tuple[Tensor, Tensor | None, SavedInput] | None":
        """What a layer saves of this, its input, for wgrad; None: the payload that it makes.

        Returns:
            The tensors to save (the second may be None), and who makes a payload of them later.
        """
        return None

    def before_cast(
        self, row: QuantizedTensor | None, col: QuantizedTensor | None
    ) -> "tuple[Tensor, QuantizedTensor | None, QuantizedTensor | None, int] | None":
        """The matrix in high precision that this rank has cast, for whoever compares the two.

        Args:
            row, col: payloads (R, C) and (C, R) of this tensor that GEMMs multiply, or None.
        Returns:
            The matrix, the payloads with its part in them, and the first row of that part; None
            where nobody holds such a matrix.
        """
        return None

    def alias(self, shape: Sequence[int]) -> "QuantizableTensor":
        """This tensor in another shape whose last dimension is the same."""
        raise NotImplementedError

    @classmethod
    def refuse_write(cls, func: Any, args: Any, kwargs: Any) -> None:
        """Raise RuntimeError where `func` would write such a tensor."""

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        x = args[0] if args else None
        if isinstance(x, cls):
            shape = view_shape(func, x, args)
            if shape is not None:
                return x.alias(shape)
        cls.refuse_write(func, args, kwargs)
        return func(*map_tensors(args, dequantized), **map_tensors(kwargs, dequantized))


class SavedInput:
    """What backward makes of the tensors that a layer has saved of its input."""

    def start(self, qdata: Tensor, scale: Tensor | None) -> None:
        """Issue what takes time, before other work of backward."""

    def columnwise(self, qdata: Tensor, scale: Tensor | None) -> QuantizedTensor:
        """The input transposed, (K, M), quantized along M.

        Args:
            qdata, scale: as they were saved.
        """
        raise NotImplementedError


def input_stand_ins(
    row: QuantizedTensor, fp8: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Stand-ins for what is saved of an input: its transposed payload and scale, or itself."""
    tokens, features = row.qdata.shape
    if not fp8:
        return stand_in((tokens, features), dtype, row.qdata), None
    tokens = padded_rows(tokens, row.granularity)
    qdata = stand_in((features, tokens), row.qdata.dtype, row.qdata)
    if row.granularity == "tensorwise":
        return qdata, row.scale
    shape = scale_shape(features, tokens, row.granularity)
    return qdata, stand_in(shape, torch.float32, row.qdata)


def view_shape(func: Any, x: QuantizableTensor, args: tuple[Any, ...]) -> torch.Size | None:
    """The new shape, where `func` makes a view that keeps the last dimension; else None."""
    with torch._C.DisableTorchFunctionSubclass():
        shape, numel = x.shape, x.numel()
    if func in _ALIASES:
        return shape
    if func not in x.views:
        return None
    size = list(args[1])
    if -1 in size and numel:
        size[size.index(-1)] = numel // -math.prod(size)
    keeps = bool(size) and size[-1] == shape[-1] and math.prod(size) == numel
    return torch.Size(size) if keeps else None


def map_tensors(value: Any, function: Callable[[Any], Any]) -> Any:
    """`value` with `function` of everything in its lists, tuples and dictionaries."""
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(map_tensors(v, function) for v in value)
    if type(value) is dict:
        return {k: map_tensors(v, function) for k, v in value.items()}
    return function(value)


def written_values(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """Yield the arguments that an operator writes, and each of a list of them."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from value if isinstance(value, (list, tuple)) else [value]


def dequantized(value: Any) -> Any:
    """Return a plain tensor of a quantized one; anything else as it is."""
    return value.dequantize() if isinstance(value, QuantizableTensor) else value
