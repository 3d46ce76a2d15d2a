"""FP8 mixed-precision training for PyTorch: the engine. Importing it runs nothing."""

from torch_fp8.config import FP8Config
from torch_fp8.convert import (
    convert_to_float8,
    load_scaling_state_dict,
    revert,
    scaling_state_dict,
)
from torch_fp8.linear import Float8Linear
from torch_fp8.memory import MemoryReport, memory_report
from torch_fp8.report import ConversionReport

__all__ = [
    "ConversionReport",
    "FP8Config",
    "Float8Linear",
    "MemoryReport",
    "convert_to_float8",
    "load_scaling_state_dict",
    "memory_report",
    "revert",
    "scaling_state_dict",
]
