"""`rollout`: sample from a policy between its training steps.

Trainers sample in training mode. Delayed scaling would then record the amaxes of single tokens in
the history of training, and each token would cast all weights again. Within `rollout` the layers
run as in evaluation, with the recipe, scales and weights of the next training forward, and each
weight is cast once, because nothing may write to it there (`torch_fp8.tensor.payload_cache`).
transformers' ``generate`` enters such a scope by itself.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torch_fp8.nn.experts import Float8Experts
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.quantization.argument_types import check_arguments


@contextlib.contextmanager
def rollout(
    model: nn.Module, *, compiled: bool = False, keep_graphs: bool = True
) -> Iterator[None]:
    """Run the FP8 layers of `model` as in evaluation, and in FP8, inside the ``with`` block.

    Only FP8 layers change their mode; dropout and all other modules keep theirs. Layers with
    ``eval_fp8=False`` also keep theirs, because evaluation would run them in high precision. Do not
    write to weights inside the block. A `rollout` within another one of the same model has no
    effect.

    Args:
        model: model that `torch_fp8.convert_to_float8` converted, or any other.
        compiled: whether the forwards are compiled, as transformers does with a static cache on
            CUDA. The weights are then cast on entry, and the graphs read these payloads. Otherwise
            a graph would cast all weights at each token.
        keep_graphs: whether CUDA graphs captured inside, also by a compiler, may be replayed in a
            later rollout. The payloads that they read then stay in memory, one byte per parameter,
            and a later rollout casts the weights into them on entry. With False, discard such
            graphs when the block ends.
    """
    check_arguments(rollout, locals())
    fp8_layers = [m for m in model.modules() if isinstance(m, Float8Layer) and m.runs_fp8]
    layers = [m for m in fp8_layers if m.fp8.config.eval_fp8 and not m.fp8.payloads.in_scope]
    trained = [layer for layer in layers if layer.training]
    experts = _expert_caches(model)
    for layer in trained:
        layer.training = False
    try:
        for layer in layers:
            _begin_scope(layer, compiled)
        for cache, weight in experts:
            cache.begin_scope(weight)
        yield
    finally:
        for layer in layers:
            layer.fp8.served = None
            layer.fp8.payloads.end_scope(keep_graphs)
        for cache, _ in experts:
            cache.end_scope(keep_graphs)
        for layer in trained:
            layer.train()


def _begin_scope(layer: Float8Layer, compiled: bool) -> None:
    """Begin a scope in which nothing writes to the weight; cast it now for compiled graphs."""
    fp8: Any = layer.fp8
    cache, weight = fp8.payloads, layer._parameters.get("weight")
    casts_alone = fp8.operand_class.independent and not fp8.recipe.bf16_forward
    if not (cache.keeps_evaluation and casts_alone):
        return
    if weight is None or isinstance(weight, DTensor) or not weight.numel():  # FSDP gathers
        return
    cache.begin_scope(weight)
    if not (compiled or cache.captured is not None):
        return
    with torch.no_grad(), torch.inference_mode(False):
        fp8.quantizers(layer).weight.without_gradients(weight, layer.training)
    if compiled and cache.payload is not None:
        cache.captured = cache.payload
        for part in cache.payload[:2]:  # a compiler's CUDA graphs read this memory
            torch._dynamo.mark_static_address(part, guard=False)
        fp8.served = tuple(cache.payload)


def _expert_caches(model: nn.Module) -> list[tuple[Any, Tensor]]:
    """Return (cache, weight) of fused expert weights that are in no other rollout's scope."""
    return [
        (cache, weight)
        for module in model.modules()
        if isinstance(module, Float8Experts) and module.fp8.config.eval_fp8 and module.runs_fp8
        for name, cache in module.fp8.caches.items()
        if cache.keeps_evaluation
        and not module.fp8.recipe.bf16_forward
        and not cache.in_scope
        and (weight := module._parameters.get(name)) is not None
        and not isinstance(weight, DTensor)  # FSDP2 gathers it later
    ]
