"""The choice of weights that may be split: those whose every use is known.

Under autocast a float32 weight is cast where a matrix product reads it, and nowhere else: a
parametrization, ``autocast(enabled=False)``, a merge of adapters or a fused operator finds float32
next to float32. A split weight (`torch_fp8.quantization.split_float`) is BF16 for all of them. So
only weights are split that are known to be read by their own forward alone:

* weights of FP8 layers and of experts in FP8, which take any dtype;
* of embeddings, whose output goes on to be float32 (`torch_fp8.optim.embedding_dtype`);
* of output layers and other layers that compute what ``nn.Linear`` does, but stay in high precision
  by themselves: too small, say, or not faster in FP8. Outside autocast they multiply in float32.

No weight is split whose memory another parameter, buffer or process has: each would have halves of
its own.

Everything else keeps its dtype, and its moments have 8 bits all the same: adapters of PEFT, which
are merged outside autocast; parametrized tensors; parameters of any other module (convolutions,
experts in high precision, bags of embeddings, which sum in float32, recurrent layers, the user's
own); and what ``FP8Config(skip=...)`` names, output layers excepted. That is the way out where
other code reads a weight of these layers.
"""

import re

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from torch_fp8.config import FP8Config
from torch_fp8.nn.experts import Float8Experts
from torch_fp8.nn.layer_filter import high_precision_modules, matches
from torch_fp8.nn.linear import Float8Layer

NO_MODEL = "of no module that is known; pass convert_optimizer(optimizer, config, model=model)"
_ADAPTER = re.compile(r"(^|\.)(lora_\w+|modules_to_save|prompt_encoder)(\.|$)")
_HEAD = "lm_head"


def reasons_to_stay(model: nn.Module, config: FP8Config) -> dict[Tensor, str | None]:
    """Explain why each parameter of a model stays one tensor; None: it may be split.

    Args:
        model: converted already, if it is to be.
        config: the configuration whose `skip` counts.
    """
    heads = high_precision_modules(model, config.skip)
    parents: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        parents |= dict.fromkeys(module.children(), module)
    reasons: dict[Tensor, str | None] = {}
    for tensor in _overlapping([*model.parameters(), *model.buffers()]):
        reasons[tensor] = "in memory that another parameter or buffer has, too"
    for tensor in model.parameters():
        if type(tensor) is nn.Parameter and tensor.device.type == "cpu" and tensor.is_shared():
            reasons[tensor] = "in memory that processes share"
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            reason = None if module in heads else _reason(name, module, parents.get(module), config)
            own = module.fp8_weights if isinstance(module, Float8Experts) else ()
            if reason is None and key != "weight" and not any(w is parameter for w in own):
                reason = f"of {type(module).__name__}, beside its weight"
            if reasons.get(parameter) is None:  # one owner that reads it elsewhere is enough
                reasons[parameter] = reason
    return reasons


def has_linear_forward(module: nn.Module) -> bool:
    """Return whether a high-precision module computes what ``nn.Linear`` does and alone reads its
    weight.
    """
    linear = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    # nn.MultiheadAttention reads the weight of its output layer past the layer.
    return linear and not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)


def _overlapping(tensors: list[Tensor]) -> set[Tensor]:
    """Return the tensors that share memory with another one, as ``p.data = q.data`` ties them."""
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
    if _ADAPTER.search(name):
        return "of adapters"
    for pattern in config.skip:
        if pattern != _HEAD and matches(pattern, name):
            return f"skip={pattern!r}"
    if isinstance(parent, nn.TransformerEncoderLayer):
        return "of nn.TransformerEncoderLayer, which reads them itself in evaluation"
    if getattr(module, "sparse", False):
        return "of an embedding with sparse gradients"
    if isinstance(module, ParametrizationList):
        return "parametrized"
    known = isinstance(module, (Float8Layer, Float8Experts, nn.Embedding)) or has_linear_forward(
        module
    )
    return None if known else f"of {type(module).__name__}"
