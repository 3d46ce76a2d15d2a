"""Checks of an optimizer before its conversion, and the choice of weights that can be split.

**Sharding** (`check_shardings`). States can follow every sharding along rows (column-wise parallel,
FSDP2). If a matrix is sharded along its columns (row-wise parallel), groups of 32 start anew on
each rank; the states equal those of the whole matrix bit for bit if each rank has a multiple of 32
columns. One byte of a residual cannot be shared by two ranks.

**optimi's StableAdamW** (`adopt_stable_adamw`), which transformers uses for
``optim="stable_adamw"``, is AdamW with update clipping (arXiv 2304.13013). `torch_fp8.ops.adamw`
computes the same with ``FP8Config(update_clipping=True)``: bias-corrected moments, clipping by the
RMS of ``g / sqrt(v)``, and decoupled decay.

**Weights that can be split** (`reasons_to_stay`) are those that only their own forward reads.

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
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import Optimizer

from torch_fp8.config import FP8Config
from torch_fp8.nn.class_swap import user_class
from torch_fp8.nn.frozen_storage import FrozenStorage
from torch_fp8.nn.layer_filter import adapter_modules, high_precision_modules, matches
from torch_fp8.nn.optimizer_checks import refuse_training
from torch_fp8.optim.converted import ConvertedOptimizer
from torch_fp8.optim.state import is_large


def without_wrapper(optimizer: Any) -> Any:
    """Return the optimizer within the wrapper of a host (Accelerate, Fabric), or itself."""
    return getattr(optimizer, "optimizer", optimizer)


def check_trained(optimizer: Optimizer, config: FP8Config, model: nn.Module | None) -> None:
    """Check that an optimizer can be converted as configured, and that it trains the model.

    Raises:
        TypeError: the optimizer does not derive from torch.optim.Optimizer.
        ValueError: the optimizer has none of the model's parameters, or it has a frozen weight or
            one created inside ``torch.inference_mode()``; or O3 needs the model.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"{type(optimizer).__name__} does not derive from torch.optim.Optimizer, and "
            "convert_optimizer only converts those that do; train with it as it is"
        )
    refuse_training(optimizer)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if any(p.is_inference() for p in held if not is_lazy(p)):
        raise ValueError(
            f"parameters of {type(optimizer).__name__} were created inside torch.inference_mode(), "
            "and autograd cannot train them; create the model outside it"
        )
    if model is None and config.opt_level == "O3":
        raise ValueError(
            "opt_level='O3' makes the gradients of FP8 layers 8 bits wide: pass the model, "
            "convert_optimizer(optimizer, config, model=model)"
        )
    own = set() if model is None else set(model.parameters())
    if held and own and own.isdisjoint(held):
        raise ValueError(
            f"none of the {len(held)} parameters of {type(optimizer).__name__} is one of the "
            f"{len(own)} of {type(model).__name__}; pass the model that it trains as model=. If "
            "the model's parameters have been replaced since (by sharding, for example), make the "
            "optimizer from the new ones"
        )


def check_shardings(optimizer: Optimizer, model: nn.Module | None) -> None:
    """Run `check_sharding` on all parameters that get 8-bit states or a residual.

    Args:
        optimizer: the optimizer, converted or not.
        model: the model that gives the parameters' names, or None if the error numbers them.
    """
    named = {} if model is None else {p: f"'{n}'" for n, p in model.named_parameters()}
    for i, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        if is_large(parameter) or parameter.dtype == torch.bfloat16:
            check_sharding(parameter, named.get(parameter, f"parameter {i}"))


def check_sharding(parameter: Tensor, name: str) -> None:
    """Raise ValueError unless 8-bit states can follow a DTensor's sharding.

    Args:
        parameter: the parameter.
        name: the parameter's name for the error.
    """
    if not isinstance(parameter, DTensor):
        return
    placements = enumerate(parameter.placements)
    for axis, placement in ((a, p) for a, p in placements if getattr(p, "dim", 0) != 0):
        ranks, last = parameter.device_mesh.size(axis), parameter.ndim - 1
        if parameter.ndim != 2 or placement.dim != last:
            raise ValueError(
                f"{name} is sharded as {parameter.placements}; 8-bit states and split weights can "
                "only be sharded along rows, or along the columns of a matrix. Keep the optimizer "
                "unchanged with FP8Config(opt_level='O1')"
            )
        if not is_large(parameter) and parameter.shape[last] % ranks:
            raise ValueError(
                f"{name} has {parameter.shape[last]} columns on {ranks} ranks; its residual of 16 "
                f"bits needs a multiple of {ranks}. Use FP8Config(opt_level='O1')"
            )


class StableAdamW(torch.optim.AdamW):
    """An AdamW that clips its updates after `convert_optimizer`, but not before."""


def adopt_stable_adamw(optimizer: Optimizer, config: FP8Config) -> FP8Config:
    """Turn optimi's StableAdamW into an AdamW in place, and return the configuration for it.

    It stays as it is if it has already stepped, if it uses ``decouple_lr`` or ``gradient_release``,
    or if its weights are sharded, because no rank can compute the RMS of a whole sharded weight.
    """
    cls = type(optimizer)
    if (cls.__name__, cls.__module__.partition(".")[0]) == ("StableAdamW", "optimi"):
        groups = optimizer.param_groups
        others = any(group["decouple_lr"] or group["gradient_release"] for group in groups)
        sharded = any(isinstance(p, DTensor) for group in groups for p in group["params"])
        if others or sharded or any(optimizer.state.values()):
            return config
        _become_adamw(optimizer)
    base = optimizer._fp8_base if isinstance(optimizer, ConvertedOptimizer) else type(optimizer)
    return replace(config, update_clipping=True) if issubclass(base, StableAdamW) else config


def _become_adamw(optimizer: Optimizer) -> None:
    of_adamw = torch.optim.AdamW([torch.zeros(1, dtype=torch.float32, device="cpu")]).defaults
    of_optimi = optimizer.defaults.keys() - {"lr", "weight_decay", "eps"}
    for group in [*optimizer.param_groups, optimizer.defaults]:
        group["betas"] = group["beta1"], group["beta2"]
        for name in of_optimi:
            group.pop(name, None)
        group.update({name: value for name, value in of_adamw.items() if name not in group})
    handle = optimizer.register_load_state_dict_post_hook(lambda _: None)
    hooks: Any = handle.hooks_dict_ref()
    handle.remove()
    for key in [k for k, hook in hooks.items() if hook.__module__.startswith("optimi.")]:
        del hooks[key]  # they load states that AdamW does not have
    optimizer.__class__ = StableAdamW


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
    parents = {child: module for module in model.modules() for child in module.children()}
    reasons: dict[Tensor, str | None] = {}
    for tensor in _overlapping([*model.parameters(), *model.buffers()]):
        reasons[tensor] = "sharing memory with another parameter or buffer"
    for tensor in model.parameters():
        if type(tensor) is nn.Parameter and tensor.device.type == "cpu" and tensor.is_shared():
            reasons[tensor] = "sharing memory with other processes"
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            reason = None
            if module not in heads:
                of_adapters = "of adapters" if module in adapters else None
                reason = of_adapters or _reason(name, module, parents.get(module), config)
            own = module.fp8_weights if isinstance(module, FrozenStorage) else ()
            if reason is None and key != "weight" and not any(w is parameter for w in own):
                reason = f"of {type(module).__name__}, besides its weight"
            if reasons.get(parameter) is None:  # one owner with a reason is enough
                reasons[parameter] = reason
    return reasons


def has_linear_forward(module: nn.Module) -> bool:
    """Return whether a module has ``nn.Linear``'s forward and alone reads its weight."""
    linear = isinstance(module, nn.Linear) and user_class(type(module)).forward is nn.Linear.forward
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
    reached: dict[str, tuple[int, Tensor]] = {}
    for device, start, end, x in sorted(spans, key=lambda span: span[:2]):
        reach, last = reached.get(device, (0, x))
        if 0 < start < reach:
            overlapping |= {last, x}
        if end > reach:
            reached[device] = end, x
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
    known = isinstance(module, (FrozenStorage, nn.Embedding)) or has_linear_forward(module)
    return None if known else f"of {type(module).__name__}"
