"""Filter of the modules that run in FP8, with a reason in words for each other module.

Layers that another library has quantized or replaced are detected by name and stay as they are.
bitsandbytes' layers (QLoRA) are subclasses of ``nn.Linear`` with packed weights. AWQ, GPTQ and
others have their own modules, as do MXFP4's experts. torchao changes the class of the weight, and
compressed-tensors removes the weight. This module imports none of these libraries.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from torch_fp8.nn.class_swap import stock_class, unwrapped_name
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.nn.linear_form import computes_linear
from torch_fp8.quantization.formats import CAST_DTYPES, GEMM_ALIGNMENT
from torch_fp8.tensor.base import QuantizableTensor
from torch_fp8.tensor.split_weight import SplitWeight

# A ``lora_A`` of any library, or the ``default`` below one. Not everything below such a name:
# X-LoRA names the whole model ``lora_model``.
_LORA = re.compile(r"(^|\.)lora_\w+(\.[^.]+)?$")
_PEFT_CLASSES = {"BaseTunerLayer", "BaseTuner", "PeftModel", "PeftMixedModel"}
_WRAPPED = ("base_layer", "model", "base_model", "lora_model", "word_embeddings")
"""Children of modules of these classes that are the user's model; all other children are adapters,
which is PEFT's own rule."""
ADAPTER = "adapter"
"""Reason for adapters, which stay in high precision: they are small, and the user trains them."""
_WEIGHTS = (nn.Parameter, torch.Tensor, SplitWeight)
_TOP_K = ("top_k", "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
ROUTER_NAMES = ("router", "gate", "classifier")
"""Names of router modules, siblings of the experts."""


def matches(pattern: str, name: str) -> bool:
    """Return whether `pattern` matches whole components of the qualified `name` or of a parent.

    ``layers.2`` matches ``model.layers.2`` and ``model.layers.2.mlp``, not ``model.layers.20``.
    ``*`` matches anything within a component, ``**`` across components. Components added by
    torch.compile and torch's checkpoint wrapper are ignored.
    """
    name = unwrapped_name(name)
    # All positions where a match of the parts so far can end; each part advances the whole set.
    reached = {i for i in range(len(name) + 1) if i == 0 or name[i - 1] == "."}
    for part in re.split(r"(\*\*|\*)", pattern):
        if part in ("*", "**"):
            reached = _stretched(reached, name, across=part == "**")
        else:
            reached = {i + len(part) for i in reached if name.startswith(part, i)}
    return any(i == len(name) or name[i] == "." for i in reached)


def _stretched(reached: set[int], name: str, across: bool) -> set[int]:
    """Return `reached` and all later positions in the same component, or `across` components."""
    stretched, within = set(), False
    for i in range(len(name) + 1):
        within = i in reached or (within and (across or name[i - 1] != "."))
        if within:
            stretched.add(i)
    return stretched


def adapter_modules(model: nn.Module) -> set[nn.Module]:
    """Return all modules of adapters: those named as LoRA's, and all that PEFT adds to a model."""
    adapters: set[nn.Module] = set()
    for name, module in model.named_modules():
        if _LORA.search(unwrapped_name(name)):
            adapters.add(module)
        if is_peft(module):
            for child_name, child in module.named_children():
                adapters.update(() if child_name in _WRAPPED else child.modules())
    return adapters


def is_peft(module: nn.Module) -> bool:
    """Return whether PEFT defines a module's class, or one that it derives from."""
    return not _PEFT_CLASSES.isdisjoint([cls.__name__ for cls in type(module).__mro__])


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is an ``nn.Linear`` of any class, or GPT-2's Conv1D."""
    return isinstance(module, nn.Linear) or _is_conv1d(module)


def features(module: nn.Module) -> tuple[int, int]:
    """Return K and N of a linear module, whatever the layout of its weight."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    return tuple(module.weight.shape)


def high_precision_modules(model: nn.Module, skip: tuple[str, ...]) -> dict[nn.Module, str]:
    """Return output layers under other names, with the reason, if `skip` contains ``lm_head``.

    Output layers are those that a Hugging Face model returns from ``get_output_embeddings``, and
    layers that share their weight with an embedding.
    """
    if "lm_head" not in skip:
        return {}
    heads = [m for m in map(output_layer, model.modules()) if isinstance(m, nn.Linear)]
    reasons = dict.fromkeys(heads, "output layer (get_output_embeddings), as lm_head")
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for module in model.modules():
        if isinstance(module, nn.Linear) and id(module._parameters.get("weight")) in embeddings:
            reasons[module] = "output layer (weight tied to an embedding), as lm_head"
    return reasons


def output_layer(module: nn.Module) -> nn.Module | None:
    """Return the result of a model's ``get_output_embeddings``, or None without an output layer."""
    ask = getattr(module, "get_output_embeddings", None)
    try:
        return ask() if callable(ask) else None
    except (AttributeError, NotImplementedError):  # the model has no head
        return None


def skip_reason(
    name: str, module: nn.Module, skip: tuple[str, ...], kept_high: dict[nn.Module, str]
) -> str | None:
    """Return why a linear layer stays in high precision, or None if it is converted."""
    library = quantized_by(module)
    if library is not None:
        return f"{QUANTIZED}{library}"
    for pattern in skip:
        if matches(pattern, name):
            return f"skip={pattern!r}"
    if module in kept_high:
        return kept_high[module]
    reason = None if isinstance(module, Float8Layer) else _class_reason(module)
    if reason is not None:
        return reason
    if "forward" in module.__dict__:
        if isinstance(module._parameters.get("weight"), DTensor):
            return (
                "its forward was replaced on the instance, for tensor parallelism of another "
                "library (transformers' tp_plan); use the FP8 parallel styles in "
                "torch_fp8.distributed"
            )
        return "its forward was replaced on the instance (a device-map or offload hook)"
    return weight_reason(module.weight) or _size_reason(module)


def expert_weights(name: str, module: nn.Module) -> list[str]:
    """Return the qualified names of the fused expert weights of `module` itself.

    They are its `stacked_weights` if its class or an attribute has ``expert`` in its name, as in
    all of transformers.
    """
    names = " ".join((type(module).__name__, *vars(module), *module._parameters))
    return list(stacked_weights(name, module)) if "expert" in names.lower() else []


def stacked_weights(name: str, module: nn.Module) -> Iterator[str]:
    """Yield the qualified names of the 3-D parameters of `module` itself, stacks of matrices.

    Modules of torch, such as convolutions, and a single matrix, such as position embeddings, do not
    count.
    """
    if type(module).__module__.startswith("torch.nn."):
        return
    for parameter_name, parameter in module.named_parameters(recurse=False):
        if parameter.ndim != 3 or parameter.shape[0] == 1:
            continue
        if min(parameter.shape[1:]) >= GEMM_ALIGNMENT:
            yield f"{name}.{parameter_name}" if name else parameter_name


def experts_per_token(*owners: Any) -> int | None:
    """Return the number of experts that compute a token, from the first of `owners` that has it."""
    named = (getattr(owner, name, None) for owner in owners for name in _TOP_K)
    return next((count for count in named if isinstance(count, int)), None)


def _is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is GPT-2's Conv1D, with a weight (K, N) and a bias (N,)."""
    if stock_class(type(module)).__name__ != "Conv1D":
        return False
    weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
    if weight is None or bias is None:
        return False
    return weight.ndim == 2 and bias.shape == weight.shape[1:] == (getattr(module, "nf", None),)


def _class_reason(module: nn.Module) -> str | None:
    """Return why a layer's class cannot be converted (another formula, say), or None if it can."""
    cls: Any = stock_class(type(module))
    if cls is nn.Linear:
        return None
    if cls is NonDynamicallyQuantizableLinear:
        return "nn.MultiheadAttention reads its weight without calling it"
    if is_parametrized(module):
        return "its weight is parametrized"
    if computes_linear(module, transposed=_is_conv1d(module)):
        return None
    return f"{cls.__name__} does not compute what nn.Linear does"


def weight_reason(weight: Any) -> str | None:
    """Return why a weight cannot be cast to FP8, apart from its size, or None if it can."""
    if is_lazy(weight):
        return "its size is not known yet: run a batch through the model before you convert it"
    if weight.dtype not in CAST_DTYPES:
        return f"weight is {weight.dtype}"
    sharded = hasattr(weight, "_local_tensor") or isinstance(weight, QuantizableTensor)
    if not (sharded or type(weight) in _WEIGHTS):
        return f"weight is a {type(weight).__name__}"
    return None


def _size_reason(module: nn.Module) -> str | None:
    for dim, size in zip(("in_features", "out_features"), features(module), strict=True):
        if size < GEMM_ALIGNMENT:
            return f"{dim}={size} is below {GEMM_ALIGNMENT}"
    return None


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
    """Return the library that has quantized the weight of a layer, or None if no library has.

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
        weight = tensors.get("weight")
        names = {"Params4bit": getattr(weight, "quant_type", None), "Int8Params": "int8"}
        quant_type = names.get(type(weight).__name__)
        return quant_type and f"bitsandbytes ({str(quant_type).upper()})"
    return name


def is_ligers(module: nn.Module) -> bool:
    """Return whether a module's forward is Liger Kernel's, by its class or by a patch."""
    return comes_from_liger(getattr(vars(module).get("forward"), "__func__", type(module).forward))


def comes_from_liger(forward: Any) -> bool:
    """Return whether a function is Liger Kernel's."""
    return str(getattr(forward, "__module__", "")).startswith("liger_kernel.")
