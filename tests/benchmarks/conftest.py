"""The benchmarks' own kernels are compiled as the library's are."""

from tests.torch_fp8.kernels.conftest import compile_for, record_launches

__all__ = ["compile_for", "record_launches"]
