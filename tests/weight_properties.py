# ruff: noqa: E501, RUF015, B018 (one property a line)
"""Properties of a float32 weight that user code relies on.

A property is a function of a `Kit` that returns what user code would see. It is compared, as are all
weights and gradients afterwards, bit for bit with the same on stock float32 weights.
"""

import copy
import ctypes
import io
import pickle
import tempfile
import weakref
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy
import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils import _pytree as pytree

from tests.internals import EXACT_BITS, SplitTensor, half, join_parameter, plain, split_parameter

SIDE = 64
Property = Callable[["Kit"], Any]
PROPERTIES: dict[str, dict[str, Property]] = {}
NEAR: dict[str, float] = {}
"""Properties that a half precision gradient or a compiler may move: relative tolerance."""


@torch.library.custom_op("weight_properties::product", mutates_args=())
def product(input: Tensor, high: Tensor) -> Tensor:
    """Multiply as an FP8 layer does: an operator that takes the BF16 half."""
    return input.to(torch.bfloat16) @ high.t()


@product.register_fake
def _(input: Tensor, high: Tensor) -> Tensor:
    return input.new_empty((*input.shape[:-1], high.shape[0]), dtype=torch.bfloat16)


class Product(torch.autograd.Function):
    """input (M, K), half of a weight (N, K) -> (M, N) bfloat16."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, high: Tensor) -> Tensor:
        ctx.save_for_backward(input, high)
        return product(input, high)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled():
            raise NotImplementedError("refused: a higher-order gradient through an FP8 layer")
        input, high = ctx.saved_tensors
        return (grad @ high).to(input.dtype), grad.t() @ input.to(torch.bfloat16)


class HalfLinear(nn.Linear):
    """A layer that takes the half of a split weight, and of a stock one its BF16 value."""

    def forward(self, input: Tensor) -> Tensor:
        split = isinstance(self.weight, SplitTensor)
        return Product.apply(input, half(self.weight) if split else self.weight.to(torch.bfloat16))


class Stock:
    """Float32 weights as BF16-mixed has them."""

    def convert(self, model: nn.Module) -> None:
        pass

    def joined(self, x: Tensor) -> Tensor:
        return plain(x).detach()

    def revert(self, model: nn.Module) -> None:
        pass

    def write_step(self, parameter: Any, weight: Tensor) -> None:
        """Take what an optimizer of ours has computed, as 8 bits below BF16."""
        parameter.data.copy_(weight)

    def stamp(self, parameter: Any) -> int:
        """Return what a layer compares to know whether its FP8 copy of a weight is stale."""
        return parameter._version


class Split(Stock):
    """The weights of O2 and O3."""

    def convert(self, model: nn.Module) -> None:
        """Split each weight into 24 bits if they hold it, and into 32 otherwise."""
        for parameter in model.parameters():
            last = 0 if parameter.is_meta else (parameter.detach().view(torch.int32) & 0xFF).any()
            split_parameter(parameter, EXACT_BITS if last else 8)

    def revert(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            join_parameter(parameter)

    def write_step(self, parameter: Any, weight: Tensor) -> None:
        parameter.halves.write(weight)
        parameter.halves.settle((1, 2))

    def stamp(self, parameter: Any) -> int:
        return parameter.halves.version


class Kit:
    """A small model under a design, with gradients; what a property takes from it."""

    def __init__(self, design: Stock, convert: bool = True) -> None:
        self.design, self.models = design, []
        torch.manual_seed(0)
        self.m = nn.Sequential(
            HalfLinear(SIDE, SIDE, bias=False), nn.ReLU(), HalfLinear(SIDE, SIDE, bias=False)
        )
        self.x, self.u = torch.randn(32, SIDE), torch.randn(SIDE)
        self.p = self.m[0].weight
        for p in self.m.parameters():  # 24 bits until something is written, and no ties in BF16
            p.data = ((p.data.view(torch.int32) >> 8 | 1) << 8).view(torch.float32)
        if convert:
            self.convert()

    def convert(self, model: nn.Module | None = None) -> nn.Module:
        model = model or self.m
        self.design.convert(model)
        self.models.append(model)
        return model

    @cached_property
    def grads(self) -> None:
        self.loss(self.m).backward()

    def loss(self, model: Any) -> Tensor:
        return (model(self.x).float() - self.x).square().mean()

    def train(self, optimizer: Any, steps: int = 3, model: Any = None) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            self.loss(model or self.m).backward()
            optimizer.step()

    def adamw(self, lr: float = 1e-3, **options: Any) -> Any:
        return torch.optim.AdamW(self.m.parameters(), lr=lr, **options)

    def plain(self, value: Any) -> Any:
        """Return what a property has returned as plain tensors and simple values."""

        def one(x: Any) -> Any:
            if isinstance(x, Tensor):
                return self.design.joined(x).clone()
            return torch.from_numpy(x.copy()) if isinstance(x, numpy.ndarray) else x

        return pytree.tree_map(one, value)

    def weights(self) -> Any:
        parameters = [p for model in self.models for p in model.parameters()]
        grads = [None if p.grad is None else self.plain(p.grad).float() for p in parameters]
        joined = [self.design.joined(p) for p in parameters]
        return self.plain(joined), grads


def row(section: str, near: float = 0.0) -> Callable[[Property], Property]:
    def decorate(function: Property) -> Property:
        add(section, function.__name__.replace("_", " "), function, near)
        return function

    return decorate


def add(section: str, name: str, function: Property, near: float = 0.0) -> None:
    PROPERTIES.setdefault(section, {})[name] = function
    if near:
        NEAR[f"{section}/{name}"] = near


def rows(section: str, near: float = 0.0, /, **functions: Property) -> None:
    for name, function in functions.items():
        add(section, name.replace("_", " "), function, near)


def _set_grad(k: Kit) -> Any:
    k.p.grad = torch.full((SIDE, SIDE), 0.1)
    return k.p.grad


def _grads_of_a_task(k: Kit) -> Tensor:
    grads = torch.zeros(2, k.p.numel())
    grads[0].copy_(k.p.grad.view(-1))
    return grads


def _zeros() -> Tensor:
    return torch.zeros(SIDE, SIDE)


def _spectral(k: Kit) -> Any:
    k.m.zero_grad()
    torch.manual_seed(1)
    return nn.utils.parametrizations.spectral_norm(k.m[2]).weight


def _w(k: Kit) -> Tensor:
    return k.p.detach()


SQUARE = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(2))
MASK = SQUARE > 0


# 1. The operations of a user's code that work under BF16-mixed.
READS: dict[str, Property] = {
    "weight numpy": lambda k: _w(k).numpy(),
    "state dict numpy": lambda k: [v.numpy() for v in k.m.state_dict().values()],
    "grad numpy": lambda k: k.p.grad.numpy(),
    "assign a float32 gradient": _set_grad,
    "gradients of a task": _grads_of_a_task,
    "cat of gradients": lambda k: torch.cat([q.grad.flatten() for q in k.m.parameters()]),
    "svd": lambda k: torch.linalg.svdvals(_w(k)),
    "histc": lambda k: torch.histc(_w(k), 10),
    "orthogonal_": lambda k: nn.init.orthogonal_(k.p),
    "power iteration": lambda k: torch.mv(k.p, k.u),
    "head outside": lambda k: F.linear(k.x, k.p),
    "lerp_ from a weight": lambda k: _zeros().lerp_(_w(k), 0.1),
    "spectral_norm": _spectral,
    "vector there and back": lambda k: vector_to_parameters(
        parameters_to_vector(k.m.parameters()) * 1.01, k.m.parameters()
    ),
    "float loss": lambda k: (k.m.zero_grad(), F.mse_loss(k.p, _zeros()).backward())[1],
    "clip_grad_value_": lambda k: nn.utils.clip_grad_value_(k.m.parameters(), 1e-4),
    "kind": lambda k: (
        k.p.shape,
        k.p.stride(),
        k.p.is_leaf,
        k.p.is_contiguous(),
        k.p.numel(),
        k.p.ndim,
    ),
    "place": lambda k: (k.p.layout, k.p.device, k.p.is_meta, k.p.type(), k.p.itemsize),
    "to itself": lambda k: (k.p.cpu() is k.p, k.p.to("cpu", torch.float32) is k.p),
    "other dtypes": lambda k: (k.p.half(), k.p.bfloat16(), k.p.int(), k.p.double()),
    "columns": lambda k: k.p[:, ::3],
    "by a mask": lambda k: k.p[MASK],
    "view": lambda k: k.p.view(-1, 4),
    "where": lambda k: torch.where(MASK, k.p, 0),
    "right operand": lambda k: 1 - SQUARE * k.p,
    "promoted": lambda k: (k.p + k.u.double(), k.p + k.u.bfloat16()),
    "comparison": lambda k: (k.p > 0, torch.equal(k.p, k.p), torch.equal(k.p, _w(k) + 1)),
    "in lists": lambda k: (
        torch._foreach_mul([SQUARE, k.p], 3.0),
        torch._foreach_norm([k.p, SQUARE]),
    ),
    "added to a list": lambda k: torch._foreach_add([SQUARE, SQUARE], [_w(k), SQUARE]),
    "einsum": lambda k: torch.einsum("bi,oi->bo", k.x, k.p),
    "format": lambda k: f"{k.p[0, 0]:.3f}",
}


def _under_autocast(k: Kit, read: Property) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return read(k)


for _name, _read in READS.items():
    _near = 2**-8 if _name == "clip_grad_value_" else 0.0  # the bound in BF16
    add("1 reading", _name, lambda k, f=_read: (k.grads, f(k))[1], _near)
    add("1 reading, autocast", _name, lambda k, f=_read: (k.grads, _under_autocast(k, f))[1], _near)

MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "cpu": lambda w: w.cpu(),
    "to": lambda w: w.to("cpu"),
    "float": lambda w: w.float(),
}
USES: dict[str, Callable[[Tensor], Any]] = {
    "element": lambda w: w[3, 4].item(),
    "transpose": lambda w: w.t(),
    "bits": lambda w: w.view(torch.int32),
    "rows": lambda w: list(w.chunk(3)),
    "write": lambda w: w.mul_(2).sum(),
    "row write": lambda w: (w[1].zero_(), w)[1],
    "sharing": lambda w: (w.is_shared(), w.share_memory_(), w.is_shared()),
    "copy": lambda w: copy.deepcopy(w),
}


def _moved(k: Kit, move: Callable[[Tensor], Tensor], use: Callable[[Tensor], Any]) -> Any:
    with torch.no_grad():
        return use(move(k.p))


for _name, _move in MOVES.items():
    for _of, _use in USES.items():
        add("1 reading, moved", f"{_of} after {_name}", lambda k, m=_move, u=_use: _moved(k, m, u))


def _grad_view(k: Kit) -> None:
    view = k.p.view(-1)
    with torch.no_grad():
        view[::3] += 1


def _small(k: Kit) -> None:
    for _ in range(40):
        k.p.mul_(1 - 1e-3).add_(1e-7)


def _mask(k: Kit) -> int:
    k.p.mul_(k.p.abs() > 0.05)
    return int((k.p == 0).sum())


def _set_out(k: Kit) -> None:
    torch.add(k.p, 1, out=k.p.data)


def _exchanged(k: Kit) -> None:
    a, b = k.m.parameters()
    a.data, b.data = b.data, a.data


def _kept_views(k: Kit) -> None:
    row, transposed = k.p[3], k.p.t()
    k.p.mul_(1.0001)
    row.add_(1e-6)
    transposed[0].zero_()


def _foreach_all(k: Kit) -> Tensor:
    other = SQUARE.clone()
    torch._foreach_mul_([other, k.p], 1.0001)
    torch._foreach_add_([k.p, other], [other, k.p])
    torch._foreach_lerp_([k.p, other], [other, k.p], 1e-5)
    torch._foreach_addcdiv_([k.p], [SQUARE], [SQUARE.exp()], -1e-5)
    torch._foreach_copy_([other], [k.p])
    torch._foreach_copy_([k.p], [other * 1.0001])
    return other


RETURNING: dict[str, tuple[Any, ...]] = {
    "mul_": (2.0,),
    "copy_": (SQUARE,),
    "zero_": (),
    "lerp_": (SQUARE, 0.1),
    "normal_": (),
    "requires_grad_": (True,),
}

# 2. Ways to write, under no_grad.
WRITES: dict[str, Property] = {
    "mul_": lambda k: k.p.mul_(0.999),
    "copy_": lambda k: k.p.copy_(_zeros() + 0.123456),
    "index": lambda k: k.p.__setitem__(0, 7.1234567),
    "view": lambda k: k.p.view(-1)[::3].add_(1e-6),
    "transposed": lambda k: k.p.t()[2].mul_(3.3),
    "view made with grad on": lambda k: torch.enable_grad()(_grad_view)(k),
    ".data": lambda k: k.p.data.mul_(0.999),
    ".data, alias kept": lambda k: (d := k.p.data, k.p.mul_(2), d.add_(1e-6))[2],
    "detached": lambda k: k.p.detach().sub_(1e-6),
    "out=": _set_out,
    "fused step": lambda k: torch._fused_sgd_([k.p], [_zeros() + 1e-6], [], weight_decay=0.0, momentum=0.0, lr=1.0, dampening=0.0, nesterov=False, maximize=False, is_first_step=True),
    "data = same shape": lambda k: setattr(k.p, "data", _zeros() + 0.1234567),
    "data = other shape": lambda k: setattr(k.p, "data", torch.ones(3, SIDE)),
    "data = x leaves aliases": lambda k: (d := k.p.data, setattr(k.p, "data", _zeros() + 0.1234567), d)[2].clone(),
    "data = x and back": lambda k: [(d := p.data, setattr(p, "data", d * 0.9), setattr(p, "data", d)) for p in k.m.parameters()][0][0].clone(),
    "data swapped": _exchanged,
    "data of another": lambda k: (setattr(k.p, "data", k.m[2].weight.data), k.p.mul_(1.0001), k.m[2].weight)[2].detach().clone(),
    "set_": lambda k: (d := k.p.detach(), k.p.set_(_zeros() + 0.1234567), d)[2].clone(),
    "vector_to_parameters": lambda k: vector_to_parameters(torch.arange(2 * SIDE**2) / 1e5, k.m.parameters()),
    "normal_": lambda k: nn.init.normal_(k.p),
    "load_state_dict": lambda k: k.m.load_state_dict({n: torch.full_like(v, 0.12345) for n, v in k.m.state_dict().items()}),
    "through a state dict": lambda k: k.m.state_dict()["0.weight"].mul_(0.999),
    "a mask leaves zeros": _mask,
    "decay by hand accumulates": _small,
    "a weight into another": lambda k: k.m[2].weight.copy_(k.p),
    "broadcast": lambda k: alone(lambda: dist.broadcast(k.p.data, 0)),
    "all_gather": lambda k: alone(lambda: _gathered(k.p.detach())),
    "operators": lambda k: k.p.__imul__(0.999).__iadd__(SQUARE),
    "copy_ of float64": lambda k: k.p.copy_(SQUARE.double() / 3),
    "copy_ of itself transposed": lambda k: k.p.copy_(k.p.t().clone()),
    "masked_scatter_": lambda k: k.p.masked_scatter_(MASK, SQUARE),
    "index_put_": lambda k: k.p.index_put_((torch.arange(4),), k.x[:4], accumulate=True),
    "fill_diagonal_": lambda k: k.p.fill_diagonal_(0.3),
    "random": lambda k: k.p.normal_().exponential_().uniform_(-0.3, 0.3),
    "part": lambda k: k.p[1:3, ::2].sub_(1e-6),
    "view of a view": lambda k: k.p[2:9].t().narrow(0, 3, 4).unsqueeze(0).copy_(torch.ones(7)),
    "bits": lambda k: k.p.view(torch.int32).bitwise_xor_(1),
    "views that were kept": _kept_views,
    "foreach arithmetic": _foreach_all,
    "load_state_dict of BF16": lambda k: k.m[0].load_state_dict({"weight": SQUARE.bfloat16()}),
    "reset_parameters": lambda k: k.m[0].reset_parameters(),
    "returns the weight": lambda k: [getattr(k.p, name)(*args) is k.p for name, args in RETURNING.items()],
}  # fmt: skip


def _gathered(x: Tensor, rank: int = 0) -> Tensor:
    out = [torch.empty(x.shape) for _ in range(dist.get_world_size())]
    dist.all_gather(out, x)
    return out[rank]


def alone(run: Callable[[], Any]) -> Any:
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    return run()


def _written(k: Kit, write: Property) -> Any:
    with torch.no_grad():
        return write(k)


def _stamped(k: Kit, write: Property) -> bool:
    """Whether a layer notices the write, and nothing where the values are the same."""
    before, value = k.design.stamp(k.p), k.p.detach().float().clone()
    _written(k, write)
    assert isinstance(k.p, SplitTensor) == isinstance(k.design, Split)
    k.models.clear()
    return torch.equal(k.p.detach().float(), value) or k.design.stamp(k.p) != before


for _name, _write in WRITES.items():
    add("2 writing", _name, lambda k, write=_write: _written(k, write))
    if _name not in ("a weight into another", "all_gather", "data = other shape"):
        add("7 kept copies", f"notices {_name}", lambda k, w=_write: _expect(_stamped(k, w)))


def _expect(condition: Any, what: str = "unnoticed") -> Any:
    assert condition, what


# 3. Handing on.
def _stock_optimizer(make: Callable[[Any], Any]) -> Property:
    def run(k: Kit) -> None:
        k.train(make(k.m.parameters()))

    return run


_O = torch.optim
for _label, _make in {
    "AdamW": lambda p: _O.AdamW(p, lr=1e-6),
    "AdamW foreach": lambda p: _O.AdamW(p, lr=1e-6, foreach=True),
    "AdamW fused": lambda p: _O.AdamW(p, lr=1e-6, fused=True),
    "SGD momentum": lambda p: _O.SGD(p, lr=1e-5, momentum=0.9),
    "Adafactor": lambda p: _O.Adafactor(p, lr=1e-6),
    "RMSprop": lambda p: _O.RMSprop(p, lr=1e-6),
    "Muon": lambda p: _O.Muon([q for q in p if q.dim() == 2], lr=1e-6),
}.items():
    # Stock takes its loop for a subclass, and its foreach for Parameters: other roundings.
    add("3 handing on", f"stock {_label}, small steps", _stock_optimizer(_make), near=1e-7)


def _ours(k: Kit, steps: int = 3, lr: float = 1e-4) -> None:
    """Sign descent as an optimizer of ours would: it takes halves, and keeps 8 bits below BF16."""
    for _ in range(steps):
        k.m.zero_grad()
        k.loss(k.m).backward()
        for p in k.m.parameters():
            if p.grad is not None:
                w = k.design.joined(p) - lr * k.plain(p.grad).float().sign()
                k.design.write_step(p, w)


@row("3 handing on", near=0.05)  # 24 bits, stochastically
def our_step_then_a_second_optimizer(k: Kit) -> Tensor:
    before = k.design.joined(k.p).clone()
    _ours(k)
    second = k.design.joined(k.p).clone()
    k.train(k.adamw(1e-6))
    return second - before, k.design.joined(k.p) - second


@row("3 handing on")
def optimizer_made_before_conversion(k: Kit) -> None:
    k = Kit(k.design, convert=False)
    optimizer = k.adamw()
    k.convert()
    k.train(optimizer)


@row("3 handing on")
def conversion_in_the_middle_of_a_loop(k: Kit) -> Any:
    k.__init__(k.design, convert=False)
    optimizer = k.adamw()
    k.train(optimizer)
    k.convert()
    k.train(optimizer)
    return optimizer.state[k.p]["exp_avg"]


@row("3 handing on")
def conversion_between_forward_and_backward(k: Kit) -> None:
    k.__init__(k.design, convert=False)
    loss = k.loss(k.m)
    k.convert()
    loss.backward()


@row("3 handing on")
def two_optimizers_and_none(k: Kit) -> Any:
    k.train(k.adamw(1e-3))
    k.train(k.adamw(1e-6))
    return k.m.state_dict()["0.weight"]


# 4. Copying.
def _average(how: Callable[[Any, Any], Any], before: bool, keep: bool = False) -> Property:
    def run(k: Kit) -> Any:
        if before:
            k.__init__(k.design, convert=False)
        average = how(None, k.m) if keep else copy.deepcopy(k.m)
        if before:
            k.convert()
        optimizer = k.adamw(1e-4)
        for _ in range(5):
            k.train(optimizer, 1)
            with torch.no_grad():
                how(average, k.m)
        return [p.detach() for p in average.parameters()]

    return run


def _averaged_model(average: Any, model: Any) -> Any:
    if average is None:
        return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    return average.update_parameters(model)


def _lerp(average: Any, model: Any) -> None:
    for a, b in zip(average.parameters(), model.parameters(), strict=True):
        a.lerp_(b, 0.001)


def _swapped(average: Any, model: Any) -> None:
    for a, b in zip(average.parameters(), model.parameters(), strict=True):
        kept = a.data.clone()
        a.data.copy_(b.data)
        b.data.copy_(kept)


for _before in (False, True):
    _when = "before conversion" if _before else "after conversion"
    add("4 copying", f"AveragedModel {_when}", _average(_averaged_model, _before, keep=True))
    for _how in (_lerp, _swapped):
        add("4 copying", f"{_how.__name__[1:].replace('_', ' ')} {_when}", _average(_how, _before))

rows(
    "4 copying",
    deepcopy_of_a_model=lambda k: [p.detach() for p in copy.deepcopy(k.m).parameters()],
    deepcopy_keeps_ties=lambda k: (
        setattr(k.m[2], "weight", k.p),
        (c := copy.deepcopy(k.m))[0].weight is c[2].weight,
    )[1],
    pickled=lambda k: pickle.loads(pickle.dumps(k.p)).detach(),
    trained_copy=lambda k: (c := copy.deepcopy(k.m), k.train(torch.optim.SGD(c.parameters(), lr=1e-5), 2, c), [p.detach() for p in c.parameters()])[2],
)  # fmt: skip


# 5. Saving and loading.
def _reloaded(value: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


def _safetensors_file(k: Kit) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        safetensors.torch.save_file(k.m.state_dict(), f"{folder}/x")
        return safetensors.torch.load_file(f"{folder}/x")


def _save_model(k: Kit) -> Any:
    k.m[2].weight = k.p  # tied
    with tempfile.TemporaryDirectory() as folder:
        safetensors.torch.save_model(k.m, f"{folder}/x")
        return safetensors.torch.load_file(f"{folder}/x")


def _llama(k: Kit, tied: bool = True, change: Callable[[Any], Any] | None = None) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 48}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}
    model = k.convert(LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=tied)))
    with torch.no_grad():
        model.lm_head.weight.add_(1e-6)
    if change is not None:
        change(model)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        file = safetensors.torch.load_file(f"{folder}/model.safetensors")
        loaded = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return file, str(model.dtype), loaded.lm_head.weight


def _loaded(k: Kit, **options: Any) -> Any:
    state = {n: torch.full(v.shape, 0.1234567) for n, v in k.m.state_dict().items()}
    k.m.load_state_dict(state, **options)
    return k.m.state_dict()


rows(
    "5 saving",
    state_dict=lambda k: k.m.state_dict(),
    torch_save_weights_only=lambda k: _reloaded(k.m.state_dict(), weights_only=True),
    torch_save_of_a_model=lambda k: _reloaded(k.m, weights_only=False).state_dict(),
    safetensors_save_file=_safetensors_file,
    safetensors_save_model_tied=_save_model,
    save_pretrained_tied=_llama,
    save_pretrained_untied=lambda k: _llama(k, tied=False),
    vocabulary_resized=lambda k: _llama(k, change=lambda m: m.resize_token_embeddings(52, mean_resizing=False))[0]["model.norm.weight"],
    load_strict=_loaded,
    load_assign=lambda k: _loaded(k, assign=True),
    get_model_state_dict=lambda k: get_model_state_dict(k.m, options=StateDictOptions(full_state_dict=True, cpu_offload=True)),
    from_a_hook=lambda k: (seen := [], k.m.register_forward_hook(lambda m, *a: seen.append(_reloaded(m.state_dict()))), k.m(k.x), seen)[3],
)  # fmt: skip


# 6. Optimizer state.
@row("6 optimizer state")
def moments_survive_conversion(k: Kit) -> Any:
    k.__init__(k.design, convert=False)
    optimizer = k.adamw()
    k.train(optimizer)
    k.convert()
    return optimizer.state[k.p]["exp_avg"], len(optimizer.state)


@row("6 optimizer state")
def load_state_dict_keeps_float32_moments(k: Kit) -> Any:
    optimizer = k.adamw()
    k.train(optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    for s in state["state"].values():
        s["exp_avg"] = torch.full_like(s["exp_avg"], 0.1234567, dtype=torch.float32)
    optimizer.load_state_dict(state)
    return optimizer.state[k.p]["exp_avg"]


def _moments(change: Callable[[Any, Any], Any]) -> Property:
    def run(k: Kit) -> Any:
        optimizer = k.adamw()
        k.train(optimizer, 2)
        change(optimizer, k.p)
        k.train(optimizer, 1)
        return optimizer.state[k.p]

    return run


rows(
    "6 optimizer state",
    assigned=_moments(lambda o, p: o.state[p].update(exp_avg=torch.zeros_like(p.data))),
    popped=_moments(lambda o, p: o.state.pop(p)),
    group_split=_moments(lambda o, p: (o.param_groups[0]["params"].remove(p), o.add_param_group({"params": [p], "lr": 1e-4}))),
    group_found_by_identity=_moments(lambda o, p: [q for g in o.param_groups for q in g["params"]].index(p)),
)  # fmt: skip


# What 49 properties of an earlier comparison, and code of hosts, ask of a Parameter.
def _shared_write(p: Any) -> None:
    with torch.no_grad():
        p.add_(1e-6)


def _share_memory(k: Kit) -> None:
    """Another process' write arrives; only for a weight that it can be given at all."""
    from multiprocessing.reduction import ForkingPickler

    k.m.share_memory()
    _shared_write(pickle.loads(ForkingPickler.dumps(k.p)))


def _numpy_write(k: Kit) -> None:
    k.p.detach().numpy()[0] += 1


def _dlpack_write(k: Kit) -> None:
    torch.from_dlpack(k.p.detach()).add_(1)


def _hooks(k: Kit, before: bool) -> Any:
    seen: list[Any] = []
    if before:
        k.__init__(k.design, convert=False)
    handles = [
        k.p.register_hook(lambda g: seen.append(float(g.norm()))),
        k.p.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.norm()))),
    ]
    if before:
        k.convert()
    k.loss(k.m).backward()
    for handle in handles:
        handle.remove()
    k.loss(k.m).backward()
    return seen


def _weakref(k: Kit) -> bool:
    k.__init__(k.design, convert=False)
    reference = weakref.ref(k.p)
    k.convert()
    return reference() is k.p


def _same_object(k: Kit) -> bool:
    k.__init__(k.design, convert=False)
    optimizer, key = k.adamw(), {k.p: 1}
    k.m[2].weight = k.p
    k.convert()
    return optimizer.param_groups[0]["params"][0] is k.p is k.m[2].weight and key[k.p] == 1


def _meta(k: Kit) -> Any:
    with torch.device("meta"):
        k.m = nn.Sequential(HalfLinear(SIDE, SIDE, bias=False))
    k.models.clear()
    k.convert()
    k.m.to_empty(device="cpu")
    k.m.load_state_dict({"0.weight": torch.ones(SIDE, SIDE) / 3})
    return k.m.state_dict()


P = "0 a Parameter"
rows(
    P,
    isinstance=lambda k: isinstance(k.p, nn.Parameter),
    type_is_Parameter=lambda k: type(k.p) is nn.Parameter,
    same_object_everywhere=_same_object,
    weakref_before_conversion=_weakref,
    hooks_before_conversion=lambda k: _hooks(k, True),
    hooks_after_conversion=lambda k: _hooks(k, False),
    dtype=lambda k: (str(k.p.dtype), k.p.is_floating_point(), str(next(k.m.parameters()).data.dtype)),
    promotion=lambda k: [str(torch.result_type(k.p, y)) for y in (k.u, 1.0, k.u.bfloat16())],
    untyped_storage_nbytes=lambda k: k.p.untyped_storage().nbytes(),
    data_ptr_is_not_0=lambda k: k.p.data_ptr() != 0,
    data_ptr_is_stable=lambda k: k.p.data.data_ptr() == k.p.data_ptr(),
    memory_that_C_reads=lambda k: torch.frombuffer(bytearray(ctypes.string_at((alias := k.p.data).data_ptr(), 4 * 8)), dtype=alias.dtype),
    numpy_write_through=_numpy_write,
    dlpack_read=lambda k: torch.from_dlpack(k.p.detach()).clone(),
    dlpack_write_through=_dlpack_write,
    share_memory=_share_memory,
    version_moves=lambda k: (v := k.p._version, _written(k, WRITES["mul_"]), k.p._version > v)[2],
    requires_grad_off_and_on=lambda k: (k.m.requires_grad_(False), k.m(k.x).requires_grad, k.m.requires_grad_(True), k.loss(k.m).backward())[1],
    to_float64=lambda k: k.m.to(torch.float64)[0].weight.detach(),
    data_to_loop=lambda k: [setattr(p, "data", p.data.to(torch.float32)) for p in k.m.parameters()][0],
    meta_to_empty_load=_meta,
    weight_norm=lambda k: nn.utils.parametrizations.weight_norm(k.m[0]).weight.detach(),
    checkpointing=lambda k: torch.utils.checkpoint.checkpoint(k.m, k.x, use_reentrant=False).float().sum().backward(),
    forward_in_BF16=lambda k: k.m(k.x),
)  # fmt: skip


# Gradients.
def _scaler(k: Kit) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(k.m.parameters(), lr=1e-3)
    for bad in (False, True):
        optimizer.zero_grad()
        scaler.scale(k.loss(k.m)).backward()
        if bad:
            k.p.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale()


def _accumulated(k: Kit) -> None:
    for i in range(8):
        k.x = torch.randn(32, SIDE, generator=torch.Generator().manual_seed(i))
        (k.loss(k.m) / 8).backward()


G = "0 gradients"
rows(
    G,
    dtype=lambda k: (k.grads, str(k.p.grad.dtype))[1],
    values=lambda k: (k.grads, k.p.grad)[1],
    data_written=lambda k: (k.grads, k.p.grad.data.zero_(), k.p.grad)[2],
    data_assigned=lambda k: (k.grads, setattr(k.p.grad, "data", torch.ones(SIDE, SIDE)), k.p.grad)[2],
    view_written=lambda k: (k.grads, k.p.grad[:3].fill_(0.5), k.p.grad)[2],
    clip_foreach=lambda k: (k.grads, nn.utils.clip_grad_norm_(k.m.parameters(), 1e9, foreach=True))[1],
    grad_scaler=_scaler,
    assigned_in_BF16_or_as_stock=lambda k: (k.grads, setattr(k.p, "grad", torch.ones(SIDE, SIDE)), k.p.grad)[2],
    penalty_alone_is_float32=lambda k: (1e-3 * k.p.square().sum()).backward(),
)  # fmt: skip
rows(
    G,
    2**-6,
    clipped=lambda k: (k.grads, nn.utils.clip_grad_norm_(k.m.parameters(), 1e-3))[1],
    accumulated_within_BF16=_accumulated,
    penalty_and_loss=lambda k: (k.loss(k.m) + 1e-3 * k.p.square().sum()).backward(),
)


# 9. Higher-order gradients and torch.func, of what user code computes with weights.
def _user(w: Tensor, x: Tensor) -> Tensor:
    return (F.linear(x, w).tanh() * w.norm()).square().mean() + w[:4].sum()


def _refused(k: Kit, entry: Callable[[Tensor], Any]) -> str:
    x = k.x.clone().requires_grad_()
    try:
        entry(k.m(x).float().square().sum())
    except NotImplementedError as error:
        return str(error)
    raise AssertionError("left out")


def _maml(k: Kit) -> None:
    grad = torch.autograd.grad(_user(k.p, k.x), k.p, create_graph=True)[0]
    _user(k.p - 0.1 * grad, k.x).backward()


def _functional(k: Kit) -> Any:
    model, params = nn.Linear(SIDE, SIDE, bias=False), {"weight": k.p}
    return torch.func.functional_call(model, params, k.x)


def _stacked(k: Kit) -> Any:
    models = [nn.Linear(SIDE, SIDE) for _ in range(2)]
    for model in models:
        k.convert(model)
    params, _ = torch.func.stack_module_state(models)
    call = lambda p, x: torch.func.functional_call(models[0], p, x)  # noqa: E731
    return torch.func.vmap(call, (0, None))(params, k.x)


NEAR["9 higher order/second order MAML"] = 1e-6  # sums in another order
rows(
    "9 higher order",
    gradient_of_a_penalty=lambda k: torch.autograd.grad(_user(k.p, k.x), k.p, create_graph=True)[0].norm().backward(),
    hessian_product=lambda k: torch.autograd.functional.hvp(lambda w: _user(w, k.x), k.p.detach(), k.p.detach())[1],
    second_order_MAML=_maml,
    functional_call=_functional,
    func_grad_of_a_Parameter=lambda k: torch.func.grad(_user)(k.p, k.x),
    func_jvp=lambda k: torch.func.jvp(lambda w: _user(w, k.x), (k.p.detach(),), (torch.ones(SIDE, SIDE),))[1],
    vmap_over_a_weight=lambda k: torch.func.vmap(lambda r: r.norm())(k.p).detach(),
    stacked_models=_stacked,
    layer_refuses_autograd_grad=lambda k: _refused(k, lambda y: torch.autograd.grad(y, k.p, create_graph=True)),
    layer_refuses_backward=lambda k: _refused(k, lambda y: y.backward(create_graph=True)),
)  # fmt: skip


# 8. Leaving, and traces of code that reads a weight that is still converted.
class Reader(nn.Module):
    """A user's module that reads a weight past any layer of ours."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(SIDE, SIDE)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.inner(x)) * self.inner.weight.norm()


def _traced(trace: Callable[[nn.Module, Tensor], Any], revert: bool) -> Property:
    def run(k: Kit) -> Any:
        model = k.convert(Reader())
        if revert:
            k.design.revert(model)
            assert all(type(p) is nn.Parameter for p in model.parameters())
        return trace(model, k.x)(k.x)

    return run


def _make_fx(model: nn.Module, x: Tensor) -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(model)(x)


TRACES: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "jit.trace": lambda m, x: torch.jit.trace(m, x, check_trace=False),
    "jit.script": lambda m, x: torch.jit.script(m),
    "make_fx": _make_fx,
    "fx": lambda m, x: torch.fx.symbolic_trace(m),
    "torch.export": lambda m, x: torch.export.export(m, (x,)).module(),
    "torch.export strict": lambda m, x: torch.export.export(m, (x,), strict=True).module(),
    "pickle": lambda m, x: pickle.loads(pickle.dumps(m)),
    "deepcopy": lambda m, x: copy.deepcopy(m),
}
for _name, _trace in TRACES.items():
    add("8 leaving", f"{_name} after revert", _traced(_trace, True))
    add("8 leaving", f"{_name} while converted", _traced(_trace, False))


@row("8 leaving")
def revert_keeps_the_moments(k: Kit) -> Any:
    optimizer = k.adamw()
    k.train(optimizer)
    k.design.revert(k.m)
    k.train(optimizer)
    return optimizer.state[k.p]["exp_avg"]


@row("8 leaving")
def revert_and_a_second_fit(k: Kit) -> None:
    k.design.revert(k.m)
    k.models.clear()
    k.convert()
    k.train(k.adamw())


# torch.compile, against the same code as stock runs it eagerly.
def _compiled(k: Kit, function: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    if type(k.design) is Stock:
        return function
    return torch.compile(function, backend="aot_eager", **options)


@row("0 compile", near=1e-4)
def reads_a_weight(k: Kit) -> None:
    _compiled(k, _user, fullgraph=True)(k.p, k.x).backward()


@row("0 compile", near=1e-4)
def reads_an_alias(k: Kit) -> Any:
    return _compiled(k, lambda w: w.square().sum(), fullgraph=True)(k.p.data)


@row("0 compile")
def writes_a_weight(k: Kit) -> None:
    def decay(w: Tensor) -> None:
        w.mul_(0.999)

    with torch.no_grad():
        _compiled(k, decay, fullgraph=True)(k.p)


@row("0 compile")
def layer_that_takes_halves(k: Kit) -> None:
    k.loss(_compiled(k, k.m, fullgraph=True)).backward()


@row("0 compile", near=1e-3)
def stock_step_compiled(k: Kit) -> None:
    k.grads
    _compiled(k, torch.optim.SGD(k.m.parameters(), lr=1e-3).step)()
