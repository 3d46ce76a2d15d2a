"""`rollout`: forwards of a policy that is in training, between its steps, to sample from it.

Trainers sample in training mode. There delayed scaling records the amaxes of each forward, so that
the history of training would be that of single tokens, and each token would cast all weights anew.
Within `rollout` the layers run as in evaluation, with the recipe, the scales and the weights that
the next forward of training multiplies by, and each weight is cast once: nobody writes to it within
(`torch_fp8.tensor.payload_cache`). ``generate`` of transformers is such a scope by itself.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torch_fp8.nn.experts import Float8Experts
from torch_fp8.nn.linear import Float8Layer


@contextlib.contextmanager
def rollout(
    model: nn.Module, *, compiled: bool = False, keep_graphs: bool = True
) -> Iterator[None]:
    """Run the FP8 layers of `model`, within, as in evaluation; in FP8, if training is.

    Only FP8 layers notice: dropout and what else there is stay in the mode that they are in. With
    ``eval_fp8=False``, which would run them in high precision, they stay as they are. Nobody may
    write to a weight within. Within another `rollout` of the model this one changes nothing.

    Args:
        model: converted by `torch_fp8.convert_to_float8`, or any other.
        compiled: whether its forwards are compiled, as transformers does with a static cache on
            CUDA. The weights are cast at once, and the graphs read what they were cast to; else
            they would cast all weights at each token.
        keep_graphs: whether CUDA graphs that are captured within, by a compiler, too, may be
            replayed in a later rollout. What they read stays in memory then, one byte for each
            parameter, and a rollout begins with casting the weights into it. Without it they must
            go with this rollout.
    """
    layers = [m for m in model.modules() if isinstance(m, Float8Layer) and _serves(m)]
    trained = [layer for layer in layers if layer.training]
    experts = _expert_caches(model)
    for layer in trained:
        layer.training = False
    try:
        for layer in layers:
            layer.fp8.begin_scope(layer, compiled)
        for cache, weight in experts:
            cache.begin_scope(weight)
        yield
    finally:
        for layer in layers:
            layer.fp8.end_scope(keep_graphs)
        for cache, _ in experts:
            cache.end_scope(keep_graphs)
        for layer in trained:
            layer.train()


def _serves(layer: Float8Layer) -> bool:
    return not layer.fp8.payloads.in_scope and layer.fp8.config.eval_fp8 and layer.runs_fp8


def _expert_caches(model: nn.Module) -> list[tuple[Any, Tensor]]:
    """Return the caches of fused expert weights that no other rollout serves, with the weights."""
    return [
        (cache, weight)
        for module in model.modules()
        if isinstance(module, Float8Experts) and module.fp8.config.eval_fp8 and module.runs_fp8
        for name, cache in module.fp8.caches.items()
        if cache.keeps_evaluation
        and not cache.in_scope
        and (weight := module._parameters.get(name)) is not None
        and not isinstance(weight, DTensor)  # gathered later
    ]
