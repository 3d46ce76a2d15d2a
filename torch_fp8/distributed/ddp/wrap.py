"""Set-up of DistributedDataParallel for a model with converted optimizers.

::

    convert_to_float8(model, config)
    convert_optimizer(optimizer, config, model=model)
    ddp = DistributedDataParallel(model, **ddp_options(model, [optimizer]))
    connect_ddp(ddp, [optimizer], config)

Gradients are views of DDP's buckets (``gradient_as_bucket_view``), because otherwise they would
exist twice, and a communication hook averages them in 8 bits
(`torch_fp8.distributed.ddp.buckets`), unless the user has registered a hook. DDP ignores the
weights with 8-bit gradients (O3), and weights in two halves whose gradients travel in 8 bits (O2
and O3), because its buckets would be float32; `torch_fp8.distributed.ddp.fp8_grad_reducer` averages
both. Every rank gets rank 0's residuals, as it gets rank 0's weights.
"""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torch_fp8.config import FP8Config, config_or_default
from torch_fp8.distributed.agreement import check_same_config
from torch_fp8.distributed.ddp.connection import (
    DDPConnection,
    DDPReport,
    broadcast_state,
    connection_of,
    reason_without_hook,
)
from torch_fp8.distributed.ddp.fp8_grad_reducer import Float8GradReducer
from torch_fp8.distributed.links import Exchanges, choose_exchanges, measured_groups
from torch_fp8.nn.class_swap import without_compiler
from torch_fp8.nn.frozen_storage import FrozenStorage
from torch_fp8.optim.converted import ConvertedOptimizer
from torch_fp8.optim.gradient_slot import GradientSlot, attach_slots, give_slot, slot_of
from torch_fp8.quantization.argument_types import check_arguments
from torch_fp8.tensor.split_weight import SplitWeight
from torch_fp8.tensor.weight_half import average_beside

_NAMES = "_fp8_kept_from_ddp"
_IGNORED = "_ddp_params_and_buffers_to_ignore"
_GUARD = "_fp8_guard_of_forward"
_PLAIN = ("find_unused_parameters", "static_graph")
"""Options of DistributedDataParallel that need all gradients in its own buckets."""


def ddp_options(
    module: nn.Module,
    optimizers: Iterable[Optimizer],
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Prepare a module for DistributedDataParallel, and return keyword arguments to wrap it with.

    The weights that this package averages itself (see the module docstring) are put on DDP's ignore
    list until `connect_ddp`. They and all residuals are broadcast from rank 0, unless
    ``init_sync=False``. ``find_unused_parameters`` and ``static_graph`` need DDP's own bookkeeping,
    so with them all gradients stay in DDP's buckets; at O3 a warning and the optimizer's report
    say so.

    Args:
        module: the model, on its device and not wrapped yet.
        optimizers: the optimizers that train it, after `convert_optimizer`.
        options: your keyword arguments for DistributedDataParallel.
    Returns:
        `options`, with ``gradient_as_bucket_view=True`` unless you set it.
    Raises:
        ValueError: gradient release is on; ranks have converted different weights.
    """
    check_arguments(ddp_options, locals())
    settings = {"gradient_as_bucket_view": True, **(options or {})}
    ours = [o for o in optimizers if isinstance(o, ConvertedOptimizer)]
    if any(o.fp8_config.gradient_release for o in ours):
        raise ValueError(
            "FP8Config(gradient_release=True) steps on gradients before DistributedDataParallel "
            "has averaged them; set gradient_release=False, or run on one device"
        )
    asked = [name for name in _PLAIN if settings.get(name)]
    own = set(module.parameters())
    stepped = [own.intersection(p for _, _, p in o.indexed_parameters()) for o in ours]
    eight_bit = [(o, o.fp8_gradients & weights) for o, weights in zip(ours, stepped, strict=True)]
    if asked and any(weights for _, weights in eight_bit):
        reason = f"DistributedDataParallel({asked[0]}=True) needs plain ones"
        warnings.warn(f"no gradient has 8 bits, as at level O2: {reason}", stacklevel=2)
        for optimizer, weights in eight_bit:
            _keep_plain(optimizer, weights, reason)
    beside: set[Tensor] = set()
    if ours and not asked:
        exchanges = _chosen(module, _config_of(ours), _process_group(settings), agree=True)
        # DDP's buckets have the dtype that a weight reads as, so it gets neither the weights with
        # 8-bit gradients nor split weights whose gradients travel in FP8.
        beside = {
            p
            for o in ours
            for _, _, p in o.indexed_parameters()
            if o.has_fp8_gradient(p)
            or (isinstance(p, SplitWeight) and p.requires_grad and exchanges["average"])
        }
    trained = [p for p in module.parameters() if p.requires_grad]
    if trained and beside.issuperset(trained):  # DDP refuses to ignore all parameters
        smallest = min(trained, key=Tensor.numel)
        beside.remove(smallest)
        for optimizer in ours:
            _keep_plain(optimizer, {smallest}, None)
    _ignore(module, [p for p in module.parameters() if p in beside])
    if ours and dist.is_available() and dist.is_initialized() and settings.get("init_sync", True):
        ignored = set(module.__dict__.get(_NAMES, {}).values())
        broadcast_state(module, ours, ignored, _process_group(settings))
    return settings


def connect_ddp(
    ddp: nn.Module,
    optimizers: Iterable[Optimizer],
    config: FP8Config | None = None,
    *,
    reason: str | None = None,
) -> DDPReport:
    """Have DistributedDataParallel average gradients in FP8 from the next forward on.

    Our communication hook averages the gradients in DDP's buckets, unless you register another hook
    before the first forward. The gradients that `ddp_options` excluded from DDP are always averaged
    here. With ``communication="off"`` both travel in their own dtype. A second call for the same
    DistributedDataParallel changes nothing.

    Args:
        ddp: the DistributedDataParallel, or its torch.compile wrapper.
        optimizers: the optimizers given to `ddp_options`.
        config: the configuration, or None for that of the optimizers, ``TORCH_FP8_CONFIG`` or
            ``FP8Config()``.
        reason: a reason not to register our hook, for example a user's hook that the host has
            dropped, or None if there is none.
    Returns:
        A report on how gradients are averaged.
    Raises:
        TypeError: an argument has the wrong type.
        ValueError: ranks have different configurations, versions or FP8 layers; DDP has an option
            that was not passed to `ddp_options`.
    """
    check_arguments(connect_ddp, locals())
    ddp = without_compiler(ddp)
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(
            f"connect_ddp(ddp=...) takes a DistributedDataParallel, got {type(ddp).__name__}; pass "
            "DistributedDataParallel(model, **ddp_options(model, optimizers))"
        )
    optimizers = list(optimizers)
    config = config or _config_of(optimizers)
    names = _unignore(ddp.module)
    unknown = [name for name in _PLAIN if names and getattr(ddp, name)]
    if unknown:
        raise ValueError(
            f"DistributedDataParallel({unknown[0]}=True) averages all gradients itself, so "
            "ddp_options must know about it: DistributedDataParallel(model, **ddp_options(model, "
            f"[optimizer], {{{unknown[0]!r}: True}}))"
        )
    for parameter in names:
        average_beside(parameter, ddp)
    num_ranks = dist.get_world_size(ddp.process_group)
    layers = {
        f"'{name}'": f"in FP8 ({layer.fp8.recipe.name})"
        for name, layer in ddp.module.named_modules()
        if isinstance(layer, FrozenStorage)
    }
    check_same_config(config, ddp.process_group, layers, absent="in high precision")
    reason = reason or reason_without_hook(ddp)
    exchanges = _chosen(ddp.module, config, None if reason else ddp.process_group)
    connection = connection_of(ddp)
    if connection is None:
        reducer = _connect_reducer(ddp, optimizers, names, exchanges)
        averages = reason is None and (config.communication != "off" or reducer is not None)
        if num_ranks > 1:
            DDPConnection(ddp, exchanges, reducer, averages, optimizers).connect(ddp)
    else:
        connection.train_with(optimizers)
    note = exchanges.note("average")
    if not exchanges["average"]:
        reason = note or "communication='off'"
    slots = [slot for p in ddp.module.parameters() if (slot := slot_of(p)) is not None]
    num_averaged = sum(slot.exchange is not None for slot in slots)
    return DDPReport(num_ranks, reason, num_averaged, exchanges["average"], note)


def _chosen(module: nn.Module, config: FP8Config, group: Any, agree: bool = False) -> Exchanges:
    """Return the choice for DDP's exchange; if `agree`, compare configurations first."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    groups = {"average": group}
    if agree and measured_groups(config, groups, device):
        check_same_config(config, group)
    return choose_exchanges(module, config, groups, device)


def _config_of(optimizers: Iterable[Optimizer]) -> FP8Config:
    ours = (o.fp8_config for o in optimizers if isinstance(o, ConvertedOptimizer))
    return config_or_default(next(ours, None))


def _connect_reducer(
    ddp: DistributedDataParallel,
    optimizers: list[Optimizer],
    ignored: list[Tensor],
    exchanges: Exchanges,
) -> Float8GradReducer | None:
    """Average the gradients that `ddp_options` excluded from DDP."""
    ours = [o for o in optimizers if isinstance(o, ConvertedOptimizer)]
    wanted = set(ignored)
    reducer, slots = None, {}
    if ignored and dist.get_world_size(ddp.process_group) > 1:
        for optimizer in ours:
            for index, _, parameter in optimizer.indexed_parameters():
                if parameter in wanted:
                    give_slot(optimizer, index, parameter)
        slots = {p: slot_of(p) or GradientSlot() for p in ignored}
        reducer = Float8GradReducer(slots, ddp.process_group, exchanges)
    for parameter in ddp.module.parameters():
        if (slot := slot_of(parameter)) is not None:
            slot.exchange = reducer if parameter in slots else None
    for optimizer in ours:
        attach_slots(optimizer)
    return reducer


def _keep_plain(optimizer: ConvertedOptimizer, weights: set[Tensor], reason: str | None) -> None:
    layers = [(ref, ref()) for ref in optimizer.fp8_layers]
    optimizer.fp8_layers = tuple(
        ref for ref, layer in layers if layer is not None and weights.isdisjoint(layer.fp8_weights)
    )
    if not optimizer.fp8_layers:
        optimizer.fp8_why_bf16_gradients = reason
    attach_slots(optimizer)


def _ignore(module: nn.Module, parameters: list[Tensor]) -> None:
    """Add parameters to DDP's ignore list."""
    _unignore(module)
    ignored = module.__dict__.get(_IGNORED, [])
    wanted = set(parameters)
    names = {}
    for owner_name, owner in module.named_modules(remove_duplicate=False):
        for name, parameter in owner.named_parameters(recurse=False):
            # DDP looks up a parameter of the module itself under both spellings.
            spellings = {f"{owner_name}.{name}", f"{owner_name}.{name}".removeprefix(".")}
            if parameter in wanted and not spellings & set(ignored):
                names.update(dict.fromkeys(spellings, parameter))
    if names:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            module, [*ignored, *names]
        )
        module.__dict__[_NAMES] = names
        module.__dict__[_GUARD] = module.register_forward_pre_hook(_refuse_unconnected)


def _refuse_unconnected(module: nn.Module, inputs: Any) -> None:
    ddp = DistributedDataParallel._active_ddp_module
    if ddp is not None and ddp.module is module:
        raise RuntimeError(
            "DistributedDataParallel was wrapped with ddp_options(...), which withholds gradients "
            "from it, but nothing averages them yet: call connect_ddp(ddp, [optimizer]) after it"
        )


def _unignore(module: nn.Module) -> list[Tensor]:
    """Undo `_ignore`, whose list an existing DDP has copied; return the parameters, each once.

    Otherwise a later wrapping of the module without this package would ignore them forever.
    """
    names: dict[str, Tensor] = module.__dict__.pop(_NAMES, {})
    guard = module.__dict__.pop(_GUARD, None)
    if guard is not None:
        guard.remove()
    parameters = list(dict.fromkeys(names.values()))
    for parameter in parameters:
        parameter.__dict__.pop("_ddp_ignored", None)
    if names:
        left = [name for name in module.__dict__[_IGNORED] if name not in names]
        module.__dict__[_IGNORED] = left
        if not left:
            del module.__dict__[_IGNORED]
    return parameters


def _process_group(options: Mapping[str, Any]) -> Any:
    mesh = options.get("device_mesh")
    group = options.get("process_group") if mesh is None else mesh.get_group(mesh_dim=0)
    return group or dist.group.WORLD
