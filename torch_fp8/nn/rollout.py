"""`rollout`: forwards of a policy that is in training, between its steps, to sample from it.

Trainers sample in training mode. There a forward without gradients may be many things, so that FP8
layers keep a weight's payload from the second one on, and delayed scaling records the amaxes of
each: the history of training would be that of single tokens, and each token would cast all weights
anew. Within `rollout` the layers know better: they run as in evaluation, with the recipe, the
scales and the weights that the next forward of training multiplies by, and each weight is cast
once.
"""

import contextlib
from collections.abc import Iterator

from torch import nn

from torch_fp8.nn.layer_quantizers import LayerQuantizers


@contextlib.contextmanager
def rollout(model: nn.Module) -> Iterator[None]:
    """Run the FP8 layers of `model`, within, as in evaluation; in FP8, if training is.

    Only FP8 layers notice: dropout and what else there is stay in the mode that they are in. With
    ``eval_fp8=False``, which would run them in high precision, they stay as they are.

    Args:
        model: converted by `torch_fp8.convert_to_float8`, or any other.
    """
    layers = [
        module
        for module in model.modules()
        if isinstance(module, LayerQuantizers) and module.training and module.fp8_config.eval_fp8
    ]
    for layer in layers:
        layer.training = False
    try:
        yield
    finally:
        for layer in layers:
            layer.train()
