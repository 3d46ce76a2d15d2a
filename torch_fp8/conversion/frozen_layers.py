"""Selection of the weights that are stored as FP8 only, and the recipe that they run.

With scales for blocks of 128 x 128 elements, fprop and dgrad read the same bytes. Only Hopper has
GEMMs for such scales. On other cards a frozen weight has a single scale.
"""

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torch_fp8.autograd.current_pass import RunsFP8
from torch_fp8.config import FP8Config
from torch_fp8.distributed.fsdp.connect import connect_fsdp
from torch_fp8.distributed.fsdp.expert_gather import is_expert_weight, why_not_gathered
from torch_fp8.distributed.fsdp.frozen_gather import can_be_frozen
from torch_fp8.distributed.fsdp.split_weights import fsdp_params
from torch_fp8.nn.class_swap import own_child
from torch_fp8.nn.experts import Float8Experts
from torch_fp8.nn.frozen_storage import FrozenStorage, ThawNotice
from torch_fp8.nn.layer_filter import is_peft
from torch_fp8.nn.merge_aware import make_merge_aware, stop_merge_aware
from torch_fp8.nn.output_layer import OutputLayer
from torch_fp8.ops.hardware import runs_natively
from torch_fp8.quantization.recipe import E4M3_ONLY, Recipe, make_recipe
from torch_fp8.quantization.wording import counted
from torch_fp8.tensor.dtensor import local
from torch_fp8.tensor.frozen_payload import FrozenPayload


@dataclass(frozen=True)
class FreezeReport:
    """The result of `freeze`.

    Attributes:
        frozen: qualified names of the layers and expert weights that are stored as FP8 only.
        kept: (name, reason) of each weight that should have been frozen, too, but was not.
        recipe: recipe of the frozen layers, or None if nothing is frozen.
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


BY_TENSOR = "its weight is sharded by tensor parallelism"
NOT_BY_FSDP = "ranks hold different experts, and FSDP2 does not gather them"

NOTHING: FreezeReport = FreezeReport((), (), None, 0, 0, 0)


def frozen_recipe(config: FP8Config, device: torch.device) -> tuple[Recipe, bool]:
    """Return the recipe of frozen layers on `device`, and whether its GEMMs are emulated there."""
    blocks = device.type != "cuda" or runs_natively(device, "blockwise")
    name = "blockwise" if blocks or config.emulate else "tensorwise"
    grad_format = None if name in E4M3_ONLY else config.grad_format
    recipe = make_recipe(
        name, grad_format=grad_format, fast_accum=config.fast_accum, power_of_two_weights=True
    )
    return recipe, config.emulate and not runs_natively(device, name)


def meant_to_freeze(
    model: nn.Module, config: FP8Config, every: bool = False
) -> Callable[[RunsFP8], bool]:
    """Return a function that returns whether a module should be frozen.

    If PEFT froze modules, these should be, because nothing will train them. Otherwise all should
    be if `every`, and those that the user froze if ``config.frozen_weights`` is ``"fp8"``.
    """
    adapted = any(map(is_peft, model.modules()))
    layers = [module for module in model.modules() if isinstance(module, FrozenStorage)]
    proven = adapted and any(map(_by_hand, layers))
    asked = config.frozen_weights == "fp8" and not every
    return _by_hand if proven or asked else lambda module: every


def _by_hand(module: RunsFP8) -> bool:
    """Return whether no weight of a module requires gradients, whatever the reason."""
    return not any(weight.requires_grad for weight in module.fp8_weights)


_KEEPING = {"opt_level": "O1", "frozen_weights": "keep", "backend": "transformer-engine"}


def option_that_keeps(config: FP8Config) -> str | None:
    """Return the option of `config` that keeps frozen weights in their dtype, or None."""
    given = (f"{n}={value!r}" for n, value in _KEEPING.items() if getattr(config, n) == value)
    return next(given, None)


def freeze_as_configured(
    model: nn.Module, config: FP8Config, device: torch.device, every: bool = False
) -> FreezeReport:
    """Freeze the modules of a converted model to which `config.frozen_weights` applies.

    With `config.merge_aware`, LoRA layers over them then multiply by merged weights.

    Args:
        every: see `meant_to_freeze`.
    """
    stop_merge_aware(model)
    if option_that_keeps(config) is not None:
        return NOTHING
    meant = meant_to_freeze(model, config, every)
    report = freeze_weights(model, config, device, meant)
    if config.merge_aware:
        report = replace(report, num_merge_aware=make_merge_aware(model))
    return report


def freeze_weights(
    model: nn.Module,
    config: FP8Config,
    device: torch.device,
    meant: Callable[[RunsFP8], bool],
) -> FreezeReport:
    """Store the weights of some FP8 modules as FP8 only.

    Weights whose bytes were taken over from a checkpoint or a host are stored in any case. The
    caller then connects norms and MLPs (`convert_producers`), which depend on it.

    Args:
        model: converted model.
        config: configuration of its conversion.
        device: device on which it will run.
        meant: function that returns whether a module should be frozen if it can be.
    """
    recipe, emulate = frozen_recipe(config, device)
    run = recipe, emulate, ThawNotice()
    refusals, waits, report = _refusals(model), False, NOTHING
    modules = [(n, m) for n, m in model.named_modules() if isinstance(m, FrozenStorage)]
    for name, module in sorted(modules, key=lambda pair: isinstance(pair[1], Float8Experts)):
        held = module.frozen_weights
        taken_over = bool(held) and module.fp8.frozen is None
        if not (taken_over or meant(module)):
            continue
        reason = None if held else refusals(module)
        if reason is not None:
            report += replace(NOTHING, kept=tuple((full, reason) for full in _names(name, module)))
            continue
        waits |= not held and any(isinstance(w, DTensor) for w in module.fp8_weights)
        report += _freeze(name, module, held["weight"].payload if taken_over else None, *run)
    if waits:
        connect_fsdp(model, config)
    if report.frozen:
        _warn_of_merges()
    return report


def _freeze(
    name: str, module: FrozenStorage, payload: FrozenPayload | None, recipe: Recipe, *run: Any
) -> FreezeReport:
    """Store the weights of one module as FP8 only; experts run their own recipe.

    An output layer gets a single scale, with which its loss multiplies.

    Args:
        name, module: qualified name and module.
        payload: bytes that a layer took over while it ran another recipe, or None.
        recipe, run: recipe, `emulate` and `notice` of `FrozenStorage.freeze_weights`.
    """
    emulate, notice = run
    if isinstance(module, Float8Experts):
        recipe, emulate = module.fp8.recipe, module.fp8.emulate
    elif isinstance(module, OutputLayer) and payload is None:
        recipe = make_recipe("tensorwise", power_of_two_weights=True)
    numel = sum([local(w).numel() for w in module.fp8_weights])
    before = _thawed_bytes(module.fp8_weights) if payload is None else payload.num_bytes
    if payload is not None or not module.frozen_weights:
        module.freeze_weights(recipe, emulate, notice, payload)
    after = sum(w.payload.num_bytes for w in module.frozen_weights.values()) or numel
    return FreezeReport(_names(name, module), (), recipe, numel, before, after)


def _names(name: str, module: FrozenStorage) -> tuple[str, ...]:
    """Return the qualified names of a layer, or of the weights of experts."""
    keys = module.fp8_weight_names if isinstance(module, Float8Experts) else ()
    return tuple(f"{name}.{key}".lstrip(".") for key in keys) or (name,)


def _warn_of_merges() -> None:
    """Warn if PEFT is imported but would merge adapters in FP8, without `accelerate_fp8`."""
    if "peft" in sys.modules and "accelerate_fp8" not in sys.modules:
        warnings.warn(
            "weights are stored in FP8 only, and PEFT would merge adapters into their FP8 values: "
            "small deltas would be rounded away, and unmerging would not give the weights back. "
            "Merging goes through float32 and BF16 after `import accelerate_fp8`, which torch's "
            "autoload does unless TORCH_DEVICE_BACKEND_AUTOLOAD is 0; or restore the weights' own "
            "dtype before you merge: torch_fp8.thaw(model)",
            stacklevel=4,
        )


def _thawed_bytes(weights: Iterable[Tensor]) -> int:
    """Return the bytes that weights, or this rank's shards, have when they are not frozen."""
    payloads = [(w, getattr(w, "payload", None)) for w in map(local, weights)]
    return sum([w.numel() * (p.thawed_dtype if p else w.dtype).itemsize for w, p in payloads])


def _refusals(model: nn.Module) -> Callable[[FrozenStorage], str | None]:
    """Return a function from a module to the reason why it cannot be frozen, or None if it can.

    Modules below merged adapters cannot, because unmerging would change their weights.
    """
    shared, sharded = _shared_weights(model), {}
    for param in fsdp_params(model):
        info = param._module_info
        why = None if can_be_frozen(param) else BY_TENSOR
        if why is not None and is_expert_weight(info.module, info.param_name):
            why = why_not_gathered(param) or NOT_BY_FSDP
        sharded[id(param.sharded_param)] = why
    adapters = [m for m in model.modules() if own_child(m, "base_layer") is not None]
    merged = {m for a in adapters if getattr(a, "merged", False) for m in a.modules()}

    def reason(module: FrozenStorage) -> str | None:
        if module in merged:
            return "an adapter is merged into its weight; unmerge it before the weight is frozen"
        unknown = NOT_BY_FSDP if isinstance(module, Float8Experts) else BY_TENSOR
        weights = module.fp8_weights
        reasons = [sharded.get(id(w), unknown) for w in weights if isinstance(w, DTensor)]
        if not shared.isdisjoint(map(id, weights)):
            reasons.append("its weight is shared with another module")
        return next(filter(None, reasons), None)

    return reason


def _shared_weights(model: nn.Module) -> set[int]:
    """Return the ids of Parameters that several modules hold, or that share memory with others."""
    every = [p for m in model.modules() for p in m._parameters.values() if p is not None]
    owners = Counter(map(id, every))
    plain = {id(p): p for p in every if type(p) is nn.Parameter}
    memory = {key: p.untyped_storage().data_ptr() for key, p in plain.items() if not p.is_meta}
    places = Counter(memory.values())
    shared = {key for key, count in owners.items() if count > 1}
    return shared | {key for key, place in memory.items() if place and places[place] > 1}


_SAMPLE = 256
"""Number of bytes from the middle of a weight in its fingerprint, before a full comparison."""


@torch.no_grad()
def share_equal_weights(models: Iterable[nn.Module]) -> tuple[int, int]:
    """Let the frozen weights of several models that have equal bytes and scales share memory.

    Args:
        models: any models; several equal weights use the memory of the first one.
    Returns:
        The number of weights that now use the memory of another one, and the number of bytes freed.
    """
    known: dict[Hashable, list[FrozenPayload]] = {}
    num_weights = num_bytes = 0
    layers = {id(m): m for model in models for m in model.modules() if isinstance(m, FrozenStorage)}
    for payload in (held for layer in layers.values() for held in _payloads(layer)):
        if payload.qdata.is_meta or not payload.qdata.numel():
            continue
        candidates = known.setdefault(_fingerprint(payload), [])
        equal = next((other for other in candidates if _equal(payload, other)), None)
        if equal is None:
            candidates.append(payload)
        elif payload.qdata.data_ptr() != equal.qdata.data_ptr():
            num_weights, num_bytes = num_weights + 1, num_bytes + payload.num_bytes
            payload.share(equal)
    return num_weights, num_bytes


def _payloads(layer: FrozenStorage) -> list[FrozenPayload]:
    """Return the payloads of a module's frozen weights, and those kept during an adapter merge."""
    state = layer.fp8.frozen
    unmerged = {} if state is None else state.unmerged
    return [*unmerged.values(), *(weight.payload for weight in layer.frozen_weights.values())]


def _fingerprint(payload: FrozenPayload) -> Hashable:
    qdata = payload.qdata.view(torch.uint8).view(-1)
    middle = qdata[qdata.numel() // 2 :][:_SAMPLE]
    sample = torch.cat([payload.scale.view(-1).view(torch.uint8), middle]).tolist()
    form = (payload.qdata.shape, payload.qdata.device, payload.spec, payload.first_row)
    return (*form, bytes(sample))


def _equal(one: FrozenPayload, other: FrozenPayload) -> bool:
    same_scales = torch.equal(one.scale, other.scale)
    return same_scales and torch.equal(one.qdata.view(torch.uint8), other.qdata.view(torch.uint8))
