"""The choice that ``auto`` makes: the recipe that is the fastest on the layers of this model.

At conversion each distinct shape among the linear layers that FP8 could run is timed on the device,
with each candidate and in BF16 (`torch_fp8.conversion.layer_benchmark`). The model gets one recipe,
with which its layers take the least time together; a layer that is no faster with it than in BF16
stays in BF16, and counts as that. Frozen layers are timed as trained ones are, so that a model and
its frozen copy run alike.

One rank measures for all that have its kind of card
(`torch_fp8.distributed.agreement.answer_of_one`). A job with several kinds is refused when its
ranks compare their configurations. A process that converts before there is a process group measures
for itself, and its choice is compared when the model is wrapped. Where nothing is measured ``auto``
is `torch_fp8.ops.hardware.resolve_auto`'s.
"""

import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from torch_fp8.config import FP8Config
from torch_fp8.conversion.layer_benchmark import (
    Card,
    LayerShape,
    LayerTimes,
    kept_weights,
    layer_times,
)
from torch_fp8.distributed.agreement import answer_of_one, can_ask, in_several_ranks
from torch_fp8.distributed.fsdp.split_weights import fsdp_params
from torch_fp8.distributed.tensor_parallel.styles import gathers_features
from torch_fp8.ops.hardware import card_name, resolve_auto, runs_natively
from torch_fp8.quantization.recipe import E4M3_ONLY, Recipe, make_recipe

CANDIDATES = ("tensorwise", "rowwise", "blockwise")
"""The recipes with BF16's loss that scale by the tensors at hand: unlike ``delayed``, they do not
depend on earlier steps.
"""
MARGIN = 0.02
"""The share of time by which FP8 must beat BF16: noise must not decide, and BF16 is exact."""


@dataclass(frozen=True)
class ExpertChoice:
    """What ``auto`` has measured of experts.

    Attributes:
        speedups: time in BF16 over that in FP8, by the words for a block.
        left: reasons why weights stay in BF16, by qualified name.
    """

    speedups: Mapping[str, float] = field(default_factory=dict)
    left: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return "; ".join(f"{words}: {ratio:.2f} times" for words, ratio in self.speedups.items())


NO_EXPERTS = ExpertChoice()


@dataclass(frozen=True)
class RecipeChoice:
    """The recipe that ``auto`` chose, and why.

    Attributes:
        recipe: the name of the chosen recipe.
        tokens: the number of tokens measured with.
        speedups: the time of all layers in BF16 over theirs with a recipe, by its name, with those
            that stay in BF16; empty if nothing was measured.
        left: the reasons why layers stay in BF16, by qualified name.
        not_measured: why nothing was measured; None: it was.
        alone: whether this process measured for itself in a job of several, before there was a
            process group.
        experts: choice for fused experts, with their measured times.
    """

    recipe: str
    tokens: int
    speedups: Mapping[str, float] = field(default_factory=dict)
    left: Mapping[str, str] = field(default_factory=dict)
    not_measured: str | None = None
    alone: bool = False
    experts: ExpertChoice = NO_EXPERTS

    @property
    def label(self) -> str:
        """The label of its line in a summary."""
        return "measured" if self.not_measured is None else "auto"

    def __str__(self) -> str:
        if self.not_measured is not None:
            return f"chose {self.recipe} without measuring: {self.not_measured}"
        rest = [f"{n} {ratio:.2f}" for n, ratio in self.speedups.items() if n != self.recipe]
        others = f" ({', '.join(rest)})" if rest else ""
        alone = (
            "; measured by this process alone, before the process group existed: ranks compare "
            "their layers when the model is wrapped"
            if self.alone
            else ""
        )
        return (
            f"{self.recipe} {self.speedups[self.recipe]:.2f} times as fast as BF16{others}, linear "
            f"layers only, forward and backward of {self.tokens} tokens{alone}"
        )


def choose_recipe(
    model: nn.Module, layers: Mapping[str, nn.Linear], config: FP8Config, device: torch.device
) -> RecipeChoice:
    """Choose the recipe for ``config.recipe == "auto"``; a failure to measure is a warning.

    Args:
        model: the model to be converted.
        layers: the layers of `model` that FP8 can run, by qualified name.
        config: the options of every candidate.
        device: the device on which the model will run.
    Raises:
        RuntimeError: see `torch_fp8.distributed.agreement.answer_of_one`.
    """
    default, names = resolve_auto(device), candidates(config, device)
    by_tensor = config.communication != "off" and any(map(gathers_features, layers.values()))
    if by_tensor:
        names = tuple(name for name in names if name == "tensorwise")
    reason = _why_not_measured(config, names) if layers else "there is no layer to measure"
    if reason is not None:
        return RecipeChoice(default, config.tokens, not_measured=reason)
    shapes = layer_shapes(model, layers)
    distinct = sorted(set(shapes.values()), key=repr)
    recipes = tuple(recipe_of(config, name) for name in names)
    weights = [layer.weight for layer in layers.values()]
    split = all(w.dtype == torch.float32 and not isinstance(w, DTensor) for w in weights)
    kept = kept_weights(config) if split else None
    options = (config.tokens, config.wgrad, config.grad_format, config.fast_accum, kept, by_tensor)
    card = Card.of(device)
    texts = "a layer of ", repr(default), f", or fewer tokens than {config.tokens}"

    def time(shape: LayerShape) -> LayerTimes:
        return layer_times(card, shape, config.tokens, recipes, kept)

    answer = agreed_times(device, options, distinct, time, *texts)
    if "failure" in answer:
        return RecipeChoice(default, config.tokens, not_measured=answer["failure"])
    times = [LayerTimes(*of_shape) for of_shape in answer["times"]]
    return _choice(shapes, dict(zip(distinct, times, strict=True)), config.tokens)


def candidates(config: FP8Config, device: torch.device) -> tuple[str, ...]:
    """Return the recipes that a measurement on `device` is to compare; none if nothing is to be
    measured.

    Args:
        config: with a recipe other than ``auto``, with ``emulate`` or with Transformer Engine there
            are none.
        device: none but on a CUDA device that runs them natively.
    """
    if config.recipe != "auto" or config.emulate or config.backend != "torch":
        return ()
    names = [n for n in CANDIDATES if not (config.grad_format == "e5m2" and n in E4M3_ONLY)]
    return tuple(name for name in names if runs_natively(device, name))


def recipe_of(config: FP8Config, name: str) -> Recipe:
    """Return the recipe `name` with the options of `config`."""
    return make_recipe(
        name,
        wgrad=config.wgrad,
        grad_format=config.grad_format,
        fast_accum=config.fast_accum,
        power_of_two_weights=bool(config.cache_weights),
    )


def layer_shapes(model: nn.Module, layers: Mapping[str, nn.Linear]) -> dict[str, LayerShape]:
    """Return, by qualified name, the shape of the GEMMs that each layer runs on one rank.

    A weight that tensor parallelism has sharded counts with its largest part; one that FSDP2 has
    sharded is whole when it is multiplied.
    """
    gathered = {
        owner: tuple(param._orig_size)
        for param in fsdp_params(model)
        for owner in (param._module_info.module, *param._module_info.shared_modules)
        if len(param._orig_size) == 2
    }
    shapes = {}
    for name, layer in layers.items():
        rows, cols = gathered.get(layer) or _largest_part(layer.weight)
        if not isinstance(layer, nn.Linear):  # Conv1D's weight is (K, N)
            rows, cols = cols, rows
        dtype = layer.weight.dtype
        # Float32 weights are multiplied in BF16 under autocast, and become it at O2.
        dtype = dtype if dtype.itemsize == 2 else torch.bfloat16
        shapes[name] = LayerShape(rows, cols, layer.bias is not None, dtype)
    return shapes


def _largest_part(weight: torch.Tensor) -> tuple[int, ...]:
    size = list(weight.shape)
    if isinstance(weight, DTensor):
        for axis, placement in enumerate(weight.placements):
            if isinstance(placement, Shard):
                size[placement.dim] = -(-size[placement.dim] // weight.device_mesh.size(axis))
    return tuple(size)


def _why_not_measured(config: FP8Config, names: Sequence[str]) -> str | None:
    if config.backend != "torch":
        return "Transformer Engine has its own casts"
    if config.emulate:
        return "emulate=True"
    if not names:
        return "FP8 is emulated here"
    if not can_ask():
        return "the ranks of this process group cannot share what one of them measures"
    return None


def agreed_times(
    device: torch.device,
    options: tuple[Any, ...],
    shapes: Sequence[Any],
    time: Callable[[Any], Any],
    *texts: str,
) -> dict[str, Any]:
    """Return the times of each shape that one rank has measured; a failure is a warning.

    Args:
        device: device to time on.
        options: what the times depend on beside the shapes.
        shapes: what is timed.
        time: returns the times of a shape.
        texts: for the warning, the noun before a shape, what ``auto`` runs without times, and more
            ways to go on than a recipe's name.
    Returns:
        ``{"times": those of each}`` or ``{"failure": why there are none}``.
    """
    question = repr((card_name(device), options, shapes))
    answer: dict[str, Any] = json.loads(
        answer_of_one(question, lambda: _timed(device, shapes, time, *texts))
    )
    return answer


def _timed(
    device: torch.device, shapes: Sequence[Any], time: Callable[[Any], Any], *texts: str
) -> str:
    times, (noun, runs, way_out) = [], texts
    try:
        for shape in shapes:
            times.append(time(shape))
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0][:200]
        failure = f"timing {noun}{shape} failed ({type(error).__name__}: {line})"
        warnings.warn(
            f"FP8Config(recipe='auto') runs {runs} without measuring: {failure}. Name a recipe to "
            f"skip measuring{way_out}",
            stacklevel=2,
        )
        return json.dumps({"failure": failure})
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what was measured with is not needed again
    return json.dumps({"times": times})


def _choice(
    shapes: Mapping[str, LayerShape], times: Mapping[LayerShape, LayerTimes], tokens: int
) -> RecipeChoice:
    counts = Counter(shapes.values())
    plain = sum(count * times[shape].plain for shape, count in counts.items())
    names = next(iter(times.values())).fp8
    total = {
        name: sum(count * _as_it_runs(times[shape], name) for shape, count in counts.items())
        for name in names
    }
    best = min(total, key=lambda name: total[name])
    left = {
        name: _slower(shape, times[shape], best, tokens)
        for name, shape in shapes.items()
        if not _is_faster(times[shape], best)
    }
    speedups = {name: plain / total[name] for name in names}
    alone = not in_several_ranks() and int(os.environ.get("WORLD_SIZE") or 1) > 1
    return RecipeChoice(best, tokens, speedups, left, alone=alone)


def _is_faster(times: LayerTimes, recipe: str) -> bool:
    return times.fp8[recipe] < (1 - MARGIN) * times.plain


def _as_it_runs(times: LayerTimes, recipe: str) -> float:
    return times.fp8[recipe] if _is_faster(times, recipe) else times.plain


def _slower(shape: LayerShape, times: LayerTimes, recipe: str, tokens: int) -> str:
    plain, fp8 = (f"{1e6 * t:.0f}" for t in (times.plain, times.fp8[recipe]))
    name = "BF16" if shape.dtype == torch.bfloat16 else "FP16"
    return f"{shape} is not faster in FP8: {fp8} us against {plain} us in {name} at {tokens} tokens"
