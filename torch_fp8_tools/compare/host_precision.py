"""The hosts' precision in a trial: BF16 where a program says FP8, and FP8 where it says BF16.

Each ``extend_`` function gets a module of a host after its import, and may be called twice. The
last two record the held-out losses that a program computes by its host's own evaluation.
"""

import inspect
from dataclasses import replace
from typing import Any

from torch_fp8_tools.compare.child import note, recorder, wrap

_OURS = ("FP8Precision", "HostPrecision")


def extend_lightning(module: Any) -> None:
    """Set the precision of each Trainer or Fabric that the program creates."""
    wrap(getattr(module, "Trainer", None) or module.Fabric, "__init__", _init_lightning)


def _init_lightning(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    name = "Trainer" if hasattr(self, "fit") else "Fabric"
    recorder().hosts.add(name)
    plugins = kwargs.get("plugins")
    listed = list(plugins) if isinstance(plugins, (list, tuple)) else [plugins]
    ours = [p for p in listed if _has_base(p, *_OURS)]
    theirs = [p for p in listed if _has_base(p, "Precision") and p not in ours]
    said = "FP8Precision" if ours else kwargs.get("precision")
    if theirs:
        said = getattr(theirs[0], "precision", type(theirs[0]).__name__)
    wanted = _lightning_precision(str(said))
    keep = ours and wanted == "fp8-mixed"
    if str(said) != wanted and not keep:
        note(f"{name}(precision={said!r}) runs as precision={wanted!r}")
    rest = [p for p in listed if p is not None and p not in theirs and (keep or p not in ours)]
    if plugins is not None:
        kwargs["plugins"] = rest or None
    kwargs["precision"] = None if keep else wanted
    original(self, *args, **kwargs)


def _lightning_precision(said: str) -> str:
    """Return the precision that replaces the program's; in a BF16 trial, any BF16 stays."""
    if not recorder().trial.is_bf16:
        return "fp8-mixed"
    return said if said.startswith("bf16") else "bf16-mixed"


def _has_base(plugin: Any, *names: str) -> bool:
    return any(base.__name__ in names for base in type(plugin).__mro__)


def extend_accelerator(module: Any) -> None:
    """Set the precision of each Accelerator."""
    wrap(module.Accelerator, "__init__", _init_accelerator)


def _init_accelerator(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    recorder().hosts.add("Accelerator")
    bound = inspect.signature(original).bind(self, *args, **kwargs)
    said, is_bf16 = bound.arguments.get("mixed_precision"), recorder().trial.is_bf16
    wanted = "bf16" if is_bf16 else "fp8"
    if said is not None and str(said) != wanted:
        note(f"Accelerator(mixed_precision={str(said)!r}) runs as {wanted!r}")
    bound.arguments["mixed_precision"] = wanted
    handlers = bound.arguments.get("kwargs_handlers")
    if handlers and is_bf16:
        bound.arguments["kwargs_handlers"] = [
            h for h in handlers if not type(h).__name__.endswith(("FP8Kwargs", "RecipeKwargs"))
        ]
    original(*bound.args, **bound.kwargs)


def extend_arguments(module: Any) -> None:
    """Set the precision of transformers' and TRL's training arguments."""
    wrap(module.TrainingArguments, "__post_init__", _arguments)


def _arguments(original: Any, self: Any) -> None:
    recorder().hosts.add("transformers.Trainer")
    if getattr(self, "fp16", False):
        note("TrainingArguments(fp16=True) runs as " + _name())
        self.fp16 = False
    original(self)  # BF16 and FP8 come from the launcher's variable, which `child` sets


def _name() -> str:
    return "BF16" if recorder().trial.is_bf16 else "FP8"


def extend_config(module: Any) -> None:
    """Apply the variant's options to each FP8Config that the program passes."""
    wrap(module, "config_or_default", lambda original, given: merged(module, original(given)))
    wrap(module, "given_config", lambda original, *args: _merged_if(module, original(*args)))


def _merged_if(module: Any, config: Any) -> Any:
    return None if config is None else merged(module, config)


def merged(module: Any, config: Any) -> Any:
    """Return a configuration with the options of the variant; in BF16 one that changes nothing."""
    options = recorder().trial.options
    if options is None:
        return module.FP8Config(opt_level="O1")
    if all(getattr(config, name) == value for name, value in options.items()):
        return config
    changes: dict[str, Any] = {"overrides": config.overrides}
    if options.get("opt_level", config.opt_level) != "O3" and "gradient_release" not in options:
        changes["gradient_release"] = False
    return replace(config.overridden({**options}), **changes)


def extend_conversion(module: Any) -> None:
    """Record what is converted; in BF16, convert nothing."""
    wrap(module, "convert_to_float8", _convert)


def _convert(original: Any, model: Any, config: Any = None, **options: Any) -> Any:
    recorder().hosts.add("torch_fp8.convert_to_float8")
    if not recorder().trial.is_bf16:
        report = original(model, config, **options)
        recorder().reports[id(model)] = report
        return report
    note("torch_fp8.convert_to_float8 converts nothing")
    return _unconverted(model, config)


def _unconverted(model: Any, config: Any) -> Any:
    """Return the report of a conversion that left every layer in BF16."""
    import torch

    from torch_fp8.config import config_or_default
    from torch_fp8.conversion.report import ConversionReport, SkippedModule, matmul_flops
    from torch_fp8.quantization.recipe import make_recipe

    linear = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    parameter = next(model.parameters(), None)
    return ConversionReport(
        converted=(),
        skipped=tuple(SkippedModule(name, "a BF16 trial") for name in linear),
        recipe=make_recipe("tensorwise"),
        config=config_or_default(config),
        device=parameter.device if parameter is not None else torch.device("cpu"),
        emulated=False,
        unused_skip=(),
        flops=matmul_flops(model),
    )


def extend_evaluation_loop(module: Any) -> None:
    """Record what Lightning's evaluation loop returns: a dictionary for each loader."""
    wrap(module._EvaluationLoop, "run", _run)


def _run(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    results = original(self, *args, **kwargs)
    if not self.trainer.sanity_checking:
        for values in results or ():
            recorder().evaluation(values)
    return results


def extend_evaluate(module: Any) -> None:
    """Record what transformers' ``Trainer.evaluate`` returns."""
    wrap(module.Trainer, "evaluate", _evaluate)


def _evaluate(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    values = original(self, *args, **kwargs)
    recorder().evaluation(values)
    return values
