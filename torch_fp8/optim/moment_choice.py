"""The choice of weights whose first moment has 4 bits."""

import weakref
from typing import Any

from torch import nn

from torch_fp8.autograd.current_pass import RunsFP8
from torch_fp8.config import FP8Config
from torch_fp8.optim.optimizer import Float8Optimizer
from torch_fp8.optim.state import is_large, takes_ratio
from torch_fp8.quantization import ratio_int4
from torch_fp8.quantization.wording import counted, first_of


def check_model(config: FP8Config, model: nn.Module | None) -> None:
    """Raise ValueError if `moment_bits` is 4 and there is no model to find FP8 layers in."""
    if config.moment_bits == 4 and model is None:
        raise ValueError(
            "moment_bits=4 applies to the weights of FP8 layers: pass the model, "
            "convert_optimizer(optimizer, config, model=model)"
        )


def choose_moments(optimizer: Float8Optimizer, model: nn.Module | None) -> dict[str, Any]:
    """Choose the weights with a 4-bit first moment, and give the optimizer their layers.

    Returns:
        Fields of an `OptimizerReport` that describe the choice.
    """
    if optimizer.fp8_config.moment_bits == 8 or model is None:
        return {}
    layers = [module for module in model.modules() if isinstance(module, RunsFP8)]
    optimizer.fp8_ratio_layers = tuple(map(weakref.ref, layers))
    weights = counted(len(optimizer.choose_ratios()), "weight")
    large = {w for layer in layers for w in layer.fp8_weights if is_large(w)}
    able = {w for w in large if takes_ratio(w)}
    betas = [tuple(g["betas"]) for g in optimizer.param_groups if not able.isdisjoint(g["params"])]
    coarse = dict.fromkeys(str(pair) for pair in betas if not ratio_int4.holds(*map(float, pair)))
    notes = [f"both moments have 8 bits with betas {', '.join(coarse)}"] if coarse else []
    names = [name for name, p in model.named_parameters() if p in large - able]
    if names:
        notes.append(
            f"both moments of {counted(len(names), 'weight')} ({first_of(names)}) have 8 bits: "
            "their row length is not a multiple of 16, or their rows are split across ranks"
        )
    states = f"8-bit states, a first moment in 4 bits for {weights} of FP8 layers"
    return {"states": states, "notes": tuple(notes)}
