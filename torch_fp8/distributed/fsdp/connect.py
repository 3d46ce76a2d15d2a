"""`connect_fsdp`: FP8 collectives for a model that FSDP2's ``fully_shard`` has sharded.

::

    convert_to_float8(model, config)
    for block in model.layers:
        fully_shard(block)
    fully_shard(model)
    print(connect_fsdp(model, config))

FSDP2 then all-gathers the weights of FP8 layers as FP8 (`torch_fp8.distributed.fsdp.all_gather`),
reduce-scatters gradients as FP8 and averages them among replicas as FP8
(`torch_fp8.distributed.fsdp.reduce_scatter`). Parameters of other layers travel in BF16, or in the
dtype of the user's `MixedPrecisionPolicy`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torch_fp8.config import FP8Config
from torch_fp8.distributed.agreement import check_same_config, store_timeout
from torch_fp8.distributed.fsdp.all_gather import WeightGather, in_backward, make_scales
from torch_fp8.distributed.fsdp.expert_gather import (
    ExpertGather,
    is_expert_weight,
    why_not_gathered,
)
from torch_fp8.distributed.fsdp.frozen_gather import connect_frozen, is_frozen
from torch_fp8.distributed.fsdp.reduce_scatter import (
    Float8ReduceScatter,
    connect_replicas,
    disconnect_replicas,
    in_groups,
)
from torch_fp8.distributed.fsdp.split_weights import fsdp_groups, sharded_modules
from torch_fp8.distributed.links import Exchanges, choose_exchanges
from torch_fp8.nn.frozen_storage import FrozenStorage
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.nn.transformer_engine import refuse_sharding
from torch_fp8.quantization.argument_types import check_arguments
from torch_fp8.quantization.payload_shape import IN_ROWS
from torch_fp8.quantization.wording import by_reason, first_of


@dataclass(frozen=True)
class FSDPReport:
    """The result of `connect_fsdp`; ``str(report)`` is its line of the start-up summary.

    Attributes:
        num_gathers: the number of weights that are all-gathered in FP8.
        num_scatters: the number of modules of ``fully_shard`` whose gradients are reduce-scattered
            in FP8.
        skipped: (name, reason) of each weight and module whose exchange is not in FP8.
        num_frozen: the number of weights whose shards are stored, and gathered, only in FP8.
        num_replicated: the number of modules whose gradients are averaged among replicas in FP8.
        note: a note on the choice of ``communication="auto"``; empty if it made none.
    """

    num_gathers: int = 0
    num_scatters: int = 0
    skipped: tuple[tuple[str, str], ...] = ()
    num_frozen: int = 0
    num_replicated: int = 0
    note: str = ""

    def __str__(self) -> str:
        text = (
            f"FSDP2: {self.num_gathers} weights gathered in FP8, gradients of {self.num_scatters} "
            "modules scattered in FP8"
        )
        if self.num_replicated:
            text += f", those of {self.num_replicated} averaged across replicas in FP8"
        if self.num_frozen:
            text += f", {self.num_frozen} frozen weights stored and gathered in FP8 only"
        if self.note:
            text += f"; {self.note}"
        for reason, names in by_reason(self.skipped).items():
            text += f"; not {first_of([repr(name) for name in names], 1)}: {reason}"
        return text


def connect_fsdp(model: nn.Module, config: FP8Config) -> FSDPReport:
    """Have FSDP2 gather the weights and reduce-scatter the gradients of `model` in FP8.

    Call it again after ``model.to(...)``, which creates new shards; a forward that finds
    unconnected shards also reconnects them. A second call with another configuration replaces the
    first; ``communication="off"`` restores the stock collectives.

    Args:
        model: a module that was converted and then sharded by ``fully_shard``, or one that contains
            such modules.
        config: the configuration with which `model` was converted.
    Returns:
        A report on what travels in FP8, and why the rest does not.
    Raises:
        ValueError: the backend is Transformer Engine; ranks have different versions, configurations
            or models, or have converted or sharded them differently.
    """
    check_arguments(connect_fsdp, locals())
    refuse_sharding(config)
    _disconnect(model)
    every_group = fsdp_groups(model)
    num_frozen = connect_frozen(every_group)
    if config.communication == "off":
        _chosen(model, config, [])
        return FSDPReport(skipped=(("model", "communication='off'"),), num_frozen=num_frozen)
    names = {module: name for name, module in model.named_modules()}
    for process_group, parts in _parts(model, names).items():
        # One rank may take much longer than another to load its model.
        check_same_config(config, process_group, parts, seconds=store_timeout())
    exchanges = _chosen(model, config, every_group)
    skipped: list[tuple[str, str]] = []
    gathers = {group: _gathers_of(group, names, skipped, exchanges) for group in every_group}
    for module in sharded_modules(model):
        own = [gather for group in fsdp_groups(module) for gather in gathers[group]]
        if own:
            ScalePrefetch(module, own)
    every = [gather for of_group in gathers.values() for gather in of_group]
    for gather in every if exchanges["gather"] else ():
        gather.attach()
    scattered = [g for g in every_group if _connect_scatter(g, names, skipped, exchanges)]
    replicated = list(filter(connect_replicas, scattered))
    return FSDPReport(
        len(every) * exchanges["gather"],
        len(scattered) * exchanges["scatter"],
        tuple(skipped),
        num_frozen,
        len(replicated) * exchanges["replicas"],
        exchanges.note("gather", "scatter", "replicas"),
    )


def _chosen(model: nn.Module, config: FP8Config, sharded: Iterable[Any]) -> Exchanges:
    """Return the choice for FSDP2's exchanges, made in the first parameters' groups."""
    first = next((g for g in sharded if hasattr(g.mesh_info, "shard_process_group")), None)
    if first is None:
        return choose_exchanges(model, config, {}, torch.device("cpu"))
    groups = dict.fromkeys(("gather", "scatter"), first.mesh_info.shard_process_group)
    groups["replicas"] = getattr(first.mesh_info, "replicate_process_group", None)
    return choose_exchanges(model, config, groups, first.device)


class ScalePrefetch:
    """Hooks that compute the scales of all weights below a sharded module before its forward.

    The outermost module computes them in one collective; modules inside it reuse the scales.
    """

    def __init__(self, module: nn.Module, gathers: list[WeightGather]) -> None:
        self.gathers = gathers
        self._announced: list[WeightGather] = []
        self._handles = (
            module.register_forward_pre_hook(self.before, prepend=True),  # before FSDP's own
            module.register_forward_hook(self.after, always_call=True),
        )

    def remove(self) -> None:
        """Remove the hooks and restore the stock gathers."""
        for handle in self._handles:
            handle.remove()
        for gather in self.gathers:
            if gather.attached:
                gather.detach()

    # Disabled by a decorator, as FSDP's own hooks are: torch.compile skips such a hook, but breaks
    # the graph at one that calls torch.compiler.disable itself.
    @torch.compiler.disable
    def before(self, module: nn.Module, args: Any) -> None:
        if all(gather.announced for gather in self.gathers) or in_backward():
            return
        for gather in self.gathers:
            if gather.wanted != gather.attached:
                gather.attach() if gather.wanted else gather.detach()
        mine = [gather for gather in self.gathers if not gather.announced and gather.attached]
        make_scales(mine)
        for gather in mine:
            gather.announced = True
        self._announced += mine

    @torch.compiler.disable
    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        for gather in self._announced:
            gather.announced = False
        self._announced = []


def _parts(model: nn.Module, names: dict[nn.Module, str]) -> dict[Any, dict[str, str]]:
    """Describe the parameters by name, for each process group that shards or replicates them."""
    parts: dict[Any, dict[str, str]] = {}
    for group in fsdp_groups(model):
        if not hasattr(group.mesh_info, "shard_process_group"):
            continue
        of_replicas = getattr(group.mesh_info, "replicate_process_group", None)
        place = names.get(group.modules[0], "") or "the root"
        for param in group.fsdp_params:
            info = param._module_info
            name = f"{names.get(info.module, '')}.{info.param_name}".lstrip(".")
            precision = "in high precision"
            if isinstance(info.module, FrozenStorage):
                precision = f"in FP8 ({info.module.fp8.recipe.name})"
            what = f"{tuple(param._orig_size)} {param.sharded_param.dtype}"
            sharded = f"sharded by '{place}' along dimension {param.fsdp_placement.dim}"
            for process_group in filter(None, (group.mesh_info.shard_process_group, of_replicas)):
                parts.setdefault(process_group, {})[f"'{name}'"] = f"{what}, {sharded}, {precision}"
    return parts


def _gathers_of(
    group: Any,
    names: dict[nn.Module, str],
    skipped: list[tuple[str, str]],
    exchanges: Exchanges,
) -> list[WeightGather]:
    gathers = []
    for param in group.fsdp_params:
        info = param._module_info
        owners = [info.module, *info.shared_modules]
        are_experts = is_expert_weight(info.module, info.param_name)
        are_weights = {info.param_name, *info.shared_param_names} == {"weight"}
        of_layer = are_weights and any(isinstance(owner, Float8Layer) for owner in owners)
        if not (are_experts or of_layer) or is_frozen(param):
            continue
        reason = _why_not_sharded(group, param)
        if reason is None:
            reason = why_not_gathered(param) if are_experts else _why_not_gathered(param, owners)
        if reason is None:
            kind = ExpertGather if are_experts else WeightGather
            gathers.append(kind(param, group, info.module))
        else:
            skipped.append((f"{names.get(info.module, '')}.{info.param_name}".lstrip("."), reason))
    for gather in gathers:
        gather.siblings, gather.exchanges = gathers, exchanges
    return gathers


def _connect_scatter(
    group: Any,
    names: dict[nn.Module, str],
    skipped: list[tuple[str, str]],
    exchanges: Exchanges,
) -> bool:
    """Have this group's gradients reduce-scattered in FP8; return False if they cannot be."""
    if not any(in_groups(param) for param in group.fsdp_params):
        return False
    name = names.get(group.modules[0], "") or "the root"
    if not hasattr(group.mesh_info, "shard_process_group"):
        skipped.append((name, "its gradients are replicated, not sharded"))
        return False
    if type(group._reduce_scatter_comm).__name__ != "DefaultReduceScatter":
        skipped.append((name, "it has a custom reduce-scatter"))
        return False
    group._reduce_scatter_comm = Float8ReduceScatter(group, name, exchanges)
    return True


def _why_not_sharded(group: Any, param: Any) -> str | None:
    if not hasattr(param.mesh_info, "shard_process_group"):
        return "it is replicated, not sharded"
    after = group.post_forward_mesh_info
    if after is not None and after != group.mesh_info:
        return "reshard_after_forward is an integer, and torch gathers such weights unchanged"
    return None


def _why_not_gathered(param: Any, owners: list[nn.Module]) -> str | None:
    if not all(isinstance(owner, Float8Layer) for owner in owners):
        return "a module in high precision shares it"
    recipes = {owner.fp8.recipe for owner in owners if isinstance(owner, Float8Layer)}
    if len(recipes) > 1:
        return "layers with different recipes share it"
    granularity = recipes.pop().weight.granularity
    if param.fsdp_placement.dim != 0 and granularity != "tensorwise":
        return f"it is sharded along dimension 1, and {granularity} scales need whole rows"
    size = param.mesh_info.shard_mesh_size
    if granularity in IN_ROWS and size == 1:
        return "it is on one rank, where torch gathers only one tensor"
    if granularity in IN_ROWS and param._orig_size[0] % size:
        return f"its rows are not divisible by {size} ranks, and torch pads only one tensor"
    return None


def _disconnect(model: nn.Module) -> None:
    for module in sharded_modules(model):
        hooks = [getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values()]
        for hook in hooks:
            if isinstance(hook, ScalePrefetch):
                hook.remove()
    for group in fsdp_groups(model):
        disconnect_replicas(group)
        if isinstance(group._reduce_scatter_comm, Float8ReduceScatter):
            group._reduce_scatter_comm = group._reduce_scatter_comm.stock
