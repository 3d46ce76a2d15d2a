"""`Float8FrozenWeight`: a frozen weight that is stored as FP8 only, one byte per element.

``W ~= qdata.float() * scale``: E4M3 with a scale for each 128 x 128 elements, or one for all. fprop
multiplies by these bytes, and dgrad by their transpose, made when needed. There is no 16-bit copy.
Scales computed by this package are powers of two, so that BF16 holds every value exactly. Reading
the weight gives a plain BF16 tensor, and quantizing that again gives the same values.

Writes are not lost. In-place operations, also through views and ``.data``, run on the float32
values, which are then quantized again; so does ``p.data = x``. To train the weight, thaw it:
``requires_grad_(True)`` does so, with a warning, if a layer owns it.

No change is silently lost: writes are checked. A copy rounds its source to FP8. A change (``add_``,
``mul_``, ..., or a copy of almost the same values) may be smaller than the steps of E4M3, which are
6 to 12 % of a value, and then leaves the weight as it was. An adapter's delta is such a change, and
subtracting it again would not restore the bytes. Several changes that are each large can add up to
such a change, too: ``p.mul_(0.9).add_(0.1 * other)`` rounds twice.
"""

import copy
import operator
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_fp8.autograd.function import outside_inference_mode
from torch_fp8.ops.quantize import transposed
from torch_fp8.tensor.base import Payloads, QuantizableTensor, wrapper
from torch_fp8.tensor.encoded import Encoded, plain
from torch_fp8.tensor.frozen_payload import DTYPE, FrozenPayload
from torch_fp8.tensor.halves import VERSIONS


class Float8FrozenWeight(Encoded, QuantizableTensor):
    """A weight (R, C), or stacked weights (E, R, C), stored in FP8 and read as BF16.

    Attributes:
        payload: bytes of the weight, shared with all aliases.
    """

    payload: FrozenPayload
    qdata = property(operator.attrgetter("payload.qdata"))
    scale = property(operator.attrgetter("payload.scale"))

    @staticmethod
    def __new__(cls: Any, payload: FrozenPayload, requires_grad: bool = False) -> Any:
        if isinstance(payload, Tensor):
            # For each move, Accelerate's offloading makes a new Parameter of the old one's class.
            return nn.Parameter(payload, requires_grad=requires_grad)
        qdata = payload.qdata
        self = wrapper(cls, qdata.shape, DTYPE, qdata.device, strides=qdata.stride())
        self.payload = payload
        return self

    def quantize(
        self, quantizer: Any, *, rowwise: bool, columnwise: bool, after: Tensor | None = None
    ) -> Payloads:
        """Return the stored payload (R, C), and its transpose (C, R), as requested.

        Raises:
            RuntimeError: the quantizer's granularity is not that of the weight.
        """
        stored, granularity = self.payload.quantized, quantizer.spec.granularity
        if granularity != stored.granularity:
            raise RuntimeError(
                f"{self.payload.name} is stored as FP8 with {stored.granularity} scales, but its "
                f"layer needs {granularity}: convert the model again, or torch_fp8.thaw(model)"
            )
        return stored if rowwise else None, transposed(stored, after) if columnwise else None

    def dequantize(self) -> Tensor:
        """Return a plain BF16 tensor of this shape."""
        return self.payload.dequantize()

    def store(self, x: Tensor) -> None:
        self.payload.write(x)

    def writable(self) -> Tensor:
        return self.payload.dequantize(torch.float32)

    def finish_write(self, x: Tensor, func: Any) -> None:
        write_change(self.payload, x, func)

    def alias(self) -> "Float8FrozenWeight":
        return Float8FrozenWeight(self.payload)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        payload = self.payload
        return ["qdata", "scale"], (payload.spec, payload.name, payload.thawed_dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> "Float8FrozenWeight":
        return Float8FrozenWeight(FrozenPayload(inner["qdata"], inner["scale"], *context))

    def take(self, x: Tensor) -> None:
        own = self.payload
        if own.rewrite is not None:  # a shard: all ranks write together
            self.copy_(x)
        elif not _has_form(x, self):
            self.payload = own.of_values(plain(x))
        elif x.payload.owner == own.owner:
            self.payload = x.payload  # from an alias of this weight
        else:
            self.payload = own.of_bytes(x.qdata.clone(), x.scale.clone())

    def become(self, x: Tensor) -> None:
        if x.shape != self.shape or x.device != self.device:
            raise RuntimeError(
                f"{self.payload.name} is stored in FP8 only, {tuple(self.shape)} on "
                f"{self.device}; its .data was set to {tuple(x.shape)} on {x.device}. Move the "
                "module, or restore the weight's own dtype first: torch_fp8.thaw(model)"
            )
        self.take(x)  # only the dtype differs

    def data_ptr(self) -> int:
        """Return 0, because no memory holds the BF16 values."""
        return 0

    @property
    def requires_grad(self) -> bool:
        """Always False: a frozen weight is not trained."""
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> "Float8FrozenWeight":
        """Thaw the weight in place if `requires_grad` is True.

        Raises:
            RuntimeError: no layer owns the weight, or it is sharded.
        """
        if not requires_grad:
            return self
        owner = None if self.payload.owner is None else self.payload.owner()
        if owner is None:
            raise RuntimeError(
                f"{self.payload.name} is stored in FP8 only and cannot be trained; restore its own "
                "dtype first: torch_fp8.thaw(model)"
            )
        owner.thaw_for_training()
        return self  # now a plain Parameter

    @property
    def grad(self) -> None:
        """Always None: a frozen weight has no gradient."""
        return None

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            raise RuntimeError(
                f"{self.payload.name} is stored in FP8 only and takes no gradient; thaw it before "
                "you train it: torch_fp8.thaw(model)"
            )

    @outside_inference_mode
    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), frozen_parameter(copy.deepcopy(self.payload)))

    def __reduce_ex__(self, protocol: Any) -> Any:
        whole = self.dequantize()
        is_parameter = isinstance(self, nn.Parameter)
        return (nn.Parameter(whole, False) if is_parameter else whole).__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return f"Float8FrozenWeight(shape={tuple(self.shape)}, {self.payload.spec})"


def frozen_parameter(payload: FrozenPayload) -> nn.Parameter:
    """Return a Parameter of class `Float8FrozenWeight` over these bytes."""
    return nn.Parameter(Float8FrozenWeight(payload), requires_grad=False)


def _has_form(x: Any, weight: Float8FrozenWeight) -> bool:
    """Return whether `x` is a frozen weight with the shape and the cast of `weight`."""
    alike = isinstance(x, Float8FrozenWeight) and x.payload.spec == weight.payload.spec
    return alike and x.shape == weight.shape


def _copy(weight: Float8FrozenWeight, source: Any, non_blocking: bool = False) -> Any:
    """Copy the bytes of a frozen weight with the same shape and cast."""
    payload = weight.payload
    if payload.rewrite is not None or not _has_form(source, weight):
        return NotImplemented
    if payload.qdata.data_ptr() != source.qdata.data_ptr():
        payload.take_own_memory()
        payload.version = next(VERSIONS)
        payload.qdata.view(torch.uint8).copy_(source.qdata.view(torch.uint8))
        payload.scale.copy_(source.scale)
    return weight


Float8FrozenWeight.handlers = {torch.ops.aten.copy_.default: _copy}


_WRITES, _SAMPLE = 4, 1024
"""Number of consecutive writes that are summed, and of elements that are compared for that."""


_ROUNDING = 0.01
"""A lower bound on the relative change by rounding to E4M3, which is 0.026 for most weights."""


class Change(NamedTuple):
    """A change of a weight by one or more writes, in all elements or in a sample of them.

    Attributes:
        names: names of the operators.
        wanted: change that the operators computed.
        error: difference between the stored and the computed values.
    """

    names: tuple[str, ...]
    wanted: Tensor
    error: Tensor

    def sample(self) -> "Change":
        """Return the change of about 1,024 elements, which lie in many rows and columns."""
        step = self.wanted.numel() // _SAMPLE | 1
        return Change(self.names, *(x.flatten()[::step].clone() for x in self[1:]))

    def is_lost(self) -> Tensor:
        """Return whether rounding has lost more than half of the change, in squares, as ()."""
        return self.error.square().sum() > 0.5 * self.wanted.square().sum()


def write_change(payload: FrozenPayload, values: Tensor, func: Any) -> None:
    """Write `values`, and warn if most of the change was smaller than FP8's steps.

    Args:
        payload: payload to write to.
        values: (R, C) float32, new values.
        func: operator that computed `values` from the weight. A copy is checked if it differs from
            the weight by less than FP8's rounding, as a moving average does.
    """
    if values.is_meta:
        payload.write(values)
        return
    wanted, changes = values - payload.dequantize(torch.float32), payload.changes
    payload.write(values)
    error = payload.dequantize(torch.float32).sub_(values)
    change = Change((func.overloadpacket.__name__,), wanted, error)
    if "copy" in func.__name__:
        is_small = wanted.square().sum() < _ROUNDING**2 * values.square().sum()
        candidates, is_checked = [change], is_small
    else:
        payload.changes = [*changes, change.sample()][-_WRITES:]
        candidates, is_checked = [change, *_sums(payload.changes)], True
    lost = torch.stack([candidate.is_lost() & is_checked for candidate in candidates]).tolist()
    if any(lost):
        _warn_of_loss(payload, candidates[lost.index(True)].names)


def _sums(changes: list[Change]) -> Iterator[Change]:
    """Yield the sums of the last two, three ... changes."""
    names, wanted, error = changes[-1]
    for change in changes[-2::-1]:
        names = (*change.names, *names)
        wanted, error = wanted + change.wanted, error + change.error
        yield Change(names, wanted, error)


def _warn_of_loss(payload: FrozenPayload, names: tuple[str, ...]) -> None:
    """Warn once for all weights that were frozen together."""
    owner = None if payload.owner is None else payload.owner()
    notice = getattr(owner, "thaw_notice", None)
    if notice is not None and notice.lost:
        return
    warnings.warn(
        f"{payload.name} is stored in FP8 only, and {' and '.join(names)} changed it by less than "
        "the steps between its values, which are 6 to 12 % of each: most of the change is lost, or "
        "hidden by rounding, and equally small changes, to this or other weights, will be lost "
        "too. Make larger changes in fewer steps, or keep the weights in their own dtype: "
        "FP8Config(frozen_weights='keep') or torch_fp8.thaw(model)",
        stacklevel=3,
    )
    if notice is not None:
        notice.lost = True
