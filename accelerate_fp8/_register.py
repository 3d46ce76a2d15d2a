"""The extension points in Accelerate, transformers, TRL and PEFT; `_fp8_autoload` calls these
functions on an import.

Each function may be called twice. If an upstream name has moved, it raises AttributeError before it
changes anything, and the host works as without this package. A wrapper keeps the wrapped function
as ``_fp8_original``. This module imports only the standard library, because Accelerate is half
imported when it runs; `accelerate_fp8.accelerator` and `accelerate_fp8.trainer` contain the
functions that the wrapped methods call.
"""

import functools
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from _fp8_points import wrapped
from accelerate_fp8._wrappers import (
    ENGINE,
    asks_for_fp8,
    launched_with_fp8,
    may_use_engine,
    refuse_when_asked,
    too_old,
    wrap,
)

# Modules that copy names of others; the copies are replaced if they were imported before us.
_COPIES = (
    "accelerate.utils",
    "accelerate.state",
    "accelerate.utils.launch",
    "accelerate.commands.config.cluster",
)


def extend_imports(module: ModuleType) -> None:
    """Extend ``is_fp8_available``: FP8 no longer needs one of Accelerate's optional libraries.

    The launcher and AcceleratorState call it before they accept the flag. If the user chooses a
    library explicitly and it is missing, its recipe handler still refuses it.
    """
    original = module.is_fp8_available
    if hasattr(original, "_fp8_original"):
        return

    @functools.wraps(original)
    def is_fp8_available() -> bool:
        return True

    is_fp8_available._fp8_original = original  # type: ignore[attr-defined]
    for holder in (module, *map(sys.modules.get, _COPIES)):
        if getattr(holder, "is_fp8_available", None) is original:
            holder.is_fp8_available = is_fp8_available  # type: ignore[union-attr]


def extend_state(module: ModuleType) -> None:
    """Extend ``check_cuda_fp8_capability`` for AcceleratorState: no silent FP16 on older cards.

    Also read the environment again, because `notebook_launcher` requests FP8 there long after torch
    was imported.
    """
    if too_old("accelerate"):
        return
    check, state = module.check_cuda_fp8_capability, module.AcceleratorState
    state_init = state.__init__
    if hasattr(check, "_fp8_original"):
        return

    @functools.wraps(check)
    def check_cuda_fp8_capability() -> bool:
        backend = import_module("accelerate_fp8.backend")
        return bool(backend.PRECISION_KEPT.get() or check())

    @functools.wraps(state_init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        import_module("_fp8_autoload").load("accelerate_fp8")
        state_init(self, *args, **kwargs)

    check_cuda_fp8_capability._fp8_original = check  # type: ignore[attr-defined]
    __init__._fp8_original = state_init  # type: ignore[attr-defined]
    module.check_cuda_fp8_capability = check_cuda_fp8_capability  # type: ignore[attr-defined]
    state.__init__ = __init__


def extend_accelerator(module: ModuleType) -> None:
    """Extend Accelerator's choice of FP8 backend and preparation of models and optimizers."""
    cls = module.Accelerator
    refusal = too_old("accelerate")
    if refusal is not None:
        refuse_when_asked(cls, "__init__", refusal, asks_for_fp8)
        return
    backend: property = cls.fp8_backend
    if hasattr(backend.fget, "_fp8_original"):
        return
    wrap(module, "accelerate_fp8.accelerator", may_use_engine)
    original: Any = backend.fget

    @functools.wraps(original)
    def fp8_backend(self: Any) -> Any:
        if getattr(self, "_fp8_preparation", None) is None:
            return original(self)
        return import_module("accelerate_fp8.backend").FP8Engine.TORCH_FP8

    fp8_backend._fp8_original = original  # type: ignore[attr-defined]
    cls.fp8_backend = property(fp8_backend)


def extend_config_questions(module: ModuleType) -> None:
    """Extend the menu of ``accelerate config``: list this engine first among the FP8 backends."""
    ask, convert_backend = module._ask_options, module._convert_fp8_backend
    if too_old("accelerate") or hasattr(ask, "_fp8_original"):
        return

    @functools.wraps(ask)
    def _ask_options(
        question: str, options: Any = (), convert_value: Any = None, default: int = 0
    ) -> Any:
        if convert_value is not convert_backend:
            return ask(question, options, convert_value, default)
        choice = ask(question, [ENGINE.lower(), *options], None, default)
        return convert_backend(choice - 1) if choice else ENGINE

    _ask_options._fp8_original = ask  # type: ignore[attr-defined]
    module._ask_options = _ask_options  # type: ignore[attr-defined]


def extend_training_args(module: ModuleType) -> None:
    """Extend ``TrainingArguments.__post_init__``: ``bf16=True`` must not override FP8."""
    refusal = too_old("transformers")
    if refusal is not None:
        refuse_when_asked(module.TrainingArguments, "__post_init__", refusal, asks_for_fp8)
        return
    wrap(module, "accelerate_fp8.trainer", lambda *_: launched_with_fp8())


def extend_trainer(module: ModuleType) -> None:
    """Extend the Trainer's Accelerator, DataParallel, and checkpoints, saved on their own."""
    if too_old("transformers"):
        return
    wrap(
        module,
        "accelerate_fp8.trainer",
        wanted=lambda trainer, *_: may_use_engine(getattr(trainer, "accelerator", trainer), (), {}),
    )


def extend_generation(module: ModuleType) -> None:
    """Extend ``GenerationMixin.generate`` for models with FP8 layers."""
    wrap(module, "accelerate_fp8.generation", lambda *_: "torch_fp8.nn.linear" in sys.modules)


def extend_modeling(module: ModuleType) -> None:
    """Extend ``PreTrainedModel.save_pretrained`` for split weights and dequantized models."""
    wrap(
        module,
        "accelerate_fp8.trainer",
        wanted=lambda model, *_: (
            "_fp8_saving" in vars(model)
            or (bool(vars(model).get("_weight_conversions")) and launched_with_fp8())
        ),
    )


def extend_tuners(module: ModuleType) -> None:
    """Extend ``merge`` and ``unmerge`` of PEFT's layers for bases that are stored only in FP8."""
    base: Any = module.BaseTunerLayer
    names = {"BaseTuner._unload_and_optionally_merge": "unload"}
    wrap(module, "accelerate_fp8.adapters", _may_be_frozen, names)
    if "__init_subclass__" in vars(base):
        return

    def extend(cls: type) -> None:
        own = {name: name for name in ("merge", "unmerge") if name in vars(cls)}
        wrap(cls, "accelerate_fp8.adapters", _has_frozen_base, own)

    def __init_subclass__(cls: type, **kwargs: Any) -> None:
        super(base, cls).__init_subclass__(**kwargs)
        extend(cls)

    known = base.__subclasses__()
    while known:
        cls = known.pop()
        extend(cls)
        known += cls.__subclasses__()
    base.__init_subclass__ = classmethod(__init_subclass__)


def extend_adapter_state(module: ModuleType) -> None:
    """Extend PEFT's ``get_peft_model_state_dict`` so that it does not read bases stored in FP8."""
    names = {"get_peft_model_state_dict": "adapter_state"}
    wrap(module, "accelerate_fp8.adapters", _may_be_frozen, names)


def _may_be_frozen(*_: Any) -> bool:
    return "torch_fp8.nn.frozen_storage" in sys.modules


def _has_frozen_base(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    fp8 = getattr(layer.get_base_layer(), "fp8", None)
    return getattr(fp8, "frozen", None) is not None


def extend_trl_models(module: ModuleType) -> None:
    """Extend TRL's ``prepare_fsdp``, which shards reference models past Accelerate."""
    if too_old("trl"):
        return
    original: Any = module.prepare_fsdp
    if hasattr(original, "_fp8_original"):
        return
    wrap(
        module,
        "accelerate_fp8.trainer",
        wanted=lambda model, args, kwargs: may_use_engine(
            args[0] if args else kwargs["accelerator"], (), {}
        ),
    )
    for name, holder in list(sys.modules.items()):  # trainers imported before us hold copies
        copied = name.startswith("trl.") and vars(holder).get("prepare_fsdp") is original
        if copied:
            vars(holder)["prepare_fsdp"] = module.prepare_fsdp


def extend_rollouts(module: ModuleType) -> None:
    """Extend TRL's trainers with rollouts, and its weight sync to vLLM.

    Rollouts of GRPOTrainer and RLOOTrainer run the FP8 of training and are compared with it.
    VLLMGeneration gets its weights from the engine.
    """
    if too_old("trl"):
        return
    if module.__name__.endswith("vllm_generation"):
        wrap(
            module,
            "accelerate_fp8.engine_sync",
            wanted=lambda vllm, *_: may_use_engine(vllm.accelerator, (), {}),
        )
        return
    cls = getattr(module, "GRPOTrainer", None) or module.RLOOTrainer
    names = {name.rpartition(".")[2]: ours for name, ours in wrapped(module.__name__).items()}
    if not all(hasattr(cls, name) for name in names):
        names = {"log": "say_unmeasured"}
    wrap(
        cls,
        "accelerate_fp8.rollouts",
        lambda trainer, *_: may_use_engine(trainer.accelerator, (), {}),
        names,
    )
