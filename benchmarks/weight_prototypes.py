"""Prototypes of three ways to hold a float32 weight as a BF16 half and a residual.

User code has to see one float32 weight; a layer and an optimizer of ours take the halves.

* `Subclass` (a): a Parameter subclass over real BF16 storage. Its ``__torch_function__`` and its
  properties present float32. C++ sees a BF16 tensor.
* `Scoped` (b): a plain BF16 Parameter with the residual as its attribute, and a scope in which it
  is float32.
* `Wrapped` (c): a wrapper without storage. Python and C++ see float32; ``__torch_dispatch__`` joins
  for each reader and splits after each writer.

`benchmarks.weight_designs` runs the same properties over them. They are as small as the properties
allow, and no part of the library.
"""

import contextlib
import weakref
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

aten = torch.ops.aten
HALF, FULL = torch.bfloat16, torch.float32


class Split:
    """Memory of a weight: a BF16 half, and below it 16 bits, or 8 since the optimizer's step."""

    def __init__(self, hi: Tensor, lo: Tensor) -> None:
        self.hi, self.lo, self.writes, self.copy = hi, lo, 0, None

    @classmethod
    def of(cls, weight: Tensor) -> "Split":
        hi, lo = _halves(weight)
        return cls(hi, lo)

    def join(self) -> Tensor:
        lo = self.lo.to(torch.int32) << (8 if self.lo.dtype == torch.int8 else 0)
        return ((self.hi.view(torch.int16).to(torch.int32) << 16) + lo).view(FULL)

    def write(self, weight: Tensor) -> None:
        hi, lo = _halves(weight)
        self.hi.copy_(hi)
        if self.lo.dtype == lo.dtype:
            self.lo.copy_(lo)
        else:
            self.lo = lo
        self.writes += 1

    def compress(self, weight: Tensor) -> None:
        """Write what an optimizer's step has computed, rounded stochastically to 24 bits."""
        i = weight.view(torch.int32).to(torch.int64)
        word = (i + torch.randint(0, 256, i.shape, device=i.device)) >> 8
        hi = (word + 128) >> 8
        self.hi.copy_(hi.to(torch.int16).view(HALF))
        self.lo = (word - (hi << 8)).to(torch.int8)
        self.writes += 1

    def parts(self) -> dict[str, Tensor]:
        return {"hi": self.hi, "lo": self.lo}


class Rounded:
    """Memory of a gradient: BF16."""

    def __init__(self, hi: Tensor) -> None:
        self.hi, self.writes, self.copy = hi, 0, None

    def join(self) -> Tensor:
        return self.hi.float()

    def write(self, value: Tensor) -> None:
        self.hi.copy_(value)
        self.writes += 1

    def parts(self) -> dict[str, Tensor]:
        return {"hi": self.hi}


Memory = Split | Rounded


def _halves(weight: Tensor) -> tuple[Tensor, Tensor]:
    i = weight.contiguous().view(torch.int32).to(torch.int64)
    hi = (i + 0x8000) >> 16
    return hi.to(torch.int16).view(HALF), (i - (hi << 16)).to(torch.int16)


def _shared(cls: type, parts: dict[str, Tensor], memory: type, grad: bool) -> Tensor:
    return cls._parameter(memory(**parts), grad)  # type: ignore[attr-defined]


def _targets(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[i] if i < len(args) else kwargs.get(argument.name)


class Presented(Tensor):
    """Python's side of a tensor that presents `memory` as float32, through a chain of views."""

    memory: Memory
    views: tuple[Any, ...]

    def join(self, full: Tensor | None = None) -> Tensor:
        full = self.memory.join() if full is None else full
        for view in self.views:
            full = view(full)
        return full

    def _plain(self) -> Tensor:
        joined = self.join().clone()
        is_parameter = getattr(self, "_is_param", False)
        return nn.Parameter(joined, self.requires_grad) if is_parameter else joined

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), self._plain())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def __repr__(self, **kwargs: Any) -> str:
        return repr(self._plain())

    def tolist(self) -> Any:
        return self.join().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad.")
        array = self.join().numpy()
        array.flags.writeable = False  # a write could not be seen
        return array

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.join().__dlpack__(**kwargs)

    def _copy(self) -> Tensor:
        """Joined memory for those that read a pointer; it lives as long as an alias of `memory`."""
        known = self.memory.copy
        copy = known[1]() if known and known[0] == self.memory.writes else None
        if copy is None:
            copy = self.memory.join()
            self.memory.copy = (self.memory.writes, weakref.ref(copy))
        self._held = copy
        return self.join(copy)

    def data_ptr(self) -> int:
        """Return joined memory's address for an alias, as a state dict has them."""
        return self._pointed().data_ptr()

    def untyped_storage(self) -> Any:
        return self._pointed().untyped_storage()

    def _pointed(self) -> Any:
        memory = self.memory.hi
        return super() if hasattr(self, "_is_param") or type(memory) is not Tensor else self._copy()

    def share_memory_(self) -> Tensor:
        for part in self.memory.parts().values():
            part.share_memory_()
        return self


# ---- a: a Parameter subclass over real BF16 storage ----------------------------------------------

_RAW = {
    *(
        "size",
        "stride",
        "dim",
        "numel",
        "nelement",
        "ndimension",
        "is_contiguous",
        "storage_offset",
    ),
    *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad"),
    *("__hash__", "__len__", "get_device", "is_floating_point", "is_complex", "_is_view"),
    *("untyped_storage", "data_ptr", "is_shared", "_typed_storage", "grad", "backward"),
}
_VIEWS = {
    *("view", "__getitem__", "t", "transpose", "permute", "chunk", "split", "unbind", "narrow"),
    *("select", "unsqueeze", "squeeze", "expand", "flatten", "reshape", "diagonal", "view_as"),
    *("contiguous", "adjoint", "tensor_split", "unflatten", "__iter__", "alias"),
}


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Any) -> Tensor:
        return weight.join()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Stored(Presented):
    """A BF16 tensor that Python sees as float32."""

    @staticmethod
    def _alias(raw: Tensor, memory: Memory, views: Any = ()) -> "Stored":
        alias = raw.detach().as_subclass(Stored)
        alias.memory, alias.views = memory, tuple(views)
        return alias

    @classmethod
    def _parameter(cls, memory: Split, grad: bool) -> Tensor:
        parameter = nn.Parameter(memory.hi, grad)
        parameter.grad_dtype = None  # takes a gradient in either dtype
        parameter.__class__ = cls
        vars(parameter).update(memory=memory, views=(), _is_param=True)
        return parameter

    dtype = property(lambda self: FULL)
    itemsize = property(lambda self: 4)
    nbytes = property(lambda self: 4 * self.numel())
    T = property(lambda self: self.t() if self.dim() == 2 else self)
    mT = property(lambda self: self.transpose(-2, -1))

    def element_size(self) -> int:
        return 4

    @property
    def data(self) -> "Stored":
        return self._alias(_raw(self), self.memory, self.views)

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape == self.shape and value.dtype in (HALF, FULL):
            with torch.no_grad():
                self.data.copy_(value)
        else:
            with torch._C.DisableTorchFunctionSubclass():
                Tensor.data.__set__(self, value if type(value) is Tensor else value.join())
            self.__class__ = nn.Parameter

    def detach(self) -> "Stored":
        return self.data

    @property
    def grad(self) -> Tensor | None:
        with torch._C.DisableTorchFunctionSubclass():
            grad = Tensor.grad.__get__(self)
        return _presented_alias(grad)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            Tensor.grad.__set__(self, _raw(value) if isinstance(value, Stored) else value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.__name__
        if name in ("__get__", "__set__", "__delete__") or name in _RAW:
            with torch._C.DisableTorchFunctionSubclass():
                out = func(*args, **kwargs)
            if name == "grad":
                out = tuple(_presented_alias(g) for g in out)
            return out
        flat = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Stored)]
        writes = name == "__setitem__" or kwargs.get("out") is not None
        writes = writes or (name[-1] == "_" and (name[-2:] != "__" or name[:3] == "__i"))
        if name in ("__invert__", "__int__", "__index__", "__iter__"):
            writes = False
        grad = torch.is_grad_enabled() and any(x.requires_grad for x in flat)
        if writes and grad and isinstance(args[0], Stored) and args[0].requires_grad:
            raise RuntimeError(
                "a leaf Variable that requires grad is used in an in-place operation"
            )
        if name in _VIEWS and not grad and isinstance(args[0], Stored):
            return _view(args[0], func, args[1:], kwargs)
        fulls: dict[int, Tensor] = {}
        joined: dict[int, Tensor] = {}

        def plain(x: Any) -> Any:
            if not isinstance(x, Stored):
                return x
            if grad and x.requires_grad and not writes:
                return _Join.apply(x)
            full = fulls.setdefault(id(x.memory), x.memory.join())
            return joined.setdefault(id(x), x.join(full))

        out = func(*pytree.tree_map(plain, args), **pytree.tree_map(plain, kwargs))
        if writes:
            for memory in {id(x.memory): x.memory for x in flat}.values():
                memory.write(fulls[id(memory)])
            back = {id(joined[id(x)]): x for x in flat}
            out = pytree.tree_map(lambda x: back.get(id(x), x), out)
        return out


def _presented_alias(grad: Any) -> Any:
    return Stored._alias(grad, Rounded(grad)) if grad is not None and grad.dtype == HALF else grad


def _raw(x: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return Tensor.detach(x).as_subclass(Tensor)


def _view(x: Stored, func: Any, args: Any, kwargs: Any) -> Any:
    def presented(raw: Tensor, *index: int) -> Tensor:
        def replay(full: Tensor) -> Tensor:
            out = func(full, *args, **kwargs)
            return list(out)[index[0]] if index else out

        if raw.untyped_storage().data_ptr() != _raw(x).untyped_storage().data_ptr():
            return replay(x.join())
        return Stored._alias(raw, x.memory, (*x.views, replay))

    out = func(_raw(x), *args, **kwargs)
    if isinstance(out, Tensor):
        return presented(out)
    return [presented(raw, i) for i, raw in enumerate(out)]


# ---- c: a wrapper without storage ----------------------------------------------------------------


class Wrapper(Presented):
    """A float32 tensor without storage over `memory`."""

    @staticmethod
    def __new__(cls: Any, memory: Memory, views: Any = (), geometry: Any = None) -> "Wrapper":
        like = memory.hi if geometry is None else geometry
        wrapper = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=FULL, device=like.device
        )
        wrapper.memory, wrapper.views, wrapper.geometry = memory, tuple(views), like
        return wrapper

    def __init__(self, *args: Any) -> None:
        pass

    @classmethod
    def _parameter(cls, memory: Split, grad: bool) -> Tensor:
        parameter = cls(memory).requires_grad_(grad)
        parameter._is_param = True  # as nn.Parameter does for a subclass
        return parameter

    hi = property(lambda self: self.join(self.memory.hi))
    lo = property(lambda self: self.join(self.memory.lo))

    def __tensor_flatten__(self) -> tuple[list[str], type]:
        return list(self.memory.parts()), type(self.memory)

    @staticmethod
    def __tensor_unflatten__(inner: Any, memory: type, size: Any, stride: Any) -> "Wrapper":
        return Wrapper(memory(**inner))

    def _stable_hash_for_caching(self) -> str:
        return type(self.memory).__name__

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if isinstance(value, Wrapper) and value.device != self.device:
            self.memory = value.memory  # moved
        if (value.shape, value.dtype, value.device) == (self.shape, FULL, self.device):
            with torch.no_grad():
                self.detach().copy_(value)
        else:
            exchange(self, nn.Parameter(value, self.requires_grad))

    # What FSDP2 asks of a shard: the BF16 half travels.
    def fsdp_pre_all_gather(
        self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any
    ) -> tuple[tuple[Tensor], Any]:
        padding = -(-size[0] // mesh.size()) - self.shape[0]
        pad = (0, 0) * (self.dim() - 1) + (0, padding)
        return (nn.functional.pad(self.hi, pad),), size[0]

    def fsdp_post_all_gather(self, outputs: Any, size: int, dtype: Any, *, out: Any = None) -> Any:
        return None if out is not None else (outputs[0][:size], outputs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func.__name__.startswith("linalg_"):  # takes another algorithm for a subclass
                joined = pytree.tree_map_only(Wrapper, Tensor.clone, (args, kwargs))
                args, kwargs = joined
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func in (aten.detach.default, aten.alias.default):
            return cls(first.memory, first.views, first.geometry)
        if func is aten._to_copy.default and kwargs.keys() == {"device"} and not first.views:
            parts = {k: v.to(kwargs["device"]) for k, v in first.memory.parts().items()}
            return Wrapper(type(first.memory)(**parts))
        aliases = [a.alias_info for a in func._schema.arguments if a.alias_info is not None]
        collective = func.namespace == "c10d"  # has no annotations; its output may come later
        writes = collective or any(a.is_write for a in aliases)
        if (
            aliases
            and not writes
            and isinstance(first, Wrapper)
            and type(first.memory.hi) is Tensor
        ):
            return _replayed(first, func, args[1:], kwargs)
        fulls: dict[int, Tensor] = {}
        joined: dict[int, Tensor] = {}

        def plain(x: Any) -> Any:
            if not isinstance(x, Wrapper):
                return x
            if id(x.memory) not in fulls:
                fulls[id(x.memory)] = x.memory.join()
            if id(x) not in joined:
                joined[id(x)] = x.join(fulls[id(x.memory)])
            return joined[id(x)]

        out = func(*pytree.tree_map(plain, args), **pytree.tree_map(plain, kwargs))
        if writes:
            for work in pytree.tree_leaves(out) if collective else ():
                if isinstance(work, torch.ScriptObject):
                    work.wait()
            targets = args if collective else list(_targets(func, args, kwargs))
            flat = pytree.tree_leaves(targets)
            targets = [x for x in flat if isinstance(x, Wrapper)]
            for memory in {id(x.memory): x.memory for x in targets}.values():
                memory.write(fulls[id(memory)])
            back = {id(joined[id(x)]): x for x in targets}
            out = pytree.tree_map(lambda x: back.get(id(x), x), out)
        return out


def _replayed(x: Wrapper, func: Any, args: Any, kwargs: Any) -> Any:
    geometry = func(x.geometry, *args, **kwargs)
    if isinstance(geometry, Tensor):
        return type(x)(x.memory, (*x.views, lambda t: func(t, *args, **kwargs)), geometry)
    return [
        type(x)(x.memory, (*x.views, lambda t, i=i: func(t, *args, **kwargs)[i]), part)
        for i, part in enumerate(geometry)
    ]


def exchange(parameter: Tensor, other: Tensor) -> None:
    """Give a Parameter the implementation of another tensor.

    Unlike ``torch.utils.swap_tensors`` it takes a Parameter that has weak references, which still
    lead to the same object, and it keeps hooks, their handles and the gradient.
    """
    hooks, grad = parameter._backward_hooks, parameter.grad
    accumulated = parameter._post_accumulate_grad_hooks
    parameter.grad = parameter._backward_hooks = None
    own = {k: v for k, v in vars(parameter).items() if k not in ("memory", "views", "geometry")}
    attributes = {**own, **vars(other)}
    parameter.__class__, other.__class__ = type(other), type(parameter)
    torch._C._swap_tensor_impl(parameter, other)
    vars(parameter).clear()
    vars(parameter).update(attributes)
    other.register_post_accumulate_grad_hook(lambda old: _deliver(old, parameter))
    same = grad is not None and grad.shape == parameter.shape and grad.dtype == parameter.dtype
    parameter.grad = grad if same else None
    if hooks is not None:
        parameter._backward_hooks = hooks
    if accumulated is not None:
        parameter._post_accumulate_grad_hooks = accumulated


def _deliver(old: Any, parameter: Any) -> None:
    """Take a gradient of a graph that was made before the exchange."""
    grad, old.grad = old.grad, None
    parameter.grad = grad if parameter.grad is None else parameter.grad + grad


for _cls in (Stored, Wrapper):

    def _reduce(x: Any) -> Any:
        return _shared, (type(x), x.memory.parts(), type(x.memory), x.requires_grad)

    ForkingPickler.register(_cls, _reduce)


# ---- the layer and the step that take halves -----------------------------------------------------


@torch.library.custom_op("weight_designs::product", mutates_args=())
def product(input: Tensor, high: Tensor) -> Tensor:
    """Multiply as a layer of ours does: an operator that takes the BF16 half."""
    return input.to(HALF) @ high.t()


@product.register_fake
def _(input: Tensor, high: Tensor) -> Tensor:
    return input.new_empty((*input.shape[:-1], high.shape[0]), dtype=HALF)


def high(weight: Tensor) -> Tensor:
    """Return the BF16 half of any design's weight."""
    if isinstance(weight, Wrapper):
        return weight.hi
    return weight.memory.hi if isinstance(weight, Stored) else weight.detach().to(HALF)


@torch._dynamo.allow_in_graph
def _presented(grad: Tensor) -> Tensor:
    return Wrapper(Rounded(grad))


class Product(torch.autograd.Function):
    """input (M, K), weight (N, K) -> (M, N) bfloat16; the weight's gradient is BF16 in memory."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(input, weight)
        return product(input, high(weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled():
            raise NotImplementedError("refused: a higher-order gradient through an FP8 layer")
        input, weight = ctx.saved_tensors
        grad_weight = grad.t() @ input.to(HALF)
        if isinstance(weight, Wrapper):
            grad_weight = _presented(grad_weight)
        return (grad @ high(weight)).to(input.dtype), grad_weight


class HalfLinear(nn.Linear):
    """A layer of ours."""

    def forward(self, input: Tensor) -> Tensor:
        return Product.apply(input, self.weight)


class Design:
    """Float32 weights as BF16-mixed has them; each design changes what differs."""

    def convert_parameter(self, parameter: Any) -> None:
        pass

    def convert(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            self.convert_parameter(parameter)

    def joined(self, x: Tensor) -> Tensor:
        return x.join() if isinstance(x, Presented) else x.detach()

    def scope(self, model: nn.Module) -> Any:
        return contextlib.nullcontext()

    def revert(self, model: nn.Module) -> None:
        pass

    def write_step(self, parameter: Any, weight: Tensor) -> None:
        """Take what an optimizer of ours has computed, as 8 bits below BF16."""
        parameter.memory.compress(weight)

    def stamp(self, parameter: Any) -> int:
        """Return what a layer compares to know whether its FP8 copy of a weight is stale."""
        return parameter._version

    def parts(self, x: Any) -> list[Tensor]:
        return list(x.memory.parts().values()) if isinstance(x, Presented) else [x]


class Subclass(Design):
    def convert_parameter(self, parameter: Any) -> None:
        memory, grad = Split.of(parameter.detach()), parameter.grad
        parameter.grad = None
        parameter.data = memory.hi
        parameter.grad_dtype = None
        memory.hi = parameter.detach()  # one version counter
        parameter.__class__ = Stored
        vars(parameter).update(memory=memory, views=(), _is_param=True)
        parameter.grad = grad

    def revert(self, model: nn.Module) -> None:
        for p in model.parameters():
            joined, grad = p.join(), p.grad
            p.__class__, p.grad = nn.Parameter, None
            p.data, p.grad_dtype = joined, FULL
            p.grad = None if grad is None else grad.float()
            vars(p).clear()

    def stamp(self, parameter: Any) -> int:
        return parameter.memory.writes


class Scoped(Design):
    def __init__(self, entered: bool) -> None:
        self.entered = entered

    def convert_parameter(self, parameter: Any) -> None:
        memory, grad = Split.of(parameter.detach()), parameter.grad
        parameter.grad = None
        parameter.data, parameter.lo, parameter.grad_dtype = memory.hi, memory.lo, None
        parameter.grad = grad

        def copied(memo: dict[int, Any]) -> Tensor:  # both halves
            copy = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            copy.lo = parameter.lo.clone()
            return memo.setdefault(id(parameter), copy)

        parameter.__deepcopy__ = copied

    def joined(self, x: Tensor) -> Tensor:
        x_lo = vars(x).get("lo") if x.dtype == HALF else None
        return x.detach() if x_lo is None else Split(x.detach(), x_lo).join()

    @contextlib.contextmanager
    def _full_precision(self, model: nn.Module) -> Iterator[None]:
        inside = [p for p in model.parameters() if self.joined(p).dtype != p.dtype]
        for p in inside:
            grad = p.grad
            p.grad = None
            p.data, p.grad_dtype = self.joined(p), FULL
            p.grad = None if grad is None else grad.float()
        try:
            yield
        finally:
            for p in [p for p in inside if p.dtype == FULL]:  # others have left for a dtype
                memory, grad = Split.of(p.detach().float()), p.grad
                p.grad = None
                p.data, p.lo, p.grad_dtype = memory.hi, memory.lo, None
                p.grad = None if grad is None else grad.to(HALF)

    def scope(self, model: nn.Module) -> Any:
        return self._full_precision(model) if self.entered else contextlib.nullcontext()

    def revert(self, model: nn.Module) -> None:
        for p in model.parameters():
            joined, grad = self.joined(p), p.grad
            p.grad, p.data, p.grad_dtype = None, joined, FULL
            p.grad = None if grad is None else grad.float()
            vars(p).clear()

    def write_step(self, parameter: Any, weight: Tensor) -> None:
        memory = Split(parameter.detach(), parameter.lo)
        memory.compress(weight)
        parameter.lo = memory.lo

    def parts(self, x: Any) -> list[Tensor]:
        return [x, *([vars(x)["lo"]] if "lo" in vars(x) else [])]


class Wrapped(Design):
    def convert_parameter(self, parameter: Any) -> None:
        memory = Split.of(parameter.detach())
        exchange(parameter, Wrapper._parameter(memory, parameter.requires_grad))

    def revert(self, model: nn.Module) -> None:
        for p in model.parameters():
            exchange(p, nn.Parameter(p.join(), p.requires_grad))

    def stamp(self, parameter: Any) -> int:
        return parameter.memory.writes


DESIGNS: dict[str, Design] = {
    "stock": Design(),
    "a": Subclass(),
    "b": Scoped(entered=False),
    "b in scope": Scoped(entered=True),
    "c": Wrapped(),
}
