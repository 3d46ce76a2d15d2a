"""Training programs drawn from a seed: a model, options, an optimizer and a loop."""

import random
from dataclasses import dataclass, field
from typing import Any

from tests.random_models import MODELS, OF_HOST
from torch_fp8 import FP8Config

_RECIPES = ("auto", "tensorwise", "delayed", "rowwise", "blockwise", "mxfp8")
_OPTIMIZERS = ("AdamW", "AdamW", "AdamW", "Adam", "SGD", "Muon", "RMSprop", "Adafactor", "RAdam")
EVENTS = (
    *("load", "load all", "copy", "pickle", "convert", "restore", "revert", "state"),
    *("inference", "high precision", "functional", "swap", "report", "train", "requires_grad"),
)
"""What a loop does between two steps that changes nothing in a run, to the bit."""


@dataclass(frozen=True)
class Program:
    """What a seed draws."""

    seed: int
    model: str
    dtype: str
    options: dict[str, Any]
    optimizer: dict[str, Any]
    loop: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = {**self.options, **self.optimizer, **self.loop}
        return f"seed {self.seed}: {self.model} {self.dtype} {parts}"


def _options(rng: random.Random) -> dict[str, Any]:
    choices: dict[str, tuple[float, tuple[Any, ...]]] = {
        "opt_level": (1.0, ("O1", "O2", "O2", "O3", "O3")),
        "wgrad": (0.2, ("bf16",)),
        "grad_format": (0.2, ("e4m3", "e5m2")),
        "fast_accum": (0.1, ((), ("fprop", "dgrad"))),
        "gradient_release": (0.15, (True,)),
        "cache_weights": (0.3, (True,)),
        "keep_eval_weights": (0.2, (False,)),
        "update_clipping": (0.15, (True,)),
        "checkpoint_states": (0.2, ("fp8",)),
        "split_weights": (0.15, (False,)),
        "frozen_weights": (0.3, ("fp8", "keep")),
        "save_activations": (0.2, ("bf16",)),
        "smooth_swiglu": (0.2, (True,)),
        "eval_fp8": (0.2, (False,)),
        "skip": (0.2, ((), ("first", "lm_head"), ("blocks.0", "layers.0", "h.0"))),
        "overrides": (0.2, ({"last": {"recipe": "bf16"}}, {"blocks.1": {"recipe": "rowwise"}})),
        "monitor": (0.1, (2,)),
        "seed": (0.2, (7,)),
    }
    options = {"recipe": rng.choice(_RECIPES)}
    for name, (probability, values) in choices.items():
        if rng.random() < probability:
            options[name] = rng.choice(values)
    if options["recipe"] == "delayed" and rng.random() < 0.5:
        options |= {"amax_history_len": rng.choice((1, 2, 16)), "margin": rng.choice((0, 1))}
    while rng.random() < 0.95 and (excluded := _excluded(options)):
        options = {name: value for name, value in options.items() if name not in excluded}
    return options


def _excluded(options: dict[str, Any]) -> list[str]:
    """The options that `FP8Config` names when it refuses them, but for the recipe and the level."""
    try:
        FP8Config(**options)
    except ValueError as error:
        named = [name for name in options if name in str(error)]
        return [name for name in named if name not in ("recipe", "opt_level")]
    return []


def _optimizer(rng: random.Random) -> dict[str, Any]:
    name = rng.choice(_OPTIMIZERS)
    optimizer: dict[str, Any] = {"optimizer": name, "groups": rng.choice((1, 2))}
    flags = {
        "foreach": (True, False),
        "fused": (True,),
        "maximize": (True,),
        "amsgrad": (True,),
        "weight_decay": (0.0, 0.1),
    }
    known = {
        "AdamW": flags.keys(),
        "Adam": flags.keys(),
        "SGD": ("foreach", "fused", "maximize", "weight_decay"),
        "RMSprop": ("foreach", "maximize", "weight_decay"),
        "RAdam": ("foreach", "maximize", "weight_decay"),
        "Adafactor": ("foreach", "maximize", "weight_decay"),
        "Muon": ("weight_decay",),
    }[name]
    for flag in known:
        if rng.random() < (0.08 if flag == "amsgrad" else 0.25):
            optimizer[flag] = rng.choice(flags[flag])
    if optimizer.get("fused"):
        optimizer.pop("foreach", None)
    return optimizer


def _loop(rng: random.Random, released: bool) -> dict[str, Any]:
    def sometimes(probability: float, *values: Any) -> Any:
        return rng.choice(values) if rng.random() < probability else None

    loop = {
        "autocast": sometimes(0.7, "bfloat16"),
        "accumulation": sometimes(0.3, 2, 3),
        "clipping": sometimes(0.3, "norm", "value"),
        "scaler": sometimes(0.15, True),
        "recompute": sometimes(0.3, "reentrant", "plain"),
        "compile": sometimes(0.12, "model", "blocks"),
        "evaluate": sometimes(0.4, True),
        "keep_zeros": sometimes(0.3, True),
        "closure": sometimes(0.15, True),
        "scheduler": sometimes(0.3, True),
        "average": sometimes(0.3, "deepcopy", "AveragedModel"),
        "event": sometimes(0.6, *EVENTS),
        "freeze": sometimes(0.25, "freeze", "thaw"),
        "write": sometimes(0.3, "mul", "data", "copy", "swap", "init"),
        "penalty": sometimes(0.15, True),
        "rows": sometimes(0.4, "odd", "empty", "one"),
    }
    if released:  # it refuses these
        for name in ("accumulation", "clipping", "scaler"):
            loop[name] = None
    return {name: value for name, value in loop.items() if value is not None}


def draw(seed: int) -> Program:
    """Return the program of a seed."""
    rng = random.Random(seed)
    model = rng.choice(tuple(MODELS))
    dtype = rng.choice(("float32", "float32", "float32", "bfloat16"))
    options, optimizer = _options(rng), _optimizer(rng)
    loop = _loop(rng, "gradient_release" in options)
    if loop.get("event") in ("convert", "pickle", "restore", "revert"):
        loop.pop("freeze", None)  # what is split then depends on what is frozen then
    if loop.get("event") == "functional" and options["recipe"] == "delayed":
        loop.pop("event")  # a forward in training mode is recorded
    if loop.get("event") == "pickle" and model in OF_HOST:  # its checkpoints cannot be pickled
        loop.pop("event")
    if loop.get("event") == "high precision" and model == "images":  # it counts batches
        loop.pop("event")
    if options.get("frozen_weights") == "fp8":  # it says that such weights stay frozen
        loop.pop("freeze", None)
    if loop.get("recompute") == "reentrant" and (model == "frozen" or "penalty" in loop):
        # Its blocks have no gradients, or weights have two, which are rounded one by one.
        loop["recompute"] = "plain"
    return Program(seed, model, dtype, options, optimizer, loop)
