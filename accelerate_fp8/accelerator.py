"""Accelerator's methods under this engine; `accelerate_fp8._register` installs them.

Each function takes the wrapped method as its first argument, followed by the method's arguments.
"""

import functools
import inspect
import math
import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import DistributedType
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import _fp8_check
from _fp8_points import TRIED, refusal
from accelerate_fp8._register import ENGINE
from accelerate_fp8.backend import (
    PRECISION_KEPT,
    SAMPLES,
    holding,
    is_engine_chosen,
    refuse_tensor_parallel,
    refuse_unsupported,
    repair_backend_variable,
    requested_precision,
)
from accelerate_fp8.flags import CONFIG_VARIABLE, FP8Kwargs, resolve_config
from accelerate_fp8.optimizers import (
    bare,
    is_sharded,
    refuse_sharded_elsewhere,
    wrap_in_ddp,
    wraps_in_ddp,
)
from accelerate_fp8.preparation import LOGGER_NAME, Preparation, log_visibly
from torch_fp8 import restore_weights
from torch_fp8.conversion.convert import check_config
from torch_fp8.distributed.agreement import check_same_config
from torch_fp8.distributed.fsdp.split_weights import split_sharded
from torch_fp8.nn.class_swap import without_compiler
from torch_fp8.nn.deferred_logits import defer_logits
from torch_fp8.nn.transformer_engine import refuse_sharding
from torch_fp8.optim.embedding_dtype import restore_output_dtype
from torch_fp8.optim.merged_state import whole_weights
from torch_fp8.optim.optimizer import Float8Optimizer


def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Extend ``Accelerator.__init__``: choose the FP8 backend, and refuse early what cannot run.

    Raises:
        ImportError: a host is too old.
        ValueError: `FP8Kwargs` is given without ``mixed_precision="fp8"`` or with another backend;
            the precision is misspelled; an option or flag is not supported; DeepSpeed, Megatron-LM
            or tensor parallelism is used; the device cannot run the recipe; ranks have different
            configurations; the engine's backend is Transformer Engine under FSDP.
    """
    bound = inspect.signature(original).bind(self, *args, **kwargs)
    handlers = bound.arguments.get("kwargs_handlers") or []
    ours = [handler for handler in handlers if isinstance(handler, FP8Kwargs)]
    others = [handler for handler in handlers if handler not in ours]
    if len(ours) > 1:
        raise ValueError(f"You can only pass one {FP8Kwargs} in `kwargs_handlers`.")
    bound.arguments["kwargs_handlers"] = others
    precision = requested_precision(bound.arguments.get("mixed_precision"))
    if precision.startswith("fp8") and precision != "fp8":
        raise ValueError(f"mixed_precision={precision!r} is unknown; did you mean 'fp8'?")
    if precision != "fp8":
        if ours:
            raise ValueError("Passing in FP8Kwargs requires setting `mixed_precision='fp8'`.")
        original(*bound.args, **bound.kwargs)
        return
    repair_backend_variable()
    _fp8_check.install()
    if not is_engine_chosen(others, bool(ours)):
        original(*bound.args, **bound.kwargs)
        if os.environ.get(CONFIG_VARIABLE):
            get_logger(LOGGER_NAME).warning(
                f"FP8: {CONFIG_VARIABLE} is not applied: another FP8 backend was chosen"
            )
        return
    too_old = [line for host in TRIED if host in sys.modules and (line := refusal(host))]
    if too_old:
        raise ImportError(too_old[0])
    refuse_unsupported(bound.arguments)
    # Before Accelerate does: its error on a CPU mentions neither FP8 nor tensor parallelism.
    refuse_tensor_parallel(bound.arguments.get("parallelism_config"))
    config, notes = resolve_config(ours[0].config if ours else None)
    if SAMPLES.get() and config.recipe == "auto":
        # With tensorwise scales a token's log-probability would depend on the rest of its batch.
        config = replace(config, recipe="rowwise")
        log_visibly(
            "FP8: recipe='auto' means rowwise in a trainer that samples: scales per token keep "
            "rollouts close to training; name another recipe to change this"
        )
    self._fp8_preparation = Preparation(config)
    with holding(PRECISION_KEPT):
        original(*bound.args, **bound.kwargs)
    sharded = self.distributed_type == DistributedType.FSDP
    asked = os.environ.get("ACCELERATE_USE_FSDP") == "true"
    if asked and not sharded and self.device.type == "cpu":
        log_visibly(
            "FP8: the FSDP settings have no effect: Accelerate shards only on GPUs and runs DDP on "
            "the CPU (use_cpu: true)"
        )
    if self.num_processes > 1:
        check_same_config(config)
    refuse_tensor_parallel(self.parallelism_config)
    if sharded:
        refuse_sharding(config)
    check_config(config, self.device)
    self.register_save_state_pre_hook(functools.partial(_save_state_hook, self))
    self.register_load_state_pre_hook(functools.partial(_load_state_hook, self))
    for note in notes:
        get_logger(LOGGER_NAME).warning(f"FP8: {note}")


def prepare(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Extend ``Accelerator.prepare``: convert models and optimizers before either is wrapped.

    The summary is logged last, when the optimizers are known.
    """
    preparation = preparation_of(self)
    with preparation.collected(self):
        if self.distributed_type != DistributedType.FSDP:
            placements = kwargs.get("device_placement") or [None] * len(args)
            for obj, placement in zip(args, placements, strict=False):
                if isinstance(obj, nn.Module):
                    refuse_sharded_elsewhere(self, obj)
                    preparation.convert(obj, _device_to_be(self, obj, placement))
            models, optimizers = (_of_type(args, kind) for kind in (nn.Module, Optimizer))
            preparation.optimizers.convert(self, models, optimizers)
        return original(self, *args, **kwargs)


def prepare_model(
    original: Any,
    self: Any,
    model: nn.Module,
    device_placement: bool | None = None,
    evaluation_mode: bool = False,
) -> nn.Module:
    """Extend ``Accelerator.prepare_model``: convert before the model is wrapped."""
    preparation = preparation_of(self)
    with preparation.collected(self):
        if not evaluation_mode:
            refuse_sharded_elsewhere(self, model)
        device = _device_to_be(self, model, device_placement)
        preparation.convert(model, device, evaluation_mode)
        optimizers = preparation.optimizers
        if self.distributed_type != DistributedType.FSDP:
            optimizers.convert(self, [model])
        wrap = functools.partial(original, self, model, device_placement, evaluation_mode)
        prepared = isinstance(without_compiler(model), DistributedDataParallel)
        if evaluation_mode or prepared or not wraps_in_ddp(self):
            result = wrap()
        else:
            if device is not None:
                model.to(device)
            result, report = wrap_in_ddp(self, model, optimizers, wrap)
            preparation.communication[model] = report
        if self.distributed_type != DistributedType.FSDP:
            defer_logits(result)
        return result


def prepare_optimizer(
    original: Any, self: Any, optimizer: Optimizer, device_placement: bool | None = None
) -> Any:
    """Extend ``Accelerator.prepare_optimizer``: convert if the optimizer's model is already known.

    Accelerate moves states to the device through ``state_dict``, which has them in float32. States
    of a converted optimizer follow their parameters without that.
    """
    preparation = preparation_of(self)
    with preparation.collected(self):
        if self.distributed_type != DistributedType.FSDP:
            preparation.optimizers.convert(self, optimizers=[optimizer])
        if isinstance(bare(optimizer), Float8Optimizer):
            device_placement = False
        return original(self, optimizer, device_placement)


def clip_grad_norm(
    original: Any, self: Any, parameters: Any, max_norm: float, *args: Any, **kwargs: Any
) -> Any:
    """Extend ``Accelerator.clip_grad_norm_``: gradient release leaves no gradient to measure.

    An infinite `max_norm` only measures; with any other, the gradients themselves raise an error.
    """
    if preparation_of(self).config.gradient_release and math.isinf(max_norm):
        return torch.zeros((), dtype=torch.float32)
    return original(self, parameters, max_norm, *args, **kwargs)


def backward(original: Any, self: Any, loss: Any, **kwargs: Any) -> None:
    """Extend ``Accelerator.backward``: pass the loss to the monitor, if there is one.

    Raises:
        ValueError: no prepared model runs in FP8.
    """
    preparation = preparation_of(self)
    preparation.refuse_idle()
    preparation.refuse_share()
    with preparation.monitoring.observing(loss, self.gradient_accumulation_steps):
        original(self, loss, **kwargs)


def unwrap_model(
    original: Any, self: Any, model: nn.Module, *args: Any, **kwargs: Any
) -> nn.Module:
    """Extend ``Accelerator.unwrap_model``: without autocast, return a stock model."""
    preparation = preparation_of(self)
    bound = inspect.signature(original).bind(self, model, *args, **kwargs)
    stock = not bound.arguments.get("keep_fp32_wrapper", True) and not is_sharded(model)
    for optimizer in preparation.optimizers.that_train(self, model) if stock else ():
        restore_weights(optimizer)
    unwrapped: nn.Module = original(*bound.args, **bound.kwargs)
    if stock:
        preparation.release(unwrapped)
    return unwrapped


def get_state_dict(original: Any, self: Any, model: nn.Module, unwrap: bool = True) -> Any:
    """Extend ``Accelerator.get_state_dict``: return joined weights, on the CPU."""
    with whole_weights(model):
        return original(self, model, unwrap)


def fp8_backend(original: Any, self: Any) -> str:
    """Extend the property ``Accelerator.fp8_backend``: it names this engine.

    The name equals no member of Accelerate's FP8BackendType, so Accelerate takes none of its
    backend branches, while ``native_amp`` stays on: everything between the linear layers runs in
    BF16 autocast.
    """
    return ENGINE


def prepare_fsdp2(original: Any, self: Any, *args: Any) -> Any:
    """Extend ``Accelerator._prepare_fsdp2``: convert before sharding, connect after it."""
    preparation = preparation_of(self)
    models, splits = _of_type(args, nn.Module), preparation.config.opt_level != "O1"
    optimizers = [bare(obj) for obj in _of_type(args, Optimizer)] if splits else []
    for model in models:
        preparation.convert(model, self.device, sharded=True)
        for optimizer in optimizers:  # float32 again, if the loop itself converted it
            restore_weights(optimizer)
            restore_output_dtype(model)
    prepared = original(self, *args)
    for model, sharded in zip(models, _of_type(prepared, nn.Module), strict=True):
        reports = split_sharded(sharded, optimizers, preparation.config) if splits else []
        for optimizer, report in zip(optimizers, reports, strict=True):
            preparation.optimizers.record(optimizer, report)
        preparation.connect_sharded(model, sharded)
    return prepared


def preparation_of(accelerator: Any) -> Preparation:
    """Return the engine's part of an Accelerator that uses it; wrappers run only for these."""
    return accelerator._fp8_preparation


def _of_type(objects: Iterable[Any], kind: type[Any]) -> list[Any]:
    return [obj for obj in objects if isinstance(obj, kind)]


def _device_to_be(
    accelerator: Any, model: nn.Module, device_placement: bool | None
) -> torch.device | None:
    """Return the device on which `model` will run.

    It is None if the parameters stay on the devices that they are on, as with a ``device_map``.
    """
    placed = accelerator.device_placement if device_placement is None else device_placement
    placed = placed or accelerator.distributed_type == DistributedType.FSDP
    return accelerator.device if placed and not accelerator.verify_device_map(model) else None


def _save_state_hook(accelerator: Any, models: list[nn.Module], _: Any, folder: str) -> None:
    where = folder, accelerator.process_index, accelerator.is_main_process
    preparation_of(accelerator).save(models, *where)


def _load_state_hook(accelerator: Any, _: Any, folder: str) -> None:
    # Not the given models, from which Accelerate omits those that FSDP loads itself.
    models, optimizers = accelerator._models, accelerator._optimizers
    preparation_of(accelerator).load(models, optimizers, folder, accelerator.process_index)
