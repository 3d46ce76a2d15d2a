"""Which modules run in FP8, and for each that does not, the reason in words."""

import re
from collections.abc import Iterator

import torch
from torch import nn

from torch_fp8.formats import GEMM_ALIGNMENT
from torch_fp8.gathered_weight import GatheredWeight
from torch_fp8.linear import Float8Linear
from torch_fp8.module_class import is_fsdp_class, unwrapped_name
from torch_fp8.weight_cache import WatchedParameter

_LORA = re.compile(r"(^|\.)lora_[A-Za-z_]+(\.|$)")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WEIGHTS = (nn.Parameter, torch.Tensor, WatchedParameter)


def matches(pattern: str, name: str) -> bool:
    """Whether `pattern` matches whole components of the qualified `name`, or one above it.

    ``layers.2`` matches ``model.layers.2`` and ``model.layers.2.mlp``, not ``model.layers.20``.
    ``*`` stands for anything within a component, ``**`` across components. What torch.compile and
    torch's checkpoint wrapper put into a name does not count.
    """
    name = unwrapped_name(name)
    parts = re.split(r"(\*\*|\*)", pattern)
    wildcard = {"**": ".*", "*": "[^.]*"}
    body = "".join(wildcard.get(part, re.escape(part)) for part in parts)
    return re.search(rf"(^|\.){body}(\.|$)", name) is not None


def is_linear(module: nn.Module) -> bool:
    """An ``nn.Linear`` of any class, or a matrix product under another name (GPT-2's Conv1D)."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def high_precision_modules(model: nn.Module, skip: tuple[str, ...]) -> dict[nn.Module, str]:
    """Output layers that are not called ``lm_head`` but are one, if ``lm_head`` is skipped.

    Found by what Hugging Face models say of themselves (``get_output_embeddings``), and by a weight
    shared with an embedding.
    """
    if "lm_head" not in skip:
        return {}
    found: dict[nn.Module, str] = {}
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for module in model.modules():
        if isinstance(module, nn.Linear) and id(module.weight) in embeddings:
            found[module] = "output layer (weight tied to an embedding), as lm_head"
        if callable(ask := getattr(module, "get_output_embeddings", None)):
            try:
                head = ask()
            except (AttributeError, NotImplementedError):  # transformers: the model has no head
                head = None
            if isinstance(head, nn.Linear):
                found.setdefault(head, "output layer (get_output_embeddings), as lm_head")
    return found


def skip_reason(
    name: str, module: nn.Module, skip: tuple[str, ...], kept_high: dict[nn.Module, str]
) -> str | None:
    """Why this linear layer stays in high precision; None: it is converted."""
    for pattern in skip:
        if matches(pattern, name):
            return f"skip={pattern!r}"
    if module in kept_high:
        return kept_high[module]
    if _LORA.search(name):
        return "LoRA adapter"
    if not (isinstance(module, Float8Linear) or _is_plain_linear(type(module))):
        return f"{type(module).__name__} is not nn.Linear itself"
    assert isinstance(module, nn.Linear)
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance (a device-map or offload hook)"
    return _weight_reason(module)


def expert_weights(name: str, module: nn.Module) -> Iterator[tuple[str, str]]:
    """The fused expert weights, 3-D parameters, that `module` itself holds, with the reason."""
    for parameter_name, parameter in module.named_parameters(recurse=False):
        if parameter.ndim == 3 and min(parameter.shape[1:]) >= GEMM_ALIGNMENT:
            full_name = f"{name}.{parameter_name}" if name else parameter_name
            yield full_name, "fused expert weights need a grouped GEMM"


def _is_plain_linear(cls: type) -> bool:
    """nn.Linear, or the class ``(FSDPModule, nn.Linear)`` that ``fully_shard`` makes of it."""
    return cls is nn.Linear or (is_fsdp_class(cls) and cls.__bases__[1] is nn.Linear)


def _weight_reason(module: nn.Linear) -> str | None:
    weight = module.weight
    if weight.dtype not in _DTYPES:
        return f"weight is {weight.dtype}"
    sharded = hasattr(weight, "_local_tensor") or isinstance(weight, GatheredWeight)
    if not (sharded or type(weight) in _WEIGHTS):
        return f"weight is a {type(weight).__name__}"
    for dim in ("in_features", "out_features"):
        if getattr(module, dim) < GEMM_ALIGNMENT:
            return f"{dim}={getattr(module, dim)} is below {GEMM_ALIGNMENT}"
    return None
