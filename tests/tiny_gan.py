"""A GAN whose critic is a convolution and a small head, which FP8 does not run."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

SHAPE = (24, 4, 4)
"""The shape of a picture."""


class Generator(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 384), nn.Unflatten(1, SHAPE))


class Critic(nn.Sequential):
    """Both weights get 8-bit moments; level O2 splits the one of the head."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(24, 24, 3, 1, 1), nn.ReLU(), nn.Flatten(), nn.Linear(384, 15))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).mean(-1)


def make_gan() -> tuple[nn.Module, nn.Module, nn.Module, Any, Any]:
    """Return generator, critic, criterion and the optimizers of the first two."""
    torch.manual_seed(0)
    generator, critic = Generator(), Critic()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (generator, critic)]
    return generator, critic, nn.BCEWithLogitsLoss(), *optimizers


def train_gan(
    backward: Callable[[Any], None],
    generator: Any,
    critic: Any,
    criterion: Any,
    of_generator: Any,
    of_critic: Any,
) -> list[float]:
    """Train for two steps as scripts do, and return the losses."""
    losses = []
    random = torch.Generator().manual_seed(1)
    real, fake = torch.ones(8), torch.zeros(8)
    for _ in range(2):
        pictures = torch.randn(8, *SHAPE, generator=random)
        z = torch.randn(8, 16, generator=random)
        of_critic.zero_grad()
        loss = criterion(critic(pictures), real) + criterion(critic(generator(z).detach()), fake)
        backward(loss)
        of_critic.step()
        of_generator.zero_grad()
        fooled = criterion(critic(generator(z)), real)
        backward(fooled)
        of_generator.step()
        losses += [loss.item(), fooled.item()]
    return losses
