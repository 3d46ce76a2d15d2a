"""`Fallback`: takes layers out of FP8 when their statistics raise alarms, and returns them later.

All decisions depend only on numbers that all ranks have joined, so all ranks decide alike.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch.distributed.tensor import DTensor

from torch_fp8.config import FP8Config
from torch_fp8.conversion.autotune import recipe_of
from torch_fp8.monitor.alarm import Crossing, layer_of
from torch_fp8.monitor.parameters import GatedMLPs, Layers
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.ops.hardware import check_device, runs_natively
from torch_fp8.quantization.recipe import RECIPES, Recipe

_BY_CAST = ("input", "weight", "grad_output", "swiglu")
"""The kinds of tensors whose alarms another recipe can fix."""


class Fallback:
    """The layers that have left FP8, since when, and when they return.

    Args:
        layers, mlps: the model's FP8 layers and gated MLPs.
        config: the configuration, with ``on_alarm`` and ``fallback_steps``.
    Raises:
        ValueError: the device cannot run the recipe of ``on_alarm``, or weights are sharded,
            because FSDP2 gathers them in one recipe's form.
    """

    def __init__(self, layers: Layers, mlps: GatedMLPs, config: FP8Config) -> None:
        self.layers, self.config = dict(layers), config
        self._down = {name: f"{name}.{spec.down}".lstrip(".") for name, _, spec in mlps}
        self._original = {name: layer.fp8.recipe for name, layer in layers}
        self.fallen: dict[str, dict[str, Any]] = {}
        self.times: dict[str, int] = {}
        self._finer: Recipe | None = None
        if config.on_alarm in RECIPES:
            self._finer = recipe_of(config, config.on_alarm)
            for name, layer in layers:
                if isinstance(layer.weight, DTensor):
                    raise ValueError(
                        f"FP8Config(on_alarm={config.on_alarm!r}): the weight of '{name}' is "
                        f"sharded, and is gathered for recipe {layer.fp8.recipe.name!r}; use "
                        "on_alarm='bf16'"
                    )
                check_device(layer.weight.device, config.on_alarm, config.emulate)

    def judge(self, step: int, crossed: Iterable[Crossing]) -> list[dict[str, Any]]:
        """Let layers fall back and return after a measured step; return the events.

        Args:
            step: the measured step.
            crossed: the bounds that it crossed.
        """
        if self.config.on_alarm == "warn":
            return []
        why: dict[str, Crossing] = {}
        for crossing in crossed:
            if crossing.bound.kind in _BY_CAST:
                layer = layer_of(crossing.name)
                layer = self._down.get(layer, layer)
                if layer in self.layers:
                    why.setdefault(layer, crossing)
        events: list[dict[str, Any]] = []
        target = "BF16" if self.config.on_alarm == "bf16" else f"recipe {self.config.on_alarm}"
        for name, crossing in why.items():
            if name in self.fallen:
                self.fallen[name]["last"] = step
                continue
            self.times[name] = self.times.get(name, 0) + 1
            self.fallen[name] = {"since": step, "last": step, "why": str(crossing)}
            what = f"{name} runs {target}: {crossing}"
            events.append({"event": "fallback", "layer": name, "what": what})
        for name, state in list(self.fallen.items()):
            wait = self.config.fallback_steps * 2 ** (self.times[name] - 1)
            if step - state["last"] >= wait:
                del self.fallen[name]
                what = f"{name} runs FP8 again: no bound crossed for {step - state['last']} steps"
                events.append({"event": "return", "layer": name, "what": what})
        self.apply()
        return events

    def apply(self) -> None:
        """Configure each layer for what it should run now."""
        for name, layer in self.layers.items():
            fallen = name in self.fallen
            finer = None if layer.frozen_weight is not None else self._finer
            if fallen and finer is None:
                pause(layer)
                continue
            resume(layer)
            recipe = self._original[name]
            if fallen and finer is not None:
                recipe = replace(finer, smooth=recipe.smooth)
            recipe = replace(recipe, bf16_forward=layer.fp8.recipe.bf16_forward)
            if layer.fp8.recipe != recipe:
                natively = runs_natively(layer.weight.device, recipe.name)
                emulate = layer.fp8.config.emulate and not natively
                layer.configure(layer.fp8.name, layer.fp8.config, recipe, emulate)

    def undo(self) -> None:
        """Restore the converted FP8 of all layers, and forget all fallbacks."""
        self.fallen, self.times = {}, {}
        self.apply()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, in JSON types."""
        fallen = {name: dict(state) for name, state in self.fallen.items()}
        return {"fallen": fallen, "times": dict(self.times)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; entries for layers that no longer exist are ignored."""
        known = self.layers
        self.fallen = {n: dict(s) for n, s in state["fallen"].items() if n in known}
        self.times = {n: int(t) for n, t in state["times"].items() if n in known}
        self.apply()


def pause(layer: Float8Layer) -> None:
    """Run a layer in high precision from now on; a second call has no effect.

    The layer keeps its class, its buffers and its keys in checkpoints. The modules that produce its
    input and gather its weight already check `Float8Layer.runs_fp8`.
    """
    if not layer.fp8.paused:
        layer.fp8.payloads.forget()
        layer.fp8.paused = True


def resume(layer: Float8Layer) -> None:
    """Run a paused layer in FP8 again, with empty histories: it recorded nothing meanwhile."""
    if layer.fp8.paused:
        layer.fp8.paused = False
        layer.reset_scaling()
