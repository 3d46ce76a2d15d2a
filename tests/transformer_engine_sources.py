"""The Python of a pinned Transformer Engine, on the CPU, with its C++ extension replaced.

What runs is NVIDIA's: ``te.Linear``, ``te.autocast``, the recipes, and the bookkeeping of delayed
scaling. Replaced are the device's name in an unpacked copy, and the four functions of the extension
that a linear layer calls; they cast and multiply in torch, byte for byte as `torch.Tensor.to` does.
"""

import enum
import importlib
import os
import subprocess
import sys
import types
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VERSION = "2.20.2"
SOURCES = "TRANSFORMER_ENGINE"
"""Environment variable: the wheel or the unpacked folder; without it pip downloads the wheel."""
_ON_THE_CPU = (
    ('"cuda"', '"cpu"'),
    (".is_cuda", ".is_cpu"),
    ("torch.cuda.is_available()", "True"),
    ("torch.is_autocast_enabled()", 'torch.is_autocast_enabled("cpu")'),
    ("torch.version.cuda", '"13.0"'),
    ("torch.cuda.is_current_stream_capturing()", "False"),
    ("torch.Tensor().cuda()", "torch.Tensor()"),
    ("torch.cuda.current_device()", 'torch.device("cpu")'),
)
_NEVER_RUN = "transformer_engine.pytorch.onnx_extensions", "einops"
_ENUMS = {
    "FP8FwdTensors": "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT "
    "GEMM3_INPUT GEMM3_WEIGHT GEMM3_OUTPUT",
    "FP8BwdTensors": "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3",
    "NVTE_Fused_Attn_Backend": "NVTE_No_Backend NVTE_F16_arbitrary_seqlen NVTE_FP8",
}
_CARD = types.SimpleNamespace(major=9, minor=0, multi_processor_count=132)


class DType(enum.IntEnum):
    """Numbers of the extension's types."""

    kByte, kInt32 = 0, 2
    kFloat32, kFloat16, kBFloat16, kFloat8E4M3, kFloat8E5M2 = range(4, 9)
    kFloat4E2M1 = 10


_TORCH = {
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: torch.float8_e4m3fn,
    DType.kFloat8E5M2: torch.float8_e5m2,
}


class _Unused(types.ModuleType):
    """Names that are looked up while the package is imported, and that no linear layer calls."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, _Unused(name))
        return self.__dict__[name]

    def __int__(self) -> int:
        return len(self.__name__)

    def __call__(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"the fake extension has no {self.__name__}")


def quantize(tensor: Tensor, quantizer: Any) -> Any:
    """Cast `tensor` tensorwise under every recipe; delayed scaling's quantizer brings the scale."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor, Float8TensorStorage

    tensor, dtype = tensor.detach(), _TORCH[quantizer.dtype]
    amax, limit = tensor.abs().amax().float(), torch.finfo(dtype).max
    if type(quantizer).__name__ == "Float8Quantizer":
        quantizer.amax.copy_(torch.maximum(quantizer.amax, amax))
        scale = quantizer.scale
    else:
        scale = torch.where(amax > 0, limit / amax, 1.0)
    payload = (tensor.float() * scale).clamp(-limit, limit).to(dtype).view(torch.uint8)
    transposed = payload.flatten(0, -2).t().contiguous()
    parts = {
        "data": payload if quantizer.rowwise_usage else None,
        "data_transpose": transposed if quantizer.columnwise_usage else None,
        "fp8_scale_inv": scale.reciprocal().reshape(1),
        "fp8_dtype": quantizer.dtype,
        "quantizer": quantizer,
    }
    if quantizer.internal:
        return Float8TensorStorage(**parts, fake_dtype=tensor.dtype)
    return Float8Tensor(shape=tensor.shape, dtype=tensor.dtype, **parts)


def bgrad_quantize(grad: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    """Return the bias's gradient, and the cast of `grad`."""
    return grad.flatten(0, -2).sum(0), quantize(grad, quantizer)


def _matrix(x: Any) -> Tensor:
    """The values (rows, columns) in float32, from whichever layout `x` has."""
    if not hasattr(x, "_scale_inv"):
        return x.flatten(0, -2).float()
    data = x._transpose.t() if x._data is None else x._data.flatten(0, -2)
    return data.view(_TORCH[x._fp8_dtype]).float() * x._scale_inv


def generic_gemm(
    a: Any, transpose_a: bool, b: Any, transpose_b: bool, out: Any, quantizer: Any, out_dtype: Any,
    bias: Any, bias_dtype: Any, gelu: bool, gelu_in: Any, grad: bool, *rest: Any, **options: Any,
) -> tuple[Any, Any, None, None]:  # fmt: skip
    """Multiply in cuBLAS's column-major order; in backward `bias` asks for the sum of b's rows."""
    left, right = _matrix(b), _matrix(a)
    product = (left.t() if transpose_b else left) @ (right.t() if transpose_a else right)
    if bias is not None and not grad:
        product = product + bias.float()
    summed = left.sum(0).to(bias.dtype) if grad and bias is not None else None
    return product.to(_TORCH[out_dtype]), summed, None, None


def fused_amax_and_scale_update_after_reduction(
    reduced: Tensor, histories: list[Tensor], scales: list[Tensor], algorithm: str, dtype: Any,
    margin: float,
) -> None:  # fmt: skip
    """``delayed_scaling.cu``: roll each history, empty its first row, and derive the scales."""
    limit, start = torch.finfo(_TORCH[dtype]).max, 0
    for history, scale in zip(histories, scales, strict=True):
        columns = slice(start, start := start + history.shape[1])
        latest = reduced[columns]
        history[0].copy_(latest)
        amax = latest if algorithm == "most_recent" else history.amax(0)
        usable = (amax > 0) & amax.isfinite()
        scale.copy_(torch.where(usable, limit / amax / 2**margin, scale))
        history.copy_(history.roll(-1, 0))
        history[0].zero_()


def unpacked(folder: Path) -> Path:
    """A copy in `folder` of the sources that the environment names or pip downloads."""
    source = os.environ.get(SOURCES)
    if source is None:
        command = ["download", "--no-deps", "-d", str(folder), f"transformer_engine=={VERSION}"]
        subprocess.run([sys.executable, "-m", "pip", *command], check=True)
        (wheel,) = folder.glob("*.whl")
        source = str(wheel)
    with zipfile.ZipFile(source) as wheel:
        wheel.extractall(folder)
    for path in (folder / "transformer_engine" / "pytorch").rglob("*.py"):
        text = path.read_text()
        for cuda, cpu in _ON_THE_CPU:
            text = text.replace(cuda, cpu)
        path.write_text(text)
    return folder


def load(folder: Path, monkeypatch: Any) -> Any:
    """Import ``transformer_engine.pytorch`` from `folder`, an `unpacked` one."""
    extension = _Unused("transformer_engine_torch")
    ours = (quantize, bgrad_quantize, generic_gemm, fused_amax_and_scale_update_after_reduction)
    extension.__dict__.update(DType=DType, **{function.__name__: function for function in ours})
    for name, members in _ENUMS.items():
        setattr(extension, name, enum.IntEnum(name, members, start=0))
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", extension)
    for name in _NEVER_RUN:
        monkeypatch.setitem(sys.modules, name, _Unused(name))
    monkeypatch.setenv("NVTE_PROJECT_BUILDING", "1")  # loads no library of CUDA
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: _CARD)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that there is no extension
        common = importlib.import_module("transformer_engine.common")
    monkeypatch.setattr(common, "load_framework_extension", lambda framework: None)
    return importlib.import_module("transformer_engine.pytorch")
