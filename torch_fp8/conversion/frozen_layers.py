"""Selection of the weights that are stored as FP8 only, and the recipe that they run.

With scales for blocks of 128 x 128 elements, fprop and dgrad read the same bytes. Only Hopper has
GEMMs for such scales. On other cards a frozen weight has a single scale.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torch_fp8.autograd.current_pass import RunsFP8
from torch_fp8.config import FP8Config
from torch_fp8.conversion.fp8_weight import known_payload
from torch_fp8.conversion.fused_layers import convert_producers
from torch_fp8.distributed.fsdp.connect import connect_fsdp
from torch_fp8.distributed.fsdp.frozen_gather import can_be_frozen
from torch_fp8.distributed.fsdp.split_weights import fsdp_params
from torch_fp8.nn.frozen_storage import FrozenStorage, ThawNotice
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.nn.merge_aware import make_merge_aware, stop_merge_aware
from torch_fp8.ops.hardware import runs_natively
from torch_fp8.quantization.recipe import E4M3_ONLY, Recipe, make_recipe
from torch_fp8.quantization.wording import counted
from torch_fp8.tensor.dtensor import local
from torch_fp8.tensor.frozen_weight import Float8FrozenWeight


@dataclass(frozen=True)
class FreezeReport:
    """The result of `freeze`.

    Attributes:
        frozen: qualified names of the layers and expert weights that are stored as FP8 only.
        kept: (name, reason) pairs of the other weights that were meant.
        recipe: recipe of the frozen layers; None: nothing is frozen.
        num_params: number of elements of the frozen weights, on this rank.
        bytes_before, bytes_after: bytes of the frozen weights, with scales, on this rank.
        num_merge_aware: number of LoRA layers that multiply by merged weights.
    """

    frozen: tuple[str, ...]
    kept: tuple[tuple[str, str], ...]
    recipe: Recipe | None
    num_params: int
    bytes_before: int
    bytes_after: int
    num_merge_aware: int = 0

    def __str__(self) -> str:
        if self.recipe is None:
            return "no weight is stored in FP8 only"
        per_element = self.bytes_after / max(self.num_params, 1)
        aware = f"; {counted(self.num_merge_aware, 'LoRA layer')} multiply by the merged weight"
        return (
            f"{counted(len(self.frozen), 'frozen weight')} stored in FP8 only, {per_element:.3f} "
            f"bytes per parameter, {self.bytes_before / max(self.num_params, 1):.2f} before; they "
            f"run {self.recipe.name}, without a wgrad{aware if self.num_merge_aware else ''}"
        )

    def __add__(self, other: "FreezeReport") -> "FreezeReport":
        names = [field.name for field in fields(self) if field.name != "recipe"]
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return FreezeReport(recipe=self.recipe or other.recipe, **sums)


MERGED = "an adapter is merged into its weight; unmerge it before the weight is frozen"

NOTHING = FreezeReport((), (), None, 0, 0, 0)


def frozen_recipe(config: FP8Config, device: torch.device) -> tuple[Recipe, bool]:
    """Return the recipe of frozen layers on `device`, and whether its GEMMs are emulated there."""
    blocks = device.type != "cuda" or runs_natively(device, "blockwise")
    name = "blockwise" if blocks or config.emulate else "tensorwise"
    grad_format = None if name in E4M3_ONLY else config.grad_format
    recipe = make_recipe(
        name, grad_format=grad_format, fast_accum=config.fast_accum, power_of_two_weights=True
    )
    return recipe, config.emulate and not runs_natively(device, name)


def proven_frozen(model: nn.Module) -> Callable[[RunsFP8], bool]:
    """Return a function that tells whether PEFT froze a module, so that nothing will train it."""
    adapted = any(
        cls.__module__.partition(".")[0] == "peft"
        for module in model.modules()
        for cls in type(module).__mro__
    )
    return lambda module: adapted and by_hand(module)


def by_hand(module: RunsFP8) -> bool:
    """Return whether no weight of a module requires gradients, whatever the reason."""
    return not any(weight.requires_grad for weight in module.fp8_weights)


def option_that_keeps(config: FP8Config) -> str | None:
    """Return the option of `config` that keeps frozen weights in their dtype; None: no option."""
    options = {
        "opt_level='O1'": config.opt_level == "O1",
        "frozen_weights='keep'": config.frozen_weights == "keep",
        "backend='transformer-engine'": config.backend == "transformer-engine",
    }
    return next((option for option, given in options.items() if given), None)


def frozen_by(model: nn.Module, config: FP8Config) -> Callable[[RunsFP8], bool]:
    """Return a function that tells whether `config.frozen_weights` applies to a module."""
    return by_hand if config.frozen_weights == "fp8" else proven_frozen(model)


def freeze_as_configured(model: nn.Module, config: FP8Config, device: torch.device) -> FreezeReport:
    """Freeze the layers of a converted model to which `config.frozen_weights` applies.

    With `config.merge_aware`, LoRA layers over them then multiply by merged weights.
    """
    stop_merge_aware(model)
    if option_that_keeps(config) is not None:
        return NOTHING
    report = freeze_layers(model, config, device, frozen_by(model, config))
    if config.merge_aware:
        report = replace(report, num_merge_aware=make_merge_aware(model))
    return report


def freeze_layers(
    model: nn.Module,
    config: FP8Config,
    device: torch.device,
    meant: Callable[[Float8Layer], bool],
) -> FreezeReport:
    """Store the weights of some FP8 layers as FP8 only, and reconnect norms and MLPs to them.

    Args:
        model: converted model.
        config: configuration of its conversion.
        device: device on which it will run.
        meant: function that tells whether a layer should be frozen if it can be.
    """
    recipe, emulate = frozen_recipe(config, device)
    shared, sharded = _shared_weights(model), _sharded_weights(model)
    merged, notice, report = _merged_layers(model), ThawNotice(), NOTHING
    waiting = False
    for name, layer in model.named_modules():
        if not isinstance(layer, Float8Layer):
            continue
        held = layer.frozen_weight
        # The bytes of a host's own FP8 layer were taken over, but it still runs another recipe.
        taken_over = held is not None and layer.fp8.frozen is None
        if not (taken_over or meant(layer)):
            continue
        of_fsdp = id(layer.weight) in sharded
        reason = None
        if held is None:
            reason = MERGED if layer in merged else _why_not(layer, shared, of_fsdp)
        if reason is not None:
            report += replace(NOTHING, kept=((name, reason),))
            continue
        before, payload = thawed_bytes(layer.weight), None
        if taken_over and held is not None:
            before, payload = held.payload.num_bytes, held.payload
        elif held is None and not of_fsdp:
            payload = known_payload(layer.weight, recipe.weight, f"{name}.weight")
        if taken_over or held is None:
            layer.freeze_weights(recipe, emulate, notice, payload)
        waiting = waiting or (of_fsdp and held is None)
        num_params, held = local(layer.weight).numel(), layer.frozen_weight
        after = num_params if held is None else held.payload.num_bytes
        report += FreezeReport((name,), (), recipe, num_params, before, after)
    if waiting:
        connect_fsdp(model, config)
    if report.frozen:
        convert_producers(model, config)
    return report


def thawed_bytes(*weights: Tensor) -> int:
    """Return the bytes that weights, or this rank's shards, have when they are not frozen."""
    shards = [local(weight) for weight in weights]
    dtypes = [
        w.payload.thawed_dtype if isinstance(w, Float8FrozenWeight) else w.dtype for w in shards
    ]
    return sum(w.numel() * dtype.itemsize for w, dtype in zip(shards, dtypes, strict=True))


def thaw_weights(model: nn.Module) -> int:
    """Give all frozen weights of `model` their dtype back; return their number."""
    return sum(m.thaw_weights() for m in model.modules() if isinstance(m, FrozenStorage))


def _why_not(layer: Float8Layer, shared: set[int], of_fsdp: bool) -> str | None:
    if isinstance(layer.weight, DTensor) and not of_fsdp:
        return "its weight is sharded by tensor parallelism"
    if id(layer.weight) in shared:
        return "its weight is shared with another module"
    return None


def _merged_layers(model: nn.Module) -> set[nn.Module]:
    """Return the layers below merged adapters. Unmerging would change their weights."""
    adapters = [module for module in model.modules() if "base_layer" in module._modules]
    merged = [module for module in adapters if getattr(module, "merged", False)]
    return {layer for module in merged for layer in module.modules()}


def _sharded_weights(model: nn.Module) -> set[int]:
    """Return the ids of Parameters that FSDP2 sharded and can gather as bytes."""
    return {id(param.sharded_param) for param in fsdp_params(model) if can_be_frozen(param)}


def _shared_weights(model: nn.Module) -> set[int]:
    """Return the ids of Parameters that several modules hold, or that share memory with others."""
    every = [p for m in model.modules() for p in m._parameters.values() if p is not None]
    owners = Counter(map(id, every))
    plain = {id(p): p for p in every if type(p) is nn.Parameter}
    memory = {key: p.untyped_storage().data_ptr() for key, p in plain.items() if not p.is_meta}
    places = Counter(memory.values())
    shared = {key for key, count in owners.items() if count > 1}
    return shared | {key for key, place in memory.items() if place and places[place] > 1}
