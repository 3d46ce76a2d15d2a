"""Bytes per parameter: `memory_report` counts existing tensors, `expected_memory` a coming run."""

import dataclasses
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torch_fp8.nn.experts import Float8Experts
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.optim.arguments import without_wrapper
from torch_fp8.optim.converted import ConvertedOptimizer
from torch_fp8.optim.muon import MuonOptimizer
from torch_fp8.optim.optimizer import Float8Optimizer
from torch_fp8.optim.residual import residual_of
from torch_fp8.optim.state import is_large
from torch_fp8.quantization import linear_int8
from torch_fp8.quantization.argument_types import check_arguments
from torch_fp8.quantization.block_scaled import matrix_shape
from torch_fp8.quantization.formats import GROUP_SIZE
from torch_fp8.tensor.base import QuantizableTensor
from torch_fp8.tensor.dtensor import local
from torch_fp8.tensor.exchange import stored_grad
from torch_fp8.tensor.frozen_weight import Float8FrozenWeight
from torch_fp8.tensor.payload_cache import PayloadCache
from torch_fp8.tensor.quantized_state import Coded, QuantizedState
from torch_fp8.tensor.split_weight import SplitWeight, halves_of, stored
from torch_fp8.tensor.wide_grad import WideGrad

CATEGORIES = ("weights", "gradients", "moments", "master", "scales", "caches")
_NUM_MOMENTS = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Muon": 1}


@dataclass(frozen=True)
class MemoryReport:
    """Exact bytes of tensors on this rank, by category. A shared storage counts once.

    Attributes:
        num_params: number of elements of the parameters; tied ones count once, and a sharded one
            with this rank's part.
        weights: bytes of the parameters' storages.
        gradients: bytes of the storages of ``p.grad``. If gradients live in the buckets of
            DistributedDataParallel, these are the buckets.
        moments: bytes of optimizer state of a parameter's shape (exp_avg, momentum buffers, ...).
        master: bytes of the residuals of weights stored in two halves.
        scales: bytes of scaling factors and amax histories.
        caches: bytes of FP8 weight payloads kept between optimizer steps or between forwards
            without gradients.
    """

    num_params: int
    weights: int
    gradients: int
    moments: int
    master: int
    scales: int
    caches: int = 0

    @property
    def total(self) -> int:
        """Bytes of all categories together."""
        return sum(getattr(self, name) for name in CATEGORIES)

    @property
    def bytes_per_param(self) -> float:
        """`total` divided by `num_params`."""
        return self.total / max(self.num_params, 1)

    def __str__(self) -> str:
        # A weight that each forward casts anew leaves only its scale in the cache: not shown.
        parts = [
            f"{name} {getattr(self, name) / max(self.num_params, 1):.2f}"
            for name in CATEGORIES
            if getattr(self, name) >= (0.005 * self.num_params if name == "caches" else 1)
        ]
        per_parameter = f"{self.bytes_per_param:.2f} bytes per parameter ({', '.join(parts)})"
        return f"{per_parameter}, {size_text(self.total)}"


def memory_report(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    *,
    parameters: Iterable[Tensor] | None = None,
) -> MemoryReport:
    """Count the bytes of the tensors that exist now, on this rank.

    Args:
        model: module whose parameters, gradients and scaling state are counted.
        optimizer: optimizer or optimizers whose states are counted, except 0-d counters.
        parameters: the only parameters to count, with their gradients and states but without
            buffers and caches, or None for all parameters of `model`, with both.
    Returns:
        The bytes by category.
    Raises:
        TypeError: `model` or `optimizer` has the wrong type.
    """
    check_arguments(memory_report, locals())
    given = model.parameters() if parameters is None else parameters
    counted = [p for p in given if not is_lazy(p)]
    gradients = [_gradient_parts(g) for p in counted if (g := stored_grad(p)) is not None]
    optimizers = _optimizers(optimizer)
    wanted = set(counted)
    states = [s for o in optimizers for p, s in o.state.items() if p in wanted]
    moments = [v for s in states for v in s.values() if isinstance(v, Tensor) and v.ndim > 0]
    encoded = [shard for shard in map(local, moments) if isinstance(shard, QuantizedState)]
    frozen = [shard for shard in map(local, counted) if isinstance(shard, Float8FrozenWeight)]
    scales = [s for _, ss in gradients for s in ss] + [x.scale for x in (*encoded, *frozen)]
    residuals = [residual for p in counted if (residual := residual_of(p)) is not None]
    derived = [tensor for p in counted if (h := halves_of(p)) for tensor in h.kept]
    caches: list[PayloadCache] = []
    if parameters is None:
        buffers = model.named_buffers()
        scales += [b for name, b in buffers if name.rpartition(".")[2].startswith("fp8_")]
        caches += [m.fp8.payloads for m in _all_of(model, Float8Layer)]
        caches += [c for m in _all_of(model, Float8Experts) for c in m.fp8.caches.values()]
    return MemoryReport(
        num_params=sum(local(p).numel() for p in {id(p): p for p in counted}.values()),
        weights=_num_bytes(counted),
        gradients=_num_bytes([codes for codes, _ in gradients]),
        moments=_num_bytes([getattr(local(v), "qdata", v) for v in moments]),
        master=_num_bytes(residuals),
        scales=_num_bytes(scales),
        caches=_num_bytes([*derived, *(t for cache in caches for t in cache.tensors)]),
    )


def expected_memory(
    model: nn.Module,
    optimizers: Iterable[Optimizer] = (),
    *,
    converted: bool = True,
    summed: bool = False,
) -> MemoryReport:
    """Compute the bytes that training will hold once gradients and optimizer states exist.

    The states of Adam's family and of SGD with momentum follow from the class. States of other
    optimizers are not counted.

    Args:
        model: module whose parameters are counted; it may be on the meta device.
        optimizers: optimizers that train it.
        converted: True to count model and optimizers as they are, False as before conversion.
        summed: whether a gradient is the sum of several micro-batches.
    """
    owner, total = _owners(optimizers), Counter[str]()
    for parameter in model.parameters():
        total.update(_expected(parameter, owner.get(parameter), converted=converted, summed=summed))
        halves = halves_of(parameter) if converted else None
        total["caches"] += 0 if halves is None else sum(tensor.nbytes for tensor in halves.kept)
    return MemoryReport(**{f.name: total[f.name] for f in dataclasses.fields(MemoryReport)})


def expected_bytes_per_param(model: nn.Module, optimizers: Iterable[Optimizer] = ()) -> str:
    """Describe in words the bytes of training, after conversion and before: `expected_memory`."""
    optimizers = _optimizers(optimizers)
    before = expected_memory(model, optimizers, converted=False)
    after = expected_memory(model, optimizers)
    summed = expected_memory(model, optimizers, summed=True).bytes_per_param
    unknown = [type(o).__name__ for o in optimizers if _num_moments(o) is None]
    text = str(after)
    same = text == str(before)
    change = ", before and after (" if same else f", {before.bytes_per_param:.2f} before ("
    text = text.replace(" (", change, 1)
    if not same:
        text += f", {size_text(before.total)} before"
    if summed > after.bytes_per_param:
        text += f"; {summed:.2f} while micro-batches are summed"
    if not _owners(optimizers):
        return f"{text}; the states are unknown and not counted"
    return f"{text}; the states of {', '.join(unknown)} are not counted" if unknown else text


def _owners(optimizers: Iterable[Optimizer]) -> dict[Tensor, Optimizer]:
    given = _optimizers(optimizers)
    return {p: o for o in given for group in o.param_groups for p in group["params"]}


def size_text(num_bytes: int) -> str:
    """Format bytes in GiB, or in MiB below 0.1 GiB."""
    gib = num_bytes / 2**30
    return f"{gib:.2f} GiB" if gib >= 0.1 else f"{num_bytes / 2**20:.1f} MiB"


def _expected(
    parameter: Tensor, optimizer: Optimizer | None, *, converted: bool, summed: bool
) -> dict[str, int]:
    """Return the elements and expected bytes of one parameter, by field of `MemoryReport`.

    Args:
        converted: True to count it as it is, False as before its optimizer was converted.
        summed: whether its gradient is the sum of several micro-batches.
    """
    shard = local(parameter)
    if is_lazy(shard):
        return {}
    numel = shard.numel()
    size = stored(shard).element_size() if converted else shard.element_size()
    ours = optimizer if isinstance(optimizer, ConvertedOptimizer) else None
    if isinstance(shard, Float8FrozenWeight):
        payload = shard.payload
        if converted:
            return {"num_params": numel, "weights": numel, "scales": payload.scale.nbytes}
        size = payload.thawed_dtype.itemsize
    counts = {"num_params": numel, "weights": numel * size}
    if not parameter.requires_grad:
        return counts
    if ours is None or not converted:
        states = (_num_moments(optimizer) or 0) * numel * size
        return counts | {"gradients": numel * size, "moments": states}
    split = isinstance(shard, SplitWeight)
    master = 0
    if split or ours.keeps_residual(parameter):
        master = numel * (1 if is_large(parameter) else 2)
    gradients, scales = numel * (4 if split and summed else size), 0
    if ours.has_fp8_gradient(parameter):
        gradients, scales = numel, _num_scales(shard) + 4  # the multiplier, which clipping changes
    if ours.fp8_config.gradient_release:
        gradients, scales = 0, 0
    large = is_large(parameter)
    moments = (_num_moments(ours) or 0) * numel * parameter.element_size()
    if isinstance(ours, MuonOptimizer) and large:
        moments, scales = numel, scales + 2 * _num_scales(shard, linear_int8.GROUP)
    elif isinstance(ours, Float8Optimizer):
        moments = (2 if large else 2 * 4) * numel
        scales = scales + 2 * _num_scales(shard) if large else 0
    return counts | {"gradients": gradients, "moments": moments, "master": master, "scales": scales}


def _all_of(model: nn.Module, cls: type[nn.Module]) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, cls)]


def _num_scales(shard: Tensor, group: int = GROUP_SIZE) -> int:
    """Return the number of groups, each with one scale, of a parameter's gradient or moment."""
    rows, cols = matrix_shape(shard.shape)
    return rows * -(-cols // group)


def _num_moments(optimizer: Any) -> int | None:
    """Return how many states of a parameter's size an optimizer keeps, or None if unknown."""
    for cls in type(optimizer).__mro__:
        if cls.__module__.startswith("torch.optim") and cls.__name__ in _NUM_MOMENTS:
            amsgrad = any(group.get("amsgrad") for group in optimizer.param_groups)
            return _NUM_MOMENTS[cls.__name__] + amsgrad
    if isinstance(optimizer, torch.optim.SGD):
        return int(any(group["momentum"] for group in optimizer.param_groups))
    return None


def _optimizers(optimizer: Optimizer | Iterable[Optimizer] | None) -> list[Optimizer]:
    """Return one or several optimizers as a list, without wrappers that a host put around them."""
    if optimizer is None:
        return []
    given = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    return [without_wrapper(o) for o in given]


def _gradient_parts(grad: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return a gradient's elements, and its scales if it is stored in 8 bits."""
    shard = local(grad)
    if isinstance(shard, WideGrad):
        shard = shard.stored
    codes, *scales = shard.codes if isinstance(shard, Coded) else (shard,)
    return codes, scales


def _num_bytes(tensors: list[Tensor]) -> int:
    """Count the bytes of the distinct storages behind `tensors`.

    A DTensor counts with its local shard, a weight stored or gathered in FP8 without its scales.
    """
    seen: dict[int, int] = {}
    for tensor in tensors:
        shard = stored(local(tensor))
        if isinstance(shard, QuantizableTensor):
            shard = getattr(shard, "qdata", shard)
        if shard.device.type == "meta":
            seen[id(shard)] = shard.numel() * shard.element_size()
        else:
            storage = shard.untyped_storage()
            seen[storage.data_ptr() or id(shard)] = storage.nbytes()
    return sum(seen.values())
