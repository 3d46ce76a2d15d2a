"""The names of the hosts that `lightning_fp8` and `accelerate_fp8` extend, and the tested releases.

Both packages read here what they wrap, and ``torch-fp8 env`` what must be present. This module
imports only the standard library, because the hosts are half imported when it is read.
"""

import functools
import re
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

Wanted = Callable[[Any, tuple[Any, ...], dict[str, Any]], bool]
"""A function of the first argument of a call, the other ones, and the keyword arguments."""
TRIED = {
    "lightning": ("2.4", "2.6"),
    "accelerate": ("1.10", "1.15"),
    "transformers": ("4.57", "5.24"),
    "trl": ("0.24", "1.16"),
    "peft": ("0.18", "0.21"),
}
"""The lowest and highest tested minor version of each host; docs/versions.md lists the tests."""
DISTRIBUTIONS = {
    "pytorch_lightning": ("pytorch-lightning",),
    "lightning_fabric": ("lightning-fabric", "pytorch-lightning"),
    **{host: (host,) for host in TRIED},
}
"""The distributions that contain each top-level module."""


def _methods(cls: str, names: str) -> tuple[str, ...]:
    return tuple(f"{cls}.{name}" for name in names.split())


_CONNECTOR = "trainer.connectors.accelerator_connector"
_CHOICE = "__init__ _check_and_init_precision"
_ROLLOUTS = (
    "_generate_single_turn _generate_and_score_completions _get_per_token_logps_and_entropies "
    "compute_loss log"
)

POINTS: dict[str, tuple[str, ...]] = {
    "lightning.fabric.connector": _methods("_Connector", _CHOICE),
    f"lightning.pytorch.{_CONNECTOR}": _methods("_AcceleratorConnector", _CHOICE),
    "lightning_fabric.connector": _methods("_Connector", _CHOICE),
    f"pytorch_lightning.{_CONNECTOR}": _methods("_AcceleratorConnector", _CHOICE),
    "accelerate.utils.imports": ("is_fp8_available",),
    "accelerate.state": ("check_cuda_fp8_capability", "AcceleratorState.__init__"),
    "accelerate.accelerator": _methods(
        "Accelerator",
        "__init__ prepare prepare_model prepare_optimizer _prepare_fsdp2 unwrap_model "
        "get_state_dict backward clip_grad_norm_ fp8_backend",
    ),
    "accelerate.commands.config.cluster": ("_ask_options",),
    "transformers.training_args": ("TrainingArguments.__post_init__",),
    "transformers.generation.utils": ("GenerationMixin.generate",),
    "transformers.modeling_utils": ("PreTrainedModel.save_pretrained",),
    "transformers.trainer": _methods(
        "Trainer",
        "create_accelerator_and_postprocess _save_optimizer_and_scheduler "
        "_load_optimizer_and_scheduler _wrap_model _save",
    ),
    "trl.models.utils": ("prepare_fsdp",),
    "trl.trainer.utils": ("selective_log_softmax",),
    "trl.generation.vllm_generation": ("VLLMGeneration.sync_weights",),
    "trl.trainer.grpo_trainer": _methods("GRPOTrainer", _ROLLOUTS),
    "trl.trainer.rloo_trainer": _methods("RLOOTrainer", _ROLLOUTS),
    "peft.tuners.tuners_utils": ("BaseTuner._unload_and_optionally_merge",),
    "peft.utils.save_and_load": ("get_peft_model_state_dict",),
}
"""The dotted names in each module that our functions replace, which receive the original. Ours
have the same names, without underscores at their ends.
"""


def refusal(package: str) -> str | None:
    """Return one line on a host that is too old, or None if it is supported or unknown.

    Newer releases than the tested ones are not refused, because they may well work.
    """
    host, without = package, "--mixed_precision bf16"
    if "lightning" in package:
        host, without = "lightning", "precision='bf16-mixed'"
    for name in DISTRIBUTIONS.get(package, ()):
        lowest, highest = TRIED[host]
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue
        if _minor(installed) >= _minor(lowest):
            return None
        return (
            f"torch-fp8 supports {name} {lowest} to {highest}, found {installed}: "
            f"pip install '{name}>={lowest}', or train without FP8 ({without})"
        )
    return None


def _minor(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


def wrap(
    holder: Any,
    package: str,
    wanted: Wanted,
    names: Mapping[str, str | Callable[..., Any]] | None = None,
) -> None:
    """Wrap methods, properties and functions with ``package.function(original, self, ...)``.

    If one of the names is missing, none is wrapped. Copies of a function that the holder defines,
    in modules of the host that were imported before, are replaced, too.

    Args:
        holder: the module or class of the host.
        package: the module of the functions, imported when it is first needed.
        wanted: a function called with the first argument, args and kwargs of each call; if it
            returns False, the original runs directly.
        names: dotted names in the holder, with the functions that wrap them, or their names in
            `package`; or None for those of the module in `POINTS`.
    """
    originals = []
    for dotted in POINTS[holder.__name__] if names is None else names:
        *path, name = dotted.split(".")
        owner = functools.reduce(getattr, path, holder)
        function = name.strip("_") if names is None else names[dotted]
        originals.append((owner, name, function, getattr(owner, name)))

    def extended(original: Any, function: Any) -> Any:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not wanted(args[0] if args else None, args[1:], kwargs):
                return original(*args, **kwargs)
            ours = function if callable(function) else getattr(import_module(package), function)
            return ours(original, *args, **kwargs)

        wrapper._fp8_original = original  # type: ignore[attr-defined]
        return wrapper

    for owner, name, function, original in originals:
        method = original.fget if isinstance(original, property) else original
        if hasattr(method, "_fp8_original"):
            continue
        ours = extended(method, function)
        setattr(owner, name, ours if method is original else property(ours))
        is_home = isinstance(owner, ModuleType) and method.__module__ == owner.__name__
        host = f"{owner.__name__.partition('.')[0]}." if is_home else ()
        for module_name, module in list(sys.modules.items()):
            if module_name.startswith(host) and vars(module).get(name) is original:
                vars(module)[name] = ours


def refuse_when(wanted: Wanted, module: Any, line: str) -> None:
    """Make the first extension point of a host that is too old raise ImportError(`line`)."""

    def refuse(*_: Any, **__: Any) -> None:
        raise ImportError(line)

    wrap(module, "", wanted, {POINTS[module.__name__][0]: refuse})
