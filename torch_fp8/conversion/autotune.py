"""Recipe ``auto``: measure which recipe is fastest on the layers of this model.

At conversion, `torch_fp8.conversion.layer_benchmark` times each distinct shape of the linear layers
that FP8 could run, with each candidate recipe and in BF16. The model gets the recipe with the least
total time. A layer that is no faster with it than in BF16 stays in BF16, and enters the total with
its BF16 time. Layers that read the same input are timed together as well: if they are faster
together than with some of them in BF16, all run in FP8, so that small k and v follow q. Frozen
layers are timed like trained ones, so that a model and its frozen copy run the same recipes.

One rank measures for all ranks with the same kind of card
(`torch_fp8.ops.one_rank.answer_of_one`). If a job has several kinds of cards, it fails
when its ranks compare their configurations. A process that converts before a process group exists
measures for itself, and the ranks compare their choices when the model is wrapped. If nothing is
measured, `torch_fp8.ops.hardware.UNMEASURED` runs.
"""

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from torch_fp8.config import FP8Config
from torch_fp8.conversion.layer_benchmark import (
    LayerShape,
    LayerTimes,
    Readers,
    kept_weights,
    layer_times,
)
from torch_fp8.distributed.fsdp.split_weights import fsdp_params
from torch_fp8.distributed.tensor_parallel.styles import gathers_features
from torch_fp8.ops.hardware import UNMEASURED, card_name, runs_natively
from torch_fp8.ops.one_rank import answer_of_one, can_ask, in_several_ranks
from torch_fp8.quantization.recipe import E4M3_ONLY, Recipe, make_recipe

CANDIDATES = ("tensorwise", "rowwise", "blockwise")
"""Recipes with parity to BF16's loss whose scales come from the current tensors.

Unlike ``delayed``, they do not depend on earlier steps.
"""
MARGIN = 0.02
"""Share of BF16's time that FP8 must save: noise must not decide, and BF16 is more exact."""


@dataclass(frozen=True)
class RecipeChoice:
    """The recipe that ``auto`` chose, with its measurements.

    Attributes:
        recipe: name of the chosen recipe.
        tokens: number of tokens in the measurement.
        speedups: time of all layers in BF16 divided by their time with a recipe, by the recipe's
            name, with slower layers in BF16; empty if nothing was measured.
        left: reasons why layers stay in BF16, by qualified name.
        not_measured: reason why nothing was measured, or None if there was a measurement.
        alone: whether this process, one of several in the job, measured for itself because there
            was no process group yet.
    """

    recipe: str
    tokens: int
    speedups: Mapping[str, float] = field(default_factory=dict)
    left: Mapping[str, str] = field(default_factory=dict)
    not_measured: str | None = None
    alone: bool = False

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
    model: nn.Module,
    layers: Mapping[str, nn.Linear],
    groups: Sequence[tuple[str, ...]],
    config: FP8Config,
    device: torch.device,
) -> RecipeChoice:
    """Choose the recipe for ``config.recipe == "auto"``; warn if the measurement fails.

    Args:
        model: model to be converted.
        layers: layers of `model` that FP8 can run, by qualified name.
        groups: names of those that read the same input; a layer is in one group at most.
        config: options for every candidate.
        device: device on which the model will run.
    Raises:
        RuntimeError: see `torch_fp8.ops.one_rank.answer_of_one`.
    """
    names = candidates(config, device)
    by_tensor = config.communication != "off" and any(map(gathers_features, layers.values()))
    if by_tensor:
        names = tuple(name for name in names if name == "tensorwise")
    reason = _why_not_measured(config, names) if layers else "there is no layer to measure"
    if reason is not None:
        return RecipeChoice(UNMEASURED, config.tokens, not_measured=reason)
    shapes = layer_shapes(model, layers)
    readers = [*groups, *((name,) for name in layers if not any(name in g for g in groups))]
    alone: set[Readers] = {(shape,) for shape in shapes.values()}
    distinct = sorted(alone | {_shapes_of(names, shapes) for names in readers}, key=repr)
    recipes = tuple(recipe_of(config, name) for name in names)
    weights = [layer.weight for layer in layers.values()]
    split = all(w.dtype == torch.float32 and not isinstance(w, DTensor) for w in weights)
    kept = kept_weights(config) if split else None
    options = (config.tokens, config.wgrad, config.grad_format, config.fast_accum, kept, by_tensor)
    question = repr((card_name(device), options, distinct))
    timed = partial(_timed, device, distinct, config.tokens, recipes, kept)
    answer = json.loads(answer_of_one(question, timed))
    if "failure" in answer:
        return RecipeChoice(UNMEASURED, config.tokens, not_measured=answer["failure"])
    times = [LayerTimes(*of_shape) for of_shape in answer["times"]]
    measured = _Measured(shapes, dict(zip(distinct, times, strict=True)))
    return _choice(readers, measured, config.tokens)


def candidates(config: FP8Config, device: torch.device) -> tuple[str, ...]:
    """Return the recipes to measure on `device`, or an empty tuple to measure nothing.

    Args:
        config: configuration; a named recipe, ``emulate`` and Transformer Engine need no
            measurement.
        device: device; recipes that it cannot run natively are left out.
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
    )


def layer_shapes(model: nn.Module, layers: Mapping[str, nn.Linear]) -> dict[str, LayerShape]:
    """Return the GEMM shape of each layer on one rank, by qualified name.

    For a weight sharded by tensor parallelism this is the largest shard. FSDP2 gathers the whole
    weight before it is multiplied.
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
        # Float32 weights are multiplied in BF16: under autocast, or because O2 stores BF16.
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


def _shapes_of(names: Sequence[str], shapes: Mapping[str, LayerShape]) -> Readers:
    return tuple(shapes[name] for name in names)


def _timed(device: torch.device, distinct: Sequence[Readers], tokens: int, *options: Any) -> str:
    """Return all times as JSON, or the reason why they cannot be measured; warn then.

    Args:
        device, distinct, tokens: arguments of `layer_times`, for several shapes.
        options: its other arguments.
    """
    times = []
    try:
        for shapes in distinct:
            times.append(layer_times(device, shapes, tokens, *options))
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0][:200]
        layer = " + ".join(map(str, shapes))
        failure = f"timing a layer of {layer} failed ({type(error).__name__}: {line})"
        warnings.warn(
            f"FP8Config(recipe='auto') runs {UNMEASURED!r} without measuring: {failure}. "
            f"Name a recipe to skip measuring, or fewer tokens than {tokens}",
            stacklevel=2,
        )
        return json.dumps({"failure": failure})
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()  # free the benchmark's tensors
    return json.dumps({"times": times})


@dataclass(frozen=True)
class _Measured:
    """The times of a model's layers, alone and together.

    Attributes:
        shapes: shape of each layer by name.
        times: times of layers that read one input, by their shapes.
    """

    shapes: Mapping[str, LayerShape]
    times: Mapping[Readers, LayerTimes]

    def of(self, *names: str) -> LayerTimes:
        """Return the times of layers that read one input."""
        return self.times[_shapes_of(names, self.shapes)]

    def as_they_run(self, names: Sequence[str], recipe: str) -> tuple[float, list[str]]:
        """Return the seconds of layers with one input, and which of them stay in BF16."""
        together = self.of(*names)
        left = [name for name in names if not _is_faster(self.of(name), recipe)]
        if len(names) == 1:
            return (together.plain if left else together.fp8[recipe]), left
        # Together without FP8, they also add up the gradients of their input.
        mixed = together.plain - sum(self.of(name).plain for name in names)
        mixed += sum(self.as_they_run([name], recipe)[0] for name in names)
        if _is_faster(together, recipe) and together.fp8[recipe] < mixed:
            return together.fp8[recipe], []
        return mixed, left


def _choice(readers: Sequence[tuple[str, ...]], measured: _Measured, tokens: int) -> RecipeChoice:
    plain = sum(measured.of(*names).plain for names in readers)
    recipes = next(iter(measured.times.values())).fp8
    runs = {
        recipe: [measured.as_they_run(names, recipe) for names in readers] for recipe in recipes
    }
    total = {recipe: sum(time for time, _ in of_inputs) for recipe, of_inputs in runs.items()}
    best = min(total, key=lambda recipe: total[recipe])
    stay = {name for _, left in runs[best] for name in left}
    left = {
        name: _slower(shape, measured.of(name), best, tokens)
        for name, shape in measured.shapes.items()
        if name in stay
    }
    speedups = {recipe: plain / total[recipe] for recipe in recipes}
    alone = not in_several_ranks() and int(os.environ.get("WORLD_SIZE") or 1) > 1
    return RecipeChoice(best, tokens, speedups, left, alone=alone)


def _is_faster(times: LayerTimes, recipe: str) -> bool:
    return times.fp8[recipe] < (1 - MARGIN) * times.plain


def _slower(shape: LayerShape, times: LayerTimes, recipe: str, tokens: int) -> str:
    plain, fp8 = (f"{1e6 * t:.0f}" for t in (times.plain, times.fp8[recipe]))
    name = "BF16" if shape.dtype == torch.bfloat16 else "FP16"
    return f"{shape} is not faster in FP8: {fp8} us against {plain} us in {name} at {tokens} tokens"
