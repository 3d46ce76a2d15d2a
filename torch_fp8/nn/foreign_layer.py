"""Detection, by name, of layers that another library has quantized or replaced; they stay as is.

bitsandbytes' layers (QLoRA) are subclasses of ``nn.Linear`` with packed weights. AWQ, GPTQ and
others have their own modules, as do MXFP4's experts. torchao changes the class of the weight, and
compressed-tensors removes the weight. This module imports none of these libraries.
"""

from typing import Any

from torch import nn

QUANTIZED = "quantized by "
"""Prefix of the reason why such a layer is not converted; the library's name follows."""

_LIBRARIES = {
    "bitsandbytes": "bitsandbytes",
    "awq": "AWQ",
    "gptqmodel": "GPTQ",
    "auto_gptq": "GPTQ",
    "auto_round": "AutoRound",
    "hqq": "HQQ",
    "aqlm": "AQLM",
    "eetq": "EETQ",
    "vptq": "VPTQ",
    "optimum.quanto": "Quanto",
    "compressed_tensors": "compressed-tensors",
    "modelopt": "ModelOpt",
    "quark": "Quark",
    "transformers.integrations.mxfp4": "MXFP4",
    "transformers.integrations.bitnet": "BitNet",
    "transformers.integrations.fbgemm_fp8": "FBGEMM",
    "transformers.integrations.finegrained_fp8": "transformers' fine-grained FP8",
    "transformers.integrations.higgs": "HIGGS",
}
"""Packages that define quantized layers, with the names that users know."""


def quantized_by(module: nn.Module) -> str | None:
    """Return the library that has quantized the weight of a layer; None: no library has.

    Args:
        module: any module; only its own parameters and buffers count.
    """
    tensors = dict(module.named_parameters(recurse=False))
    tensors.update(module.named_buffers(recurse=False))
    if not tensors:
        return None
    if "quantization_scheme" in vars(module) and "weight_packed" in tensors:
        return "compressed-tensors"
    if any(type(t).__module__.startswith("torchao.") for t in tensors.values()):
        return "torchao"
    cls = type(module)
    home = f"{cls.__module__}."
    name = next((n for package, n in _LIBRARIES.items() if home.startswith(f"{package}.")), None)
    if name == "GPTQ" and "awq" in cls.__name__.lower():
        return "AWQ"  # GPTQModel has layers for both
    if name == "bitsandbytes":
        return _bitsandbytes(tensors.get("weight"))
    return name


def _bitsandbytes(weight: Any) -> str | None:
    kind = type(weight).__name__
    if kind == "Params4bit":
        return f"bitsandbytes ({str(weight.quant_type).upper()})"
    return "bitsandbytes (INT8)" if kind == "Int8Params" else None


def is_ligers(module: nn.Module) -> bool:
    """Return whether a module's forward is Liger Kernel's, by its class or by a patch."""
    forward = getattr(vars(module).get("forward"), "__func__", type(module).forward)
    return str(getattr(forward, "__module__", "")).startswith("liger_kernel.")
