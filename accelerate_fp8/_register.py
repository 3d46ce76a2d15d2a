"""The extension points in Accelerate, transformers, TRL and PEFT; `_fp8_autoload` calls `extend`
with each of their modules on its import.

It may be called twice. If an upstream name has moved, it raises AttributeError before it
changes anything, and the host works as without this package. A wrapper keeps the wrapped function
as ``_fp8_original``. This module imports only the standard library, because Accelerate is half
imported when it runs; `accelerate_fp8.accelerator` and `accelerate_fp8.trainer` contain the
functions that the wrapped methods call.
"""

import sys
from typing import Any

from _fp8_points import POINTS, Wanted, refusal, refuse_when, wrap
from accelerate_fp8._wrappers import asks_for_fp8, launched_with_fp8, may_use_engine

_STANDARD, _ADAPTERS = "accelerate_fp8._wrappers", "accelerate_fp8.adapters"
_TRAINER, _ROLLOUTS = "accelerate_fp8.trainer", "accelerate_fp8.rollouts"
_REFUSING = ("accelerate.accelerator", "transformers.training_args")
"""Modules whose first extension point raises the refusal of a host that is too old."""
_UNCHECKED = (
    "accelerate.utils.imports",
    "transformers.generation.utils",
    "transformers.modeling_utils",
)
"""Modules that are extended in any version, because the flag is accepted or FP8 runs without it."""


def _of_accelerator(host: Any, *_: Any) -> bool:
    return may_use_engine(getattr(host, "accelerator", host), (), {})


def _asks_backend(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    convert_backend = sys.modules["accelerate.commands.config.cluster"]._convert_fp8_backend
    return convert_backend in (*args, *kwargs.values())


def _reference_of(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return may_use_engine(args[0] if args else kwargs["accelerator"], (), {})


def _saves_fp8(model: Any, *_: Any) -> bool:
    own = vars(model)
    return "_fp8_saving" in own or (bool(own.get("_weight_conversions")) and launched_with_fp8())


def _may_be_frozen(*_: Any) -> bool:
    return "torch_fp8.nn.frozen_storage" in sys.modules


def _has_frozen_base(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    fp8 = getattr(layer.get_base_layer(), "fp8", None)
    return getattr(fp8, "frozen", None) is not None


_WRAPPERS: dict[str, tuple[str, Wanted]] = {
    "accelerate.utils.imports": (_STANDARD, lambda *_: True),
    "accelerate.state": (_STANDARD, lambda *_: True),
    "accelerate.accelerator": ("accelerate_fp8.accelerator", may_use_engine),
    "accelerate.commands.config.cluster": (_STANDARD, _asks_backend),
    "transformers.training_args": (_TRAINER, lambda *_: launched_with_fp8()),
    "transformers.trainer": (_TRAINER, _of_accelerator),
    "transformers.generation.utils": (
        "accelerate_fp8.generation",
        lambda *_: "torch_fp8.nn.linear" in sys.modules,
    ),
    "transformers.modeling_utils": (_TRAINER, _saves_fp8),
    "trl.models.utils": (_TRAINER, _reference_of),
    "trl.generation.vllm_generation": ("accelerate_fp8.engine_sync", _of_accelerator),
    "trl.trainer.grpo_trainer": (_ROLLOUTS, _of_accelerator),
    "trl.trainer.rloo_trainer": (_ROLLOUTS, _of_accelerator),
}
"""The module of our functions for each of the hosts', and the function that wants them."""


def extend(module: Any) -> None:
    """Wrap the names that `_fp8_points` has of a host's module, or refuse a host that is too old.

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
        refuse_when(asks_for_fp8, module, next(iter(POINTS[name])), too_old)


def extend_tuners(module: Any) -> None:
    """Extend ``merge`` and ``unmerge`` of PEFT's layers for bases that are stored only in FP8."""
    base: Any = module.BaseTunerLayer
    names = {"BaseTuner._unload_and_optionally_merge": "unload"}
    wrap(module, _ADAPTERS, _may_be_frozen, names)
    if "__init_subclass__" in vars(base):
        return

    def extend_layer(cls: type) -> None:
        own = {name: "merge_exactly" for name in ("merge", "unmerge") if name in vars(cls)}
        wrap(cls, _ADAPTERS, _has_frozen_base, own)

    def __init_subclass__(cls: type, **kwargs: Any) -> None:
        super(base, cls).__init_subclass__(**kwargs)
        extend_layer(cls)

    known = base.__subclasses__()
    while known:
        cls = known.pop()
        extend_layer(cls)
        known += cls.__subclasses__()
    base.__init_subclass__ = classmethod(__init_subclass__)


def extend_adapter_state(module: Any) -> None:
    """Extend PEFT's ``get_peft_model_state_dict`` so that it does not read bases stored in FP8."""
    wrap(module, _ADAPTERS, _may_be_frozen, {"get_peft_model_state_dict": "adapter_state"})
