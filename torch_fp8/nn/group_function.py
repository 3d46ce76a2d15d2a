"""The autograd functions of an `torch_fp8.nn.input_group.InputGroup`, with its dgrad and wgrad.

    x -> GroupInput -> Output 0 -> y0        one node takes the gradient of the input
    w0 -> GroupWeight 0 -^                   each weight has its own, and so has each output
    x -> GroupInput -> Output 1 -> y1
    w1 -> GroupWeight 1 -^

An `Output` hands its gradient, and what its `GroupWeight` has saved, to the `Exchange`. It returns
no gradient: tokens without memory connect it to the other two. `GroupInput` runs when
the gradients of all called members have arrived, because it depends on them. Each `GroupWeight`
depends on its own output alone, so backward never reaches the weight of a member that was not
called. Autograd runs the newest node first, and these are older than all outputs, so they find all
gradients, too, and the first one multiplies for all. Gradients that arrive later, for example from
another device, get a separate product.

Legend: M tokens, K in, N out.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_fp8.autograd.current_pass import is_traced, running_backward
from torch_fp8.autograd.function import (
    Function,
    differentiable_by,
    is_asked_for,
    is_returned,
    refuse_derivatives,
    will_run,
)
from torch_fp8.nn.linear_function import LinearOptions
from torch_fp8.ops.quantize import QuantizedTensor, as_layouts
from torch_fp8.ops.registry import is_visible
from torch_fp8.ops.scaled_mm import cast, scaled_matmul
from torch_fp8.ops.side_by_side import MOST, quantize_joined, side_by_side
from torch_fp8.quantization.scaling import scale_in_backward
from torch_fp8.tensor.lazy_quantized import joined, plain
from torch_fp8.tensor.quantizer import InputPayloads, matrix, source_of
from torch_fp8.tensor.saved_tensors import save_by_name, saved_by_name
from torch_fp8.tensor.split_weight import stored
from torch_fp8.tensor.weight_half import gradient_dtype


class Exchange:
    """What the functions of a group share in one forward, and in the backwards after it.

    Args:
        options: options of the first layer that was called; in a graph with the scales and slots
            of the first member's buffers, if there are any.
        sizes: output features of each member.
        layers: all members; none in a graph.

    Attributes:
        scales: () scale of each weight's payload in fprop, or None if the member was not called.
        passes: gradients of each backward that has begun, by its number.
    """

    def __init__(
        self, options: LinearOptions, sizes: Sequence[int], layers: tuple[Any, ...] = ()
    ) -> None:
        self.options, self.sizes, self.layers = options, sizes, layers
        self.scales: list[Tensor | None] = [None] * len(sizes)
        self.passes: dict[int, list[Gradients]] = {}

    def arriving(self) -> "Gradients":
        """Return those gradients of the running backward that can still take another one."""
        number = running_backward()
        arrived = self.passes.setdefault(number, [])
        if not arrived or arrived[-1].is_cast:
            arrived.append(Gradients(self, number))
        return arrived[-1]

    def arrived(self) -> "list[Gradients]":
        """Return the gradients of the running backward."""
        return self.passes.get(running_backward(), [])


class Gradients:
    """Gradients of outputs that are multiplied together.

    Attributes:
        outputs: gradient (..., N) of each output, by the index of its member.
        number: number of the backward that they belong to.
        saved: tensors that `GroupWeight` has saved, by index.
        dtypes: dtypes of the weight gradients that are needed, by index.
        bias_dtypes: dtypes of the bias gradients that are needed, by index.
        readers: indices of the weights that have yet to take their gradient; -1 is the input.
    """

    def __init__(self, exchange: Exchange, number: int) -> None:
        self.exchange, self.number = exchange, number
        self.outputs: dict[int, Tensor] = {}
        self.saved: dict[int, dict[str, Tensor]] = {}
        self.dtypes: dict[int, torch.dtype] = {}
        self.bias_dtypes: dict[int, torch.dtype] = {}
        self.readers: set[int] = set()
        self._payloads: Any = None
        self._rows: dict[int, Tensor] = {}

    def add(self, i: int, grad: Tensor) -> None:
        """Add the gradient (..., N) of output `i`, in the order of the members."""
        self.outputs = dict(sorted({**self.outputs, i: grad}.items()))

    @property
    def is_cast(self) -> bool:
        """Whether the payloads exist, so that no gradient can be added."""
        return self._payloads is not None

    def payloads(self) -> tuple[QuantizedTensor | None, QuantizedTensor | None, Tensor | None]:
        """Return the gradients side by side, (M, N) and (N, M), and the sums of their rows (N,)."""
        if self._payloads is None:
            wgrad = self.exchange.options.recipe.wgrad is not None and bool(self.dtypes)
            layouts = {"rowwise": -1 in self.readers, "columnwise": wgrad}
            quantizer = self.exchange.options.quantizers.grad_output
            parts = list(self.outputs.values())
            if quantizer.source.scale is not None and self._joins_in_cast(parts):
                options = quantizer.options(matrix(parts[0]), **layouts)
                more = [None] * (MOST - len(parts))
                arguments: Any = *map(matrix, parts), *more, options
                self._payloads = *as_layouts(quantize_joined(*arguments), options), None
            else:
                sum_dtype = torch.float32 if self.bias_dtypes else None
                self._payloads = quantizer(joined(parts), **layouts, sum_dtype=sum_dtype)
        return self._payloads

    def _joins_in_cast(self, parts: Sequence[Tensor]) -> bool:
        """Return whether a kernel of a graph reads the gradients where they are."""
        if not is_traced() or not is_visible(parts[0]):
            return False
        plain_parts = all(source_of(x) is None and x.dtype == parts[0].dtype for x in parts)
        return plain_parts and 1 < len(parts) <= MOST and not self.bias_dtypes

    @property
    def sizes(self) -> list[int]:
        return [self.exchange.sizes[i] for i in self.outputs]

    def take(self, i: int, tokens: int) -> tuple[Tensor, Tensor | None]:
        """Return the gradients (N, K) of a member's weight, and (N,) of its bias, or None.

        Args:
            i: index of the member.
            tokens: M, without padding.
        """
        options, (_, g_t, sums) = self.exchange.options, self.payloads()
        if not self._rows:
            wgrad, dtypes = options.recipe.wgrad, set(self.dtypes.values())
            out_dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
            x, scale = self.saved[i]["x"], self.saved[i].get("x_scale")
            if wgrad is not None:
                assert g_t is not None
                assert scale is not None
                x_t = QuantizedTensor(x, scale, wgrad.b.granularity)
                emulate = options.emulate
                rows = scaled_matmul(  # (N, M) @ (K, M)^T, over the tokens
                    g_t, x_t, out_dtype, tokens, fast_accum=wgrad.fast_accum, emulate=emulate
                )
            else:
                dense = matrix(joined(list(self.outputs.values())))  # (M, N1 + N2 + ...)
                rows = cast(dense.t() @ x.to(dense.dtype), out_dtype)
            # Not views, because users may write to the gradients: (N1 + N2 + ..., K).
            parts = rows.unsafe_split_with_sizes(self.sizes)
            self._rows = dict(zip(self.outputs, parts, strict=True))
            if dtypes:  # several: a part without a copy would keep the memory of all
                self._rows |= {
                    i: self._rows[i].to(dtype, copy=True) for i, dtype in self.dtypes.items()
                }
        grad_bias = None
        if i in self.bias_dtypes:
            assert sums is not None
            parts = dict(zip(self.outputs, sums.split(self.sizes), strict=True))
            grad_bias = parts[i].to(self.bias_dtypes[i], copy=True)
        return self._rows.pop(i), grad_bias  # autograd copies gradients that something else holds

    def is_read_by(self, i: int) -> None:
        """Note that a function has used these gradients; the last one frees them."""
        self.readers.discard(i)
        if not self.readers:
            arrived = self.exchange.passes[self.number]
            arrived.remove(self)
            if not arrived:
                del self.exchange.passes[self.number]


class Output(Function):
    """Return the output (..., N) of a member, and hand its gradient to `Exchange`."""

    @staticmethod
    def forward(
        ctx: Any,
        of_input: Tensor,
        of_weight: Tensor,
        member: tuple[int, Exchange, Callable[[], Tensor], Any],
    ) -> Tensor:
        # Keep the reads of the input for the members that are called later.
        ctx.i, ctx.exchange, compute, ctx.reads = member
        return compute()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[None, ...]:
        (of_input, _), (of_weight, _) = ctx.next_functions
        i, gradients = ctx.i, ctx.exchange.arriving()
        if torch.is_grad_enabled():  # derivatives need the weight itself
            saved = dict(zip(of_weight.saved_names, of_weight.saved_tensors, strict=True))
        else:
            saved = saved_by_name(of_weight)
        gradients.saved[i] = saved
        gradients.add(i, grad_output)
        if will_run(of_input):
            gradients.readers.add(-1)
        if will_run(of_weight):
            gradients.readers.add(i)
            stored, whole = of_weight.dtypes
            returned = stored != whole and is_returned(of_weight, 0)
            gradients.dtypes[i] = whole if returned else stored
            if of_weight.bias_dtype is not None:
                gradients.bias_dtypes[i] = of_weight.bias_dtype
        return None, None, None


def _differentiable(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, ...]:
    """Compute the gradient of the input in high precision, by torch's operators."""
    total = None
    for gradients in list(ctx.exchange.arrived()):
        for i, grad in gradients.outputs.items():
            grad = plain(grad)
            product = grad @ gradients.saved[i]["weight"].to(grad.dtype)  # (..., N) @ (N, K)
            total = product if total is None else total + product
        gradients.is_read_by(-1)
    if total is not None:
        total = total.to(ctx.exchange.options.dtype).view(ctx.input_shape)
    return total, None


class GroupInput(Function):
    """Return a token for the input (..., K); the gradient comes from `Exchange`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: tuple[Exchange, torch.Size, torch.device]) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.exchange, ctx.input_shape, device = group
        ctx.name = ctx.exchange.options.name
        return _token(device)

    @staticmethod
    @differentiable_by(_differentiable)
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, ...]:
        exchange, options, total = ctx.exchange, ctx.exchange.options, None
        for gradients in list(exchange.arrived()):
            g, g_t, _ = gradients.payloads()
            assert g is not None
            present = list(gradients.outputs)
            weights = [gradients.saved[i]["weight"] for i in present]
            scales = [scale for i in present if (scale := exchange.scales[i]) is not None]
            if torch.compiler.is_compiling():
                scales = [scale_in_backward(scale) for scale in scales]
            slot = options.quantizers.grad_output.source.slot
            after = g.scale if slot is None else slot
            stored_weights = [stored(weight) for weight in weights]
            w = side_by_side(stored_weights, options.recipe.weight, scales, after)
            _observe(gradients, g, g_t, weights, w)
            fast_accum, emulate = options.recipe.dgrad.fast_accum, options.emulate
            product = scaled_matmul(  # (M, N) @ (K, N)^T
                g, w, options.dtype, fast_accum=fast_accum, emulate=emulate
            )
            total = product if total is None else total + product
            gradients.is_read_by(-1)
        return None if total is None else total.view(ctx.input_shape), None


def _differentiable_bias(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, ...]:
    """Compute the gradient of the bias in high precision; raise if that of the weight is needed."""
    if is_asked_for(ctx, 0):
        refuse_derivatives(ctx)
    grad_bias = None
    for gradients in list(ctx.exchange.arrived()):
        if ctx.i in gradients.outputs:
            grad = matrix(plain(gradients.outputs[ctx.i]))
            grad_bias = grad.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
            gradients.is_read_by(ctx.i)
    return None, grad_bias, None


class GroupWeight(Function):
    """Return a token for a weight (N, K) and its bias; the gradients come from `Exchange`."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        bias: Tensor | None,
        member: tuple[int, Exchange, int, InputPayloads],
    ) -> Tensor:
        ctx.i, ctx.exchange, ctx.tokens, payloads = member
        save_by_name(ctx, {"weight": weight, "x": payloads.qdata, "x_scale": payloads.scale})
        ctx.set_materialize_grads(False)
        ctx.dtypes = gradient_dtype(weight), weight.dtype
        ctx.bias_dtype = bias.dtype if bias is not None and ctx.needs_input_grad[1] else None
        ctx.name = ctx.exchange.options.name
        return _token(weight.device)

    @staticmethod
    @differentiable_by(_differentiable_bias)
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, ...]:
        grads: tuple[Tensor | None, ...] = (None, None)
        for gradients in list(ctx.exchange.arrived()):
            if ctx.i in gradients.outputs:
                grads = gradients.take(ctx.i, ctx.tokens)
                gradients.is_read_by(ctx.i)
        return *grads, None


def _token(device: torch.device) -> Tensor:
    """Return a tensor without elements that connects two functions."""
    return torch.empty(0, dtype=torch.float32, device=device)


def _observe(
    gradients: Gradients,
    g: QuantizedTensor,
    g_t: QuantizedTensor | None,
    weights: Sequence[Tensor],
    w: QuantizedTensor,
) -> None:
    """Show the monitor of each layer its part of the operands of backward."""
    layers, start = gradients.exchange.layers, 0
    if not layers:
        return
    for (i, grad), weight in zip(gradients.outputs.items(), weights, strict=True):
        layer, end = layers[i], start + gradients.exchange.sizes[i]
        if layer.fp8.observer is not None:
            row, w_col = (x._replace(qdata=x.qdata[:, start:end]) for x in (g, w))
            col = None if g_t is None else g_t._replace(qdata=g_t.qdata[start:end])
            layer.fp8.observer.backward(grad, row, col, weight, w_col)
        start = end
