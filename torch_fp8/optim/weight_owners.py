"""The choice of weights that can be split: those that only their own forward reads.

Under autocast a float32 weight is cast only where a matrix product reads it. A parametrization,
``autocast(enabled=False)``, a merge of adapters or a fused operator sees float32 weights. A split
weight (`torch_fp8.quantization.split_float`) is BF16 for all of them, so only weights that are
known to be read by nothing but their own forward are split:

* weights of FP8 layers and FP8 experts, which accept any dtype;
* embeddings, whose output stays float32 (`torch_fp8.optim.embedding_dtype`);
* output layers, and other layers with the forward of ``nn.Linear`` that stay in high precision on
  their own account, for example because they are too small or not faster in FP8. Outside autocast
  they multiply in float32.

A weight that shares memory with another parameter, buffer or process is not split, because each of
them would get its own halves.

All other weights keep their dtype and still get 8-bit moments: PEFT adapters, which are merged
outside autocast; parametrized tensors; parameters of any other module (convolutions, experts in
high precision, embedding bags, which sum in float32, recurrent layers, the user's modules); and
layers named by ``FP8Config(skip=...)`` other than output layers. Use `skip` if your own code reads
the weight of a layer that would be split.
"""

import re

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from torch_fp8.config import FP8Config
from torch_fp8.nn.class_swap import user_class
from torch_fp8.nn.experts import Float8Experts
from torch_fp8.nn.layer_filter import adapter_modules, high_precision_modules, matches
from torch_fp8.nn.linear import Float8Layer

NO_MODEL = "not in a known module; call convert_optimizer(optimizer, config, model=model)"
_TRAINED_WITH_ADAPTERS = re.compile(r"(^|\.)modules_to_save(\.|$)")
_HEAD = "lm_head"


def reasons_to_stay(model: nn.Module, config: FP8Config) -> dict[Tensor, str | None]:
    """Explain for each parameter of a model why it cannot be split, or None if it can.

    Args:
        model: the model, after its conversion if it is converted at all.
        config: the configuration whose `skip` applies.
    """
    heads = high_precision_modules(model, config.skip)
    adapters = adapter_modules(model)
    adapters |= {m for name, m in model.named_modules() if _TRAINED_WITH_ADAPTERS.search(name)}
    parents: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        parents |= dict.fromkeys(module.children(), module)
    reasons: dict[Tensor, str | None] = {}
    for tensor in _overlapping([*model.parameters(), *model.buffers()]):
        reasons[tensor] = "sharing memory with another parameter or buffer"
    for tensor in model.parameters():
        if type(tensor) is nn.Parameter and tensor.device.type == "cpu" and tensor.is_shared():
            reasons[tensor] = "sharing memory with other processes"
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            reason = None
            if module not in heads:
                of_adapters = "of adapters" if module in adapters else None
                reason = of_adapters or _reason(name, module, parents.get(module), config)
            own = module.fp8_weights if isinstance(module, Float8Experts) else ()
            if reason is None and key != "weight" and not any(w is parameter for w in own):
                reason = f"of {type(module).__name__}, besides its weight"
            if reasons.get(parameter) is None:  # one owner with a reason is enough
                reasons[parameter] = reason
    return reasons


def has_linear_forward(module: nn.Module) -> bool:
    """Return whether a module has ``nn.Linear``'s forward and alone reads its weight."""
    forward = user_class(type(module)).forward
    linear = isinstance(module, nn.Linear) and forward is nn.Linear.forward
    # nn.MultiheadAttention reads its output layer's weight without calling the layer.
    return linear and not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)


def _overlapping(tensors: list[Tensor]) -> set[Tensor]:
    """Return the tensors that share memory with another one, as after ``p.data = q.data``."""
    spans = []
    for x in tensors:
        if type(x) in (Tensor, nn.Parameter) and x.layout == torch.strided and x.numel():
            steps = (step * (size - 1) for size, step in zip(x.shape, x.stride(), strict=True))
            end = x.data_ptr() + (1 + sum(steps)) * x.element_size()
            spans.append((str(x.device), x.data_ptr(), end, x))
    overlapping: set[Tensor] = set()
    device, reach, last = "", 0, None
    for place, start, end, x in sorted(spans, key=lambda span: span[:2]):
        if last is not None and place == device and 0 < start < reach:
            overlapping |= {last, x}
        if last is None or place != device or end > reach:
            device, reach, last = place, end, x
    return overlapping


def _reason(
    name: str, module: nn.Module, parent: nn.Module | None, config: FP8Config
) -> str | None:
    for pattern in config.skip:
        if pattern != _HEAD and matches(pattern, name):
            return f"skip={pattern!r}"
    if isinstance(parent, nn.TransformerEncoderLayer):
        return "in nn.TransformerEncoderLayer, which reads them directly in evaluation"
    if getattr(module, "sparse", False):
        return "in an embedding with sparse gradients"
    if isinstance(module, ParametrizationList):
        return "parametrized"
    known = isinstance(module, (Float8Layer, Float8Experts, nn.Embedding)) or has_linear_forward(
        module
    )
    return None if known else f"of {type(module).__name__}"
