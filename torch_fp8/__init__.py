"""FP8 mixed-precision training for PyTorch: the engine.

Importing the package has no side effects. A public name is imported when it is first used, because
the engine needs DTensor and Dynamo, whose import takes longer than that of torch.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torch_fp8._version import __version__ as __version__

if TYPE_CHECKING:  # `as` shows type checkers that a name is public
    from torch_fp8.autograd.current_pass import high_precision as high_precision
    from torch_fp8.autograd.selective_checkpoint import (
        selective_checkpoint_contexts as selective_checkpoint_contexts,
    )
    from torch_fp8.checkpoint.export import ExportReport as ExportReport
    from torch_fp8.checkpoint.export import export as export
    from torch_fp8.checkpoint.export import weights_for_engine as weights_for_engine
    from torch_fp8.checkpoint.load import load_frozen as load_frozen
    from torch_fp8.checkpoint.load import load_trainable as load_trainable
    from torch_fp8.config import FP8Config as FP8Config
    from torch_fp8.conversion.convert import conversion_report as conversion_report
    from torch_fp8.conversion.convert import convert_to_float8 as convert_to_float8
    from torch_fp8.conversion.forward_precision import (
        set_forward_precision as set_forward_precision,
    )
    from torch_fp8.conversion.freeze import freeze as freeze
    from torch_fp8.conversion.freeze import thaw as thaw
    from torch_fp8.conversion.memory import MemoryReport as MemoryReport
    from torch_fp8.conversion.memory import memory_report as memory_report
    from torch_fp8.conversion.report import ConversionReport as ConversionReport
    from torch_fp8.conversion.revert import load_scaling_state_dict as load_scaling_state_dict
    from torch_fp8.conversion.revert import revert as revert
    from torch_fp8.conversion.revert import scaling_state_dict as scaling_state_dict
    from torch_fp8.monitor.monitor import Monitor as Monitor
    from torch_fp8.nn.linear import Float8Linear as Float8Linear
    from torch_fp8.nn.loss_head import linear_cross_entropy as linear_cross_entropy
    from torch_fp8.nn.loss_head import linear_log_probs as linear_log_probs
    from torch_fp8.nn.rollout import rollout as rollout
    from torch_fp8.optim.convert import OptimizerReport as OptimizerReport
    from torch_fp8.optim.convert import convert_optimizer as convert_optimizer
    from torch_fp8.optim.convert import restore_weights as restore_weights
    from torch_fp8.optim.merged_state import merged_state_dict as merged_state_dict
    from torch_fp8.optim.merged_state import stream_state_dict as stream_state_dict
    from torch_fp8_tools.plan.plan import LevelPlan as LevelPlan
    from torch_fp8_tools.plan.plan import Plan as Plan
    from torch_fp8_tools.plan.plan import plan as plan

_NAMES = {  # module: public names that it defines; type checkers read the imports above
    "autograd.current_pass": ("high_precision",),
    "autograd.selective_checkpoint": ("selective_checkpoint_contexts",),
    "checkpoint.export": ("ExportReport", "export", "weights_for_engine"),
    "checkpoint.load": ("load_frozen", "load_trainable"),
    "config": ("FP8Config",),
    "conversion.convert": ("conversion_report", "convert_to_float8"),
    "conversion.forward_precision": ("set_forward_precision",),
    "conversion.freeze": ("freeze", "thaw"),
    "conversion.memory": ("MemoryReport", "memory_report"),
    "conversion.report": ("ConversionReport",),
    "conversion.revert": ("load_scaling_state_dict", "revert", "scaling_state_dict"),
    "monitor.monitor": ("Monitor",),
    "nn.linear": ("Float8Linear",),
    "nn.loss_head": ("linear_cross_entropy", "linear_log_probs"),
    "nn.rollout": ("rollout",),
    "optim.convert": ("OptimizerReport", "convert_optimizer", "restore_weights"),
    "optim.merged_state": ("merged_state_dict", "stream_state_dict"),
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}
# The engine imports nothing else of its tools.
_HOMES |= dict.fromkeys(("LevelPlan", "Plan", "plan"), "torch_fp8_tools.plan.plan")
_ROUTING = ("RoutingRecord", "RoutingReplay", "record_routing", "routing_replay")
_REMOVED = dict.fromkeys(
    _ROUTING,
    "no measurement showed that a routing replay helps; routers run in high precision in rollouts "
    "and in training, without any call",
) | dict.fromkeys(
    ("CommunicationCount", "count_communication"),
    "use torch.profiler, or tests/comm_counter.py of the repository",
)
"""Names that were public, and what to use instead of each."""

__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> Any:
    """Import a public name, or a subpackage such as ``torch_fp8.distributed``, on first use."""
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    if name in _REMOVED:  # `from torch_fp8 import name` would hide the text of an AttributeError
        raise ImportError(f"torch_fp8.{name} was removed: {_REMOVED[name]}", name=name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
