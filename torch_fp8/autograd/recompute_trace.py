"""The trace of a region's operators: what they read, write and return, as they run.

Which results may be kept for the second pass is decided here, operator by operator; which are is
decided by `torch_fp8.autograd.recompute_plan` when the region has ended.
"""

import functools
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_fp8.autograd.current_pass import SelectivePass
from torch_fp8.autograd.recompute_plan import Kind, Operation, Result, Signature, Trace

_aten: Any = torch.ops.aten

CASTS = (
    "quantize_2d",
    "quantize_2d_sum",
    "quantize_2d_delayed",
    "advance_history",
    "rms_norm_statistics",
    "rms_norm_quantize",
    "rms_norm_quantize_once",
    "rms_norm_quantize_delayed",
    "swiglu_save",
    "swiglu_quantize",
    "swiglu_quantize_delayed",
    "swiglu_save_columns",
    "column_amax",
    "smooth_factors",
    "quantize_columns",
)
"""Operators of torch_fp8 that return FP8, scales and statistics, and no 16-bit tensor."""
HISTORY = {
    "quantize_2d_delayed": slice(1),
    "advance_history": slice(-1, None),
    "rms_norm_quantize_delayed": slice(2),
    "swiglu_quantize_delayed": slice(-2),
}
"""Casts that read or move a history, and which of their tensors are no part of it."""
ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)
_UNINITIALISED = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")
OF_METADATA = (
    *("empty_like", "new_empty", "new_empty_strided", "zeros_like", "ones_like", "full_like"),
    *("new_zeros", "new_ones", "new_full", "rand_like", "randn_like", "randint_like"),
)
"""Operators that take of their tensor argument no values."""
_RESIZES = ("set_", "resize_")
_FSDP = (
    "torch.distributed.fsdp",
    "torch_fp8.distributed.fsdp.all_gather",
    "torch_fp8.distributed.fsdp.connect",
    "torch_fp8.distributed.fsdp.reduce_scatter",
    "torch_fp8.distributed.fsdp.split_weights",
)
_DETACH = _aten.detach.default
"""Checkpoint itself calls it more often in the second pass than in the first."""


class Recorder(SelectivePass):
    """Writes the trace, and keeps what may turn out to be needed.

    Attributes:
        trace: of the operators so far.
        kept: ``{(operation, result): tensor}``, with the version that the tensor had.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.trace = Trace()
        self.kept: dict[tuple[int, int], tuple[Tensor, int]] = {}
        self._numbers: dict[int, int] = {}
        self._storages: list[StorageWeakRef] = []  # alive, so that no address is used twice
        self._made: set[int] = set()  # storages that are not there anyway; see `Kind.CHEAP`
        self._unwritten: set[int] = set()

    def forget(self) -> None:
        """Let go of tensors and storages; the trace stays."""
        for held in (self.kept, self.forms, self._numbers, self._storages):
            held.clear()

    def note_saved(self, x: Tensor) -> None:
        """Autograd saves x."""
        trace = self.trace
        for part in _parts(x):
            number = None if part is None else self._number(part)
            if number is None or number in self._unwritten:
                trace.opaque = len(trace.operations)
            if number is not None:
                trace.saved[len(trace.operations)].add(number)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.pauses or is_unrecorded(func):
            return func(*args, **kwargs)
        if types:
            return NotImplemented  # a subclass says what it is made of
        arguments = list(tensors_of(args, kwargs))
        numbers = [self._number(t) for t in arguments]
        made = func(*args, **kwargs)
        written = list(_written(func, args, kwargs))
        self._note(func, written, arguments, numbers, made, not is_random(func, args, kwargs))
        return made

    def _note(
        self,
        func: Any,
        written: list[Tensor],
        arguments: list[Tensor],
        numbers: list[int | None],
        made: Any,
        fixed: bool,
    ) -> None:
        trace, index, name = self.trace, len(self.trace.operations), operator_name(func)
        values = made if isinstance(made, (tuple, list)) else (made,)
        results = [self._result(t, arguments) for t in values]
        reads = {n for n in numbers if n is not None and name not in OF_METADATA}
        writes = {n for t in written if (n := self._number(t)) is not None}
        if name in HISTORY:
            reads, writes = {n for n in numbers[HISTORY[name]] if n is not None}, set()
        returned = {r.storage for r in results if r is not None}
        told = isinstance(func, torch._ops.OpOverload) and None not in numbers
        fixed = fixed and all(t is None or r for t, r in zip(values, results, strict=True))
        if not told or (reads - writes) & self._unwritten or name in _RESIZES:
            trace.opaque = index
        self._unwritten -= reads | writes
        if not told or not fixed:
            kind = Kind.FORCED
        elif name in ATTENTION:
            kind = Kind.KEPT
        elif name in CASTS:
            own = Kind.HISTORY if name in HISTORY else Kind.CHEAP
            kind = Kind.KEPT if reads & self._made else own
        else:
            kind = Kind.VIEW if returned and not writes and returned <= reads else Kind.PLAIN
        if name in _UNINITIALISED and kind is Kind.PLAIN:
            self._unwritten |= {r.storage for r in results if r is not None and 0 not in r.size}
        if kind in (Kind.PLAIN, Kind.FORCED, Kind.KEPT):
            numerous = {r.storage for r in results if r is not None and r.size}
            self._made |= writes | (numerous if name in CASTS else returned)
        if kind in (Kind.KEPT, Kind.CHEAP, Kind.HISTORY):
            for j, t in enumerate(values):
                if kind is Kind.KEPT or not t.ndim:
                    alias = _alias(t)
                    self.kept[index, j] = alias, alias._version
        trace.operations.append(
            Operation(
                func,
                signature_of(arguments),
                frozenset(reads),
                frozenset(writes),
                results,
                None if values is not made else type(made),
                kind,
            )
        )

    def _number(self, x: Tensor) -> int | None:
        """Number the storage of `x` in the trace; None where it has none that can be told."""
        try:
            # A weight that is watched would count a write.
            storage = Tensor.untyped_storage(x)
        except (NotImplementedError, RuntimeError):
            return None
        number = self._numbers.get(storage._cdata)
        if number is None:
            number = self._numbers[storage._cdata] = len(self._storages)
            self._storages.append(StorageWeakRef(storage))
        return number

    def _result(self, x: Any, arguments: list[Tensor]) -> Result | None:
        if not isinstance(x, Tensor):
            return None
        number = self._number(x)
        if number is None:
            return None
        same = next((i for i, t in enumerate(arguments) if t is x), None)
        return Result(number, tuple(x.shape), x.stride(), x.dtype, x.device, same)


def is_unrecorded(func: Any) -> bool:
    """Whether an operator is no part of a trace: both passes run it as it comes."""
    return func is _DETACH or getattr(func, "namespace", "") == "prim" or _is_fsdp()


def _is_fsdp() -> bool:
    """Whether FSDP2 is at work on parameters, in hooks of a module that is called in the region.

    In backward it has gathered them already when the region is run again.
    """
    frame: FrameType | None = sys._getframe(3)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_FSDP):
            return True
        if module == "torch.nn.modules.module":
            return False
        frame = frame.f_back
    return False


@functools.cache
def operator_name(func: Any) -> str:
    """Names carry no overload; only torch's and our operators have one."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace not in ("aten", "torch_fp8"):
        return ""
    return func._schema.name.rpartition("::")[2]


def tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors among the arguments of an operator, those in lists included."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (v for v in value if isinstance(v, Tensor))


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for i, name in _writable(func):
        yield from tensors_of((args[i] if i < len(args) else kwargs.get(name),), {})


@functools.cache
def _writable(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that an operator writes."""
    if not isinstance(func, torch._ops.OpOverload):
        return ()
    arguments = enumerate(func._schema.arguments)
    return tuple((i, a.name) for i, a in arguments if a.alias_info and a.alias_info.is_write)


def is_random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator moves the state of a random generator; attention only with dropout."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    if operator_name(func) not in ATTENTION:
        return True
    return bool(argument_of(func, "dropout_p", args, kwargs))


def argument_of(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operator was given for an argument; None if it has none of this name."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            default = argument.default_value
            return args[i] if i < len(args) else kwargs.get(name, default)
    return None


def signature_of(tensors: list[Tensor]) -> Signature:
    """What both passes have to agree in, beside the operator."""
    return tuple((t.shape, t.dtype) for t in tensors)


def _parts(x: Tensor) -> Iterator[Tensor | None]:
    """The plain tensors that x is made of; None for what cannot be told."""
    if is_traceable_wrapper_subclass(x):
        parts = (getattr(x, name) for name in x.__tensor_flatten__()[0])
        for part in parts:
            if isinstance(part, Tensor):  # a DTensor has its mesh among them
                yield from _parts(part)
    else:
        yield None if type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__ else x


def _alias(x: Tensor) -> Tensor:
    """x without its graph, with the version that writes to x move."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return x.detach()
