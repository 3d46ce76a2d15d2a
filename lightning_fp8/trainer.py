"""`TrainerPrecision`: what the Trainer's plugins do beyond those of Fabric.

A Trainer makes the optimizers itself, after the model was wrapped, and connects both to the plugin;
when it tears down, every weight has the dtype again that the user gave it.
"""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_fp8.precision import HostPrecision


class TrainerPrecision(HostPrecision):
    """The part of the Trainer's plugins: a Trainer has one model at a time, and connects it."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert `module`, the only one from now on."""
        self._models = [converted for converted in self._models if converted.module() is module]
        return super().convert_module(module)

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> Any:
        """Called once the model is on its device and its optimizers exist, before their states.

        Raises:
            ValueError: an option of an optimizer, or of the Trainer, that the level cannot have.
        """
        (converted,) = self._live()
        # Validating after a fit, the Trainer still has the optimizers of the fit.
        optimizers_in_use = optimizers if self._is_fitting() else []
        self._convert_optimizers(converted, optimizers_in_use, model)
        self._announce(converted)
        return super().connect(model, optimizers, lr_schedulers)  # type: ignore[misc]

    def autocast_context_manager(self) -> torch.autocast:
        # The host's own takes bfloat16 for the string "bf16-mixed" only, float16 for any other.
        return torch.autocast(self.device, dtype=torch.bfloat16, cache_enabled=False)

    def _is_fitting(self) -> bool:
        return bool(self._strategy.lightning_module.trainer.state.fn == "fit")
