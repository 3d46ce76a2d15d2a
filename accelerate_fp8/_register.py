"""The extension points in Accelerate, transformers, TRL and PEFT; `_fp8_autoload` calls `extend`
with each of their modules on its import.

`extend` may be called twice. If an upstream name has moved, it raises AttributeError before it
changes anything, and the host works as without this package. A wrapper keeps the wrapped function
as ``_fp8_original``. This module imports only the standard library, because Accelerate is half
imported when it runs. Wrappers that don't need the engine are here; the others are in the modules
of `_WRAPPERS`.
"""

import os
import sys
from importlib import import_module
from typing import Any

from _fp8_points import Wanted, refusal, refuse_when, wrap

_STANDARD, _ADAPTERS = __name__, "accelerate_fp8.adapters"
_TRAINER, _ROLLOUTS = "accelerate_fp8.trainer", "accelerate_fp8.rollouts"
_REFUSING = ("accelerate.accelerator", "transformers.training_args")
"""Modules whose first extension point raises the refusal of a host that is too old."""
_UNCHECKED = (
    *("accelerate.utils.imports", "transformers.generation.utils"),
    *("transformers.modeling_utils", "peft.tuners.tuners_utils", "peft.utils.save_and_load"),
)
"""Modules that are extended in any version, because the flag is accepted or FP8 runs without it."""


BACKEND_VARIABLE, ENGINE = "ACCELERATE_FP8_BACKEND", "TORCH_FP8"


def asks_for_fp8(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the arguments or the launcher request this engine's FP8."""
    handlers = kwargs.get("kwargs_handlers") or ()
    theirs = any(type(handler).__name__.endswith("RecipeKwargs") for handler in handlers)
    theirs = theirs or os.environ.get(BACKEND_VARIABLE, "") not in ("", ENGINE)
    given = [str(value).lower() for value in (*args, *kwargs.values())]
    return (launched_with_fp8() or "fp8" in given) and not theirs


def may_use_engine(accelerator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return False if FP8 is certainly not requested, so that a BF16 run imports nothing of ours.

    Args:
        accelerator: the object whose method is called, possibly before its ``__init__``.
        args: the positional arguments of the method.
        kwargs: the keyword arguments of the method.
    """
    if "state" in accelerator.__dict__:  # constructed
        return "_fp8_preparation" in accelerator.__dict__
    state = sys.modules["accelerate.state"]
    running = state.AcceleratorState().mixed_precision if state.is_initialized() else None
    precisions = [*args, *kwargs.values(), running]
    return (
        "accelerate_fp8.flags" in sys.modules
        or any(isinstance(p, str) and p.lower().startswith("fp8") for p in precisions)
        or os.environ.get("ACCELERATE_MIXED_PRECISION", "").lower().startswith("fp8")
    )


def launched_with_fp8() -> bool:
    """Return whether the launcher requested FP8."""
    return os.environ.get("ACCELERATE_MIXED_PRECISION", "").lower() == "fp8"


def is_fp8_available(original: Any) -> bool:
    """Replace Accelerate's function: FP8 no longer needs one of its optional libraries.

    The launcher and AcceleratorState call it before they accept the flag. If the user chooses a
    library explicitly and it is missing, its recipe handler still refuses it.
    """
    return True


def check_cuda_fp8_capability(original: Any) -> bool:
    """Extend Accelerate's function for AcceleratorState: no silent FP16 on older cards."""
    return bool(import_module("accelerate_fp8.backend").PRECISION_KEPT.get() or original())


def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Extend ``AcceleratorState.__init__``: read the environment again.

    `notebook_launcher` requests FP8 there long after torch was imported.
    """
    import_module("_fp8_autoload").load("accelerate_fp8")
    original(self, *args, **kwargs)


def ask_options(
    original: Any, question: str, options: Any, convert_value: Any, default: int = 0
) -> Any:
    """Extend the menu of ``accelerate config``: list this engine first among the FP8 backends."""
    choice = original(question, [ENGINE.lower(), *options], None, default)
    return convert_value(choice - 1) if choice else ENGINE


def generate(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Extend ``GenerationMixin.generate``: run it in a `torch_fp8.rollout` context."""
    with import_module("torch_fp8").rollout(self):
        return original(self, *args, **kwargs)


def _of_accelerator(host: Any, *_: Any) -> bool:
    return may_use_engine(getattr(host, "accelerator", host), (), {})


def _asks_backend(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    convert_backend = sys.modules["accelerate.commands.config.cluster"]._convert_fp8_backend
    return convert_backend in (*args, *kwargs.values())


def _reference_of(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return may_use_engine(args[0] if args else kwargs["accelerator"], (), {})


def _saves_fp8(model: Any, *_: Any) -> bool:
    own = vars(model)
    return "_fp8_prepared" in own or (bool(own.get("_weight_conversions")) and launched_with_fp8())


def _is_uncomputed(logits: Any, *_: Any) -> bool:
    return type(logits).__name__ == "LazyLogits"


def _may_be_frozen(*_: Any) -> bool:
    return "torch_fp8.nn.frozen_storage" in sys.modules


_WRAPPERS: dict[str, tuple[str, Wanted]] = {
    "accelerate.utils.imports": (_STANDARD, lambda *_: True),
    "accelerate.state": (_STANDARD, lambda *_: True),
    "accelerate.accelerator": ("accelerate_fp8.accelerator", may_use_engine),
    "accelerate.commands.config.cluster": (_STANDARD, _asks_backend),
    "transformers.training_args": (_TRAINER, lambda *_: launched_with_fp8()),
    "transformers.trainer": (_TRAINER, _of_accelerator),
    "transformers.generation.utils": (_STANDARD, lambda *_: "torch_fp8.nn.linear" in sys.modules),
    "transformers.modeling_utils": (_TRAINER, _saves_fp8),
    "trl.models.utils": (_TRAINER, _reference_of),
    "trl.trainer.utils": (_TRAINER, _is_uncomputed),
    "trl.generation.vllm_generation": ("accelerate_fp8.engine_sync", _of_accelerator),
    "trl.trainer.grpo_trainer": (_ROLLOUTS, _of_accelerator),
    "trl.trainer.rloo_trainer": (_ROLLOUTS, _of_accelerator),
    "peft.tuners.tuners_utils": (_ADAPTERS, _may_be_frozen),
    "peft.utils.save_and_load": (_ADAPTERS, _may_be_frozen),
}
"""The module of our functions for each module of a host, and the test of calls that need them."""


def extend(module: Any) -> None:
    """Wrap the names that `_fp8_points` lists for a module, or refuse a host that is too old.

    TRL's trainers with other methods than the known ones warn that nothing is measured.
    """
    name = module.__name__
    too_old = None if name in _UNCHECKED else refusal(name.partition(".")[0])
    package, wanted = _WRAPPERS[name]
    if too_old is None:
        try:
            wrap(module, package, wanted)
        except AttributeError:
            if package != _ROLLOUTS:
                raise
            cls = "GRPOTrainer" if "grpo" in name else "RLOOTrainer"
            wrap(module, package, wanted, {f"{cls}.log": "say_unmeasured"})
    elif name in _REFUSING:
        refuse_when(asks_for_fp8, module, too_old)
    if name == "peft.tuners.tuners_utils":
        _extend_layers(module.BaseTunerLayer)


def _extend_layers(base: Any) -> None:
    """Extend ``merge`` and ``unmerge`` of PEFT's layers for bases that are stored only in FP8."""

    def extend_layer(cls: Any) -> None:
        own = {name: "merge_exactly" for name in ("merge", "unmerge") if name in vars(cls)}
        wrap(cls, _ADAPTERS, _may_be_frozen, own)
        for derived in cls.__subclasses__():
            extend_layer(derived)

    def __init_subclass__(cls: type, **kwargs: Any) -> None:
        super(base, cls).__init_subclass__(**kwargs)
        extend_layer(cls)

    for cls in base.__subclasses__():
        extend_layer(cls)
    base.__init_subclass__ = classmethod(__init_subclass__)
