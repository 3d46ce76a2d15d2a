"""Saving attention's q, k and v in FP8, at one byte per element.

If only the saved copies were rounded, backward would use other operands than forward, and the error
of the softmax's gradient would be twice as large. So q, k and v are rounded before attention runs,
with any kernel, and its saved tensors are then replaced without loss::

    q (B, H, S, D)  ->  codes (B H S, D) E4M3, scales (B H S, 1)  ->  q' = codes * scale
    attention(q', k', v')      saves views of q', k', v'; packed as (tensor, size, strides)
    backward                   decodes the codes again

The function that rounds saves codes and scales, before attention, so that saved-tensor hooks around
the model, such as those of checkpoints and offloading, see them. The scale of a token and head is a
power of two, so that a BF16 product decodes exactly.

If only a softmax follows the products of q and k, the mean of k over the tokens is subtracted
before k is rounded, because it does not change the softmax. The gradients of k sum to zero over the
tokens, so the mean needs no gradient.

Attention also saves its output, which waits for the layer that casts it (`SavedOutput`).

Legend: B batch, H heads, S tokens, D head dimension.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_fp8.autograd.current_pass import PLAIN, is_of_checkpoint, top_saved_tensor_hooks
from torch_fp8.ops.quantize import QuantizedTensor, dequantize, quantize
from torch_fp8.quantization.formats import CAST_DTYPES, E4M3
from torch_fp8.quantization.recipe import CastSpec
from torch_fp8.tensor.quantizer import output_dtype
from torch_fp8.tensor.saved_output import SavedOutput

SPEC = CastSpec(E4M3, "rowwise", power_of_two=True)


class _Form(NamedTuple):
    """The layout of a dense tensor that is decoded from rows (B H S, D).

    Attributes:
        order: dimensions of the tensor, the outermost in memory first, D last.
        size, stride: size and strides of the tensor.
        dtype: dtype in which attention computes: autocast's if autocast is on.
    """

    order: tuple[int, ...]
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class _View(NamedTuple):
    """A saved tensor that is a view of rounded q, k or v.

    Attributes:
        place: 0, 1 or 2 for q, k or v.
        groups: number of query heads that share a head of the tensor.
        size, stride, offset: geometry of the view.
    """

    place: int
    groups: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def can_round(tensors: tuple[Any, ...]) -> bool:
    """Return whether these are plain 4-D q, k and v, one of which requires a gradient."""
    return any(t.requires_grad for t in tensors if isinstance(t, Tensor)) and all(
        type(t) in PLAIN and t.ndim == 4 and t.numel() and t.dtype in CAST_DTYPES for t in tensors
    )


class SavedOperands:
    """The rounded q, k and v of one attention call, with saved-tensor hooks for the call.

    Args:
        query: (B, H, S, D).
        key: (B, G, S', D).
        value: (B, G, S', E).
        centred: whether subtracting the mean of `key` over the tokens leaves the result the same.
        contiguous: whether the kernel needs contiguous tensors.
        output: whether the next layer keeps the output in FP8. Ignored within a checkpoint, whose
            hooks count saved tensors.

    Attributes:
        tensors: rounded q, k and v, in the dtype in which attention computes, until `close`.
        queries_by_token: whether rounded q has the memory order (B, S, H, D).
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        centred: bool,
        contiguous: bool,
        output: bool = False,
    ) -> None:
        self.node: Any = None
        self.forms: list[_Form] = []
        self._payloads: tuple[Tensor, ...] | None = None
        # Address of a storage, which lives during the call -> place, groups, version of its values.
        self._known: dict[int, tuple[int, int, int]] = {}
        hooks = top_saved_tensor_hooks()
        # Detach: if attention's node saved its own result, result and node would form a cycle.
        self._outer = hooks or (Tensor.detach, lambda tensor: tensor)
        self._waits = output and not is_of_checkpoint(hooks)
        # Kernels give their output the layout of q, so that the next layer reads it without a copy.
        self.queries_by_token = output and not contiguous
        self._results: list[SavedOutput] = []
        if centred:
            key = key - key.detach().mean(-2, keepdim=True)
        if contiguous:
            query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        rounded: tuple[Tensor, ...] = _Round.apply(query, key, value, self)
        self.tensors: tuple[Tensor, ...] = rounded
        for place, tensor in enumerate(rounded):
            self._know(tensor, place, 1)

    def repeated(self, place: int, groups: int) -> Tensor:
        """Return a rounded tensor with each head `groups` times: (B, G groups, S, D)."""
        repeated = _repeated(self.tensors[place], groups)
        self._know(repeated, place, groups)
        return repeated

    def close(self, result: Any) -> None:
        """Free all but the payloads, and let the next layer save `result` for attention, too.

        Args:
            result: return value of attention.
        """
        for saved in self._results:
            saved.follow(result)
        self.tensors, self._results = (), []
        self._known.clear()

    def _know(self, tensor: Tensor, place: int, groups: int) -> None:
        key = id(tensor.untyped_storage())
        self._known[key] = place, groups, tensor._version

    def pack(self, tensor: Tensor) -> Any:
        """Replace a view of rounded q, k or v by its geometry; pass others to the outer hooks."""
        known = self._known.get(id(tensor.untyped_storage()))
        if known is None or known[2] != tensor._version:
            if not self._waits:
                return self._outer[0](tensor)
            self._results.append(SavedOutput(tensor.detach(), self._outer))
            return self._results[-1]
        place, groups, _ = known
        return _View(place, groups, tensor.size(), tensor.stride(), tensor.storage_offset())

    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor that was packed."""
        if isinstance(packed, SavedOutput):
            return packed.unpack()
        if not isinstance(packed, _View):
            tensor: Tensor = self._outer[1](packed)
            return tensor
        if self._payloads is None:  # cached: a checkpoint returns each saved tensor once
            self._payloads = self.node.saved_tensors
        codes, scale = self._payloads[2 * packed.place : 2 * packed.place + 2]
        rounded = _decoded(QuantizedTensor(codes, scale, "rowwise"), self.forms[packed.place])
        if packed.groups > 1:
            rounded = _repeated(rounded, packed.groups)
        return rounded.as_strided(packed.size, packed.stride, packed.offset)


class _Round(torch.autograd.Function):
    """Round q, k and v, and save their codes and scales; gradients pass unchanged."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        *tensors, operands = arguments
        saved: list[Tensor] = []
        rounded = []
        for place, tensor in enumerate(tensors):
            by_token = place == 0 and operands.queries_by_token
            payload, form = _encoded(tensor, (0, 2, 1, 3) if by_token else None)
            saved += payload.qdata, payload.scale
            operands.forms.append(form)
            rounded.append(_decoded(payload, form))
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        frozen = [r for r, t in zip(rounded, tensors, strict=True) if not t.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        operands.node = ctx
        return tuple(rounded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (*grads, None)


def _encoded(x: Tensor, order: tuple[int, ...] | None) -> tuple[QuantizedTensor, _Form]:
    """Quantize x (..., D) with one scale per row of D elements.

    Args:
        x: float32, bfloat16 or float16.
        order: dimensions of the decoded tensor, the outermost in memory first; None: as in x.
    """
    if order is None:
        outer = sorted(range(x.ndim - 1), key=lambda dim: -x.stride(dim))
        order = (*outer, x.ndim - 1)
    lying = x.permute(order)
    strides = [0] * x.ndim
    for place, dim in enumerate(order):
        strides[dim] = math.prod(lying.shape[place + 1 :])
    rows = lying.reshape(-1, lying.shape[-1])  # (B, H, S, D) -> (B H S, D)
    return quantize(rows, SPEC), _Form(order, x.shape, tuple(strides), output_dtype(x))


def _decoded(payload: QuantizedTensor, form: _Form) -> Tensor:
    x = payload.qdata.new_empty(0, dtype=form.dtype).new_empty_strided(form.size, form.stride)
    rows = x.permute(form.order).view(payload.qdata.shape)  # (B, H, S, D) -> (B H S, D)
    if form.dtype == torch.float16:  # a scale may exceed its exponent range
        rows.copy_(dequantize(payload))
    else:
        torch.mul(payload.qdata.to(form.dtype), payload.scale.to(form.dtype), out=rows)
    return x


def _repeated(x: Tensor, groups: int) -> Tensor:
    """Repeat each head: (B, G, S, D) -> (B, G groups, S, D), contiguous."""
    batch, heads, tokens, dim = x.shape
    spread = x[:, :, None].expand(batch, heads, groups, tokens, dim)
    return spread.reshape(batch, heads * groups, tokens, dim)
