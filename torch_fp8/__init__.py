"""FP8 mixed-precision training for PyTorch: the engine. Importing it runs nothing."""

from torch_fp8._version import __version__
from torch_fp8.autograd.current_pass import high_precision
from torch_fp8.autograd.selective_checkpoint import selective_checkpoint_contexts
from torch_fp8.checkpoint.export import ExportReport, export
from torch_fp8.checkpoint.load_checkpoint import load_frozen, load_trainable
from torch_fp8.checkpoint.weight_sync import weights_for_engine
from torch_fp8.config import FP8Config
from torch_fp8.conversion.convert import conversion_report, convert_to_float8, revert
from torch_fp8.conversion.freeze import freeze, thaw
from torch_fp8.conversion.memory import MemoryReport, memory_report
from torch_fp8.conversion.report import ConversionReport
from torch_fp8.conversion.scaling_state import load_scaling_state_dict, scaling_state_dict
from torch_fp8.distributed.comm_counter import CommunicationCount, count_communication
from torch_fp8.monitor.monitor import Monitor
from torch_fp8.nn.linear import Float8Linear
from torch_fp8.nn.rollout import rollout
from torch_fp8.optim.convert import (
    OptimizerReport,
    convert_optimizer,
    restore_weights,
)
from torch_fp8.optim.merged_state import merged_state_dict, stream_state_dict
from torch_fp8.planner.plan import LevelPlan, Plan, plan

__all__ = [
    "CommunicationCount",
    "ConversionReport",
    "ExportReport",
    "FP8Config",
    "Float8Linear",
    "LevelPlan",
    "MemoryReport",
    "Monitor",
    "OptimizerReport",
    "Plan",
    "__version__",
    "conversion_report",
    "convert_optimizer",
    "convert_to_float8",
    "count_communication",
    "export",
    "freeze",
    "high_precision",
    "load_frozen",
    "load_scaling_state_dict",
    "load_trainable",
    "memory_report",
    "merged_state_dict",
    "plan",
    "restore_weights",
    "revert",
    "rollout",
    "scaling_state_dict",
    "selective_checkpoint_contexts",
    "stream_state_dict",
    "thaw",
    "weights_for_engine",
]
