"""FP8-LM's automatic scaling: mu, which leaves room for a sum in FP8 (`torch_fp8.fp8_lm`).

Where more than 1e-5 of a step's sums sit at E4M3's maximum, mu is halved; else it grows by
``2 ** (1 / 1000)``, and so doubles in 1,000 steps (arXiv 2310.18313, section 2.1). It stays within
``1 / N``, where no sum over N ranks can saturate, and 1, and starts in the middle. All ranks count
the same sums and so have the same mu, on the device, without waiting for it.
"""

import torch
from torch import Tensor, nn

MAX_SATURATED = 1e-5
"""Share of a step's sums at E4M3's maximum, above which mu is halved."""

_GROWTH = 2 ** (1 / 1000)
_ATTRIBUTE = "_fp8_automatic_scaling"
_KEY = "automatic_scaling.mu"


class AutomaticScaling:
    """mu, the part of E4M3's range that a single rank's gradients may use.

    Attributes:
        mu: () float32, on the device of the gradients once there were any; None before.
    """

    def __init__(self, mu: Tensor | None = None) -> None:
        self.mu = mu

    def prepare(self, world_size: int, device: torch.device) -> Tensor:
        """mu for the step that begins."""
        if self.mu is None:
            self.mu = torch.tensor(world_size**-0.5, device=device)
        self.mu = self.mu.to(device).clamp(1 / world_size, 1)
        return self.mu

    def update(self, saturated: Tensor, numel: int, world_size: int) -> None:
        """mu for the next step.

        Args:
            saturated: () number of sums at the maximum.
            numel: number of sums.
        """
        assert self.mu is not None
        too_many = saturated > MAX_SATURATED * numel
        self.mu = torch.where(too_many, self.mu / 2, self.mu * _GROWTH).clamp(1 / world_size, 1)


def automatic_scaling(module: nn.Module) -> AutomaticScaling | None:
    """That of a module, which DistributedDataParallel wraps; None if it has none."""
    scaling: AutomaticScaling | None = module.__dict__.get(_ATTRIBUTE)
    return scaling


def set_automatic_scaling(module: nn.Module, scaling: AutomaticScaling | None) -> None:
    """Give a module its automatic scaling, or take it away."""
    if scaling is None:
        module.__dict__.pop(_ATTRIBUTE, None)
    else:
        module.__dict__[_ATTRIBUTE] = scaling


def automatic_scaling_state(module: nn.Module) -> dict[str, Tensor]:
    """mu as a state dict of one key, on the CPU; empty where there is none yet."""
    scaling = automatic_scaling(module)
    return {} if scaling is None or scaling.mu is None else {_KEY: scaling.mu.cpu().clone()}


def take_automatic_scaling_state(module: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Restore what `automatic_scaling_state` returned; what else is in `state`."""
    if _KEY in state:
        scaling = automatic_scaling(module)
        if scaling is None:  # not wrapped yet
            set_automatic_scaling(module, AutomaticScaling(state[_KEY].clone()))
        else:
            scaling.mu = state[_KEY].clone()
    return {key: value for key, value in state.items() if key != _KEY}
