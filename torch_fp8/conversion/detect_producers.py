"""Detection of RMSNorms and gated MLPs, which can produce FP8, by trial runs of their own forward.

Names do not matter. `torch_fp8.nn.trial_reads` notes what the forward reads in the trial.

An RMSNorm, ``x * rstd * weight`` or ``x * rstd * (1 + weight)``, is a module with one weight (C,)
and an epsilon whose forward takes only the input, and computes one of the two formulas on trial
data; Gemma uses the second one. A forward with more arguments, such as the gate of Mamba 2's norm,
is rejected, because a trial with the input alone cannot show what it does with them.

A gated MLP is ``down(silu(gate(x)) * up(x))``. Its forward runs on a twin whose linear layers
return given values of gate and up, and note their arguments. It is one if each layer runs once,
gate and up on the input itself, down on the product of the formula, and if the forward returns what
down returns. gate and up are two layers, or the halves (in either order) of the last dimension of
one layer's output.

Liger Kernel's functions run only on a GPU. If Liger has replaced a module's forward, the trial runs
the class's own forward, which has the same formula. Liger's own classes are recognized by their
attributes, or by name.
"""

import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from torch_fp8.config import FP8Config
from torch_fp8.nn.class_swap import own_child, user_class
from torch_fp8.nn.gated_mlp import Float8GatedMLP, GatedMLPSpec
from torch_fp8.nn.layer_filter import comes_from_liger, is_ligers
from torch_fp8.nn.rms_norm import RMSNormSpec
from torch_fp8.nn.trial_reads import Found, Recorder, computes_alike

_EPS_NAMES = ("variance_epsilon", "eps")
_MIXED = itertools.product((torch.float32, torch.bfloat16), repeat=2)
_TRIED = (*_MIXED, (torch.float16, torch.float16))
"""Dtypes of input and weight."""
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}
"""The module may round to the narrower dtype twice; we round once."""


_norms: dict[Hashable, list[Found]] = {}
"""Norms found so far, by class and size; equal norms are tried only once."""


def find_rms_norm(module: nn.Module) -> Found | None:
    """Return the formula of an RMSNorm, or None if the module is not one."""
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim != 1 or len(module._parameters) != 1:
        return None
    cls = user_class(type(module))
    others = (*module.children(), *module.buffers(recurse=False))
    if _is_patched(module) or others or not takes_input_alone(cls):
        return None
    eps = next((e for n in _EPS_NAMES if isinstance(e := getattr(module, n, None), float)), None)
    if eps is None:
        return None
    equal = _norms.setdefault((cls, weight.shape[0]), [])
    norm = next((norm for norm in equal if norm.reads.change(module) is None), None)
    if norm is None:
        norm = _tried_norm(module, eps, weight.shape[0])
        equal += [] if norm is None else [norm]
    return norm


def _is_patched(module: nn.Module) -> bool:
    """Return whether something other than Liger Kernel replaced the forward of this instance."""
    return "forward" in vars(module) and not is_ligers(module)


@functools.cache
def takes_input_alone(cls: type[nn.Module]) -> bool:
    """Return whether a class's forward has one argument besides ``self``, apart from ``*args``."""
    try:
        _, *arguments = inspect.signature(cls.forward).parameters.values()
    except ValueError:  # written in C
        return False
    return len([a for a in arguments if a.kind not in (a.VAR_POSITIONAL, a.VAR_KEYWORD)]) == 1


@_disable_current_modes()  # real tensors, even if the model has fake ones
@torch.inference_mode(False)  # also enables gradients
def _tried_norm(module: nn.Module, eps: float, size: int) -> Found | None:
    """Return the spec whose results equal the module's own forward on the CPU.

    They are equal in all dtypes, training or not, for values of all magnitudes, and have the same
    gradients.
    """
    try:
        recorder = Recorder(module, {"weight": None, "training": True})
        if comes_from_liger(recorder.cls.forward):
            twin = recorder.twin
            known = twin.casting_mode in ("llama", "gemma") and twin.offset in (0.0, 1.0)
            spec = RMSNormSpec(twin.variance_epsilon, twin.offset, promotes=False)
            return recorder.found(spec) if known else None
    except Exception:  # a class whose reads cannot be recorded
        return None
    for spec in (RMSNormSpec(eps, o, p) for o in (0.0, 1.0) for p in (True, False)):
        if all(_agrees(recorder, spec, size, *dtypes) for dtypes in _TRIED):
            return recorder.found(spec)
    return None


def _agrees(
    recorder: Recorder, spec: RMSNormSpec, size: int, dtype: torch.dtype, weight_dtype: torch.dtype
) -> bool:
    generator = torch.Generator().manual_seed(0)
    # A row with values near sqrt(eps) shows where eps is added, the last two show clamps.
    rows = [spec.eps**0.5, 1.0, 8.0, 0.0, 2.0**-30, 2.0**30]
    scale = torch.tensor(rows, device="cpu", dtype=torch.float32)[:, None]
    x = torch.randn(6, size, generator=generator, device="cpu", dtype=torch.float32)
    x = x.sign() * x.abs().clamp(2.0**-4) * scale  # no results that float16 stores as subnormals
    x = x.clamp(-3e4, 3e4).to(dtype) if dtype == torch.float16 else x.to(dtype)
    weight = torch.rand(size, generator=generator, device="cpu", dtype=torch.float32) + 0.5
    exponents = torch.arange(size, device="cpu", dtype=torch.float32) % 17 - 8
    weight = nn.Parameter((weight * exponents.exp2()).to(weight_dtype))
    recorder.give("weight", weight)
    out_dtype = torch.promote_types(dtype, weight_dtype) if spec.promotes else dtype
    tolerance = max(_TOLERANCE[dtype], _TOLERANCE[weight_dtype])
    with_gradients = dtype == weight_dtype == torch.float32
    for training, tried in ((True, x[:3]), (False, x[None])):
        recorder.give("training", training)
        tried = tried.detach().requires_grad_(with_gradients)
        got = _result(recorder.twin, tried)
        if not isinstance(got, Tensor) or got.dtype != out_dtype or got.shape != tried.shape:
            return False
        want = _norm(tried, weight, spec).to(out_dtype)
        if not torch.allclose(got.float(), want.float(), rtol=tolerance, atol=0.0):
            return False
        if with_gradients and not _same_gradients(got, want, (tried, weight)):
            return False
    return True


def _result(twin: Any, x: Tensor) -> Any:
    try:
        with torch.autocast("cpu", enabled=False), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about mixed dtypes
            return twin.forward(x)
    except Exception:
        return None


def _norm(x: Tensor, weight: Tensor, spec: RMSNormSpec) -> Tensor:
    x = x.float()
    rstd = (x.square().mean(-1, keepdim=True) + spec.eps).rsqrt()
    return x * rstd * (weight.float() + spec.offset)


def _same_gradients(got: Tensor, want: Tensor, inputs: tuple[Tensor, ...]) -> bool:
    if not got.requires_grad:
        return False
    grad = torch.linspace(-1, 2, got.numel(), device="cpu", dtype=torch.float32).view_as(got)
    pairs = (torch.autograd.grad(y, inputs, grad, allow_unused=True) for y in (got, want))
    return all(
        ours is not None
        and theirs is not None
        and bool(((ours - theirs).abs() <= 1e-4 * theirs.abs().amax(-1, keepdim=True)).all())
        for ours, theirs in zip(*pairs, strict=True)
    )


Product = Callable[[Tensor, Tensor], Tensor]
"""What down reads, as a function of gate and up, (N,) each."""


def find_gated_mlp(module: nn.Module) -> Found | None:
    """Return what a gated MLP consists of, or None if the module computes anything else."""
    spec, recorder = _tried(module, lambda product: _is(product, lambda g, u: F.silu(g) * u))
    return None if recorder is None else recorder.found(spec)


def find_gated_layers(module: nn.Module) -> GatedMLPSpec | None:
    """Return the layers of a gated MLP with any activation, such as GeGLU's, or None."""
    return _tried(module, _is_linear_in_up)[0]


def _tried(
    module: nn.Module, is_formula: Callable[[Product], bool]
) -> tuple[GatedMLPSpec | None, Recorder | None]:
    """Return the layers whose product has a formula, and the recorder of the trial."""
    children = dict(module.named_children())
    layers = {n: layer for n, child in children.items() if (layer := _layer_in(child))}
    if len(layers) not in (2, 3) or _is_patched(module):
        return None, None
    forward: Any = user_class(type(module)).forward
    if comes_from_liger(forward):
        spec = _LIGERS.get(forward.__qualname__.removeprefix("Liger").removesuffix("MLP.forward"))
        return spec, None if spec is None else Recorder(module, {"training": True})
    others = [n for n in children if n not in layers]
    alone = all(children[n] is layer for n, layer in layers.items())
    for spec in _specs(layers, alone):
        try:
            inner = {n: Recorder(children[n], {"training": True}) for n in others}
            recorder = Recorder(module, {"training": True, **inner})
            size = layers[spec.down].in_features
            with _disable_current_modes():
                for training in (True, False):
                    for each in (recorder, *inner.values()):
                        each.give("training", training)
                    if not is_formula(partial(_down_input, recorder, spec, size)):
                        break
                else:
                    return spec, recorder
        except Exception:  # the forward does something else with its layers
            continue
    return None, None


_LIGERS = {
    "SwiGLU": GatedMLPSpec(("gate_proj", "up_proj"), "down_proj"),
    "Qwen3MoeSwiGLU": GatedMLPSpec(("gate_proj", "up_proj"), "down_proj"),
    "HunyuanV1SwiGLU": GatedMLPSpec(("gate_proj", "up_proj"), "down_proj"),
    "BlockSparseTop2": GatedMLPSpec(("w1", "w3"), "w2"),
    "Phi3SwiGLU": GatedMLPSpec(("gate_up_proj",), "down_proj"),
}
"""The layers of Liger Kernel's gated MLPs with SiLU, by the names of their classes."""


def _specs(layers: dict[str, nn.Linear], alone: bool) -> Iterator[GatedMLPSpec]:
    """Yield the parts that layers of these sizes can have in a gated MLP.

    A layer that is not `alone`, but inside another module, doesn't show that module's output size.
    """
    for down, layer in layers.items():
        inputs = tuple(name for name in layers if name != down)
        width = sum(layers[name].out_features for name in inputs)
        if alone and width != 2 * layer.in_features:
            continue
        if len(inputs) == 2:
            yield from (GatedMLPSpec(inputs, down), GatedMLPSpec(inputs[::-1], down))
        else:
            yield from (GatedMLPSpec(inputs, down, first) for first in (True, False))


def _down_input(
    recorder: Recorder, spec: GatedMLPSpec, size: int, gate: Tensor, up: Tensor
) -> Tensor:
    """Return what down reads in a twin's forward, for these outputs of gate and up.

    Raises:
        NotImplementedError: the forward does anything else with its layers.
    """
    x, result = object(), object()
    # (N,) -> (1, rows, size), the last row filled with zeros
    parts = [F.pad(v, (0, -len(v) % size)).view(1, -1, size) for v in (gate, up)]
    parts = parts if spec.gate_first else parts[::-1]
    outputs = parts if len(spec.inputs) == 2 else [torch.cat(parts, -1)]
    calls: list[tuple[str, Any]] = []

    def layer(name: str, output: Any, argument: Any) -> Any:
        calls.append((name, argument))
        return output

    for name, output in zip((*spec.inputs, spec.down), (*outputs, result), strict=True):
        recorder.give(name, partial(layer, name, output))
    with _ShapesAlone():
        returned = recorder.twin.forward(x)
    *on_input, (last, product) = calls
    is_input = [value is x for _, value in on_input]
    once = sorted(name for name, _ in on_input) == sorted(spec.inputs)
    if returned is not result or last != spec.down or not (once and all(is_input)):
        raise NotImplementedError
    return product.flatten()[: len(gate)]


class _ShapesAlone(TorchFunctionMode):
    """Refuses questions about tensors apart from their shape: code may branch on the answers."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.__name__ == "__get__" and func != Tensor.shape.__get__:
            raise NotImplementedError
        return func(*args, **(kwargs or {}))


def _is_linear_in_up(product: Product) -> bool:
    return _is(product, lambda g, u: product(g, torch.ones_like(u)) * u) and not _is(
        product, lambda g, u: product(torch.ones_like(g), u) * g
    )


def _is(product: Product, formula: Product) -> bool:
    """Return whether two functions of gate and up agree."""
    pairs = (lambda x, f=f: f(*x.reshape(-1, 2).unbind(1)) for f in (product, formula))
    return computes_alike(*pairs)


def _layer_in(child: nn.Module) -> nn.Linear | None:
    """Return a linear layer, or the one inside an adapter, or None if there is neither."""
    layers = [m for m in child.modules() if isinstance(m, nn.Linear)]
    return max(layers, key=lambda m: m.in_features * m.out_features, default=None)


def down_projections(model: nn.Module, configs: Iterable[FP8Config]) -> set[nn.Module]:
    """Return the down projections of the gated MLPs of a model.

    If an adapter wraps such a layer, this is the base layer, PEFT's ``base_layer``.

    Args:
        model: any model.
        configs: configurations of the layers; the result is empty unless one has Smooth-SwiGLU.
    """
    if not any(config.smooth_swiglu for config in configs):
        return set()
    layers = (getattr(module, spec.down) for _, module, spec in gated_mlps(model))
    return {own_child(layer, "base_layer") or layer for layer in layers}


def gated_mlps(model: nn.Module) -> Iterator[tuple[str, nn.Module, GatedMLPSpec]]:
    """Yield (name, module, names of its layers) of the gated MLPs, with any activation."""
    for name, module in model.named_modules():
        is_converted = isinstance(module, Float8GatedMLP)
        spec = module.fp8.spec if is_converted else find_gated_layers(module)
        if spec is not None:
            yield name, module, spec
