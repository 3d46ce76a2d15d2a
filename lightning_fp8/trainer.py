"""`TrainerPrecision`: what the Trainer's plugins do in addition to the common part.

A Trainer creates the optimizers itself, after the model was set up, and connects both to the
plugin. When it tears down, every weight gets the user's dtype back.
"""

import math
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_fp8.monitoring import MonitoredPrecision
from lightning_fp8.precision import HostPrecision, shards
from torch_fp8 import FP8Config
from torch_fp8.conversion.forward_precision import LastSteps, refuse_share
from torch_fp8.distributed.ddp.connection import connection_of
from torch_fp8.nn.deferred_logits import return_losses
from torch_fp8.optim.merged_state import whole_weights


class TrainerPrecision(MonitoredPrecision, HostPrecision):
    """The part of the Trainer's plugins: a Trainer has one model at a time, and connects it."""

    wrapped = (*HostPrecision.wrapped, "lightning_module_state_dict")
    _last_steps: LastSteps | None = None

    def _lightning_module_state_dict(self, strategy: Any) -> dict[str, Any]:
        """Return the strategy's ``lightning_module_state_dict``, with joined weights."""
        with whole_weights(strategy.lightning_module):
            return type(strategy).lightning_module_state_dict(strategy)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert `module`, which becomes the Trainer's only model."""
        own = {known: m for known, m in self._models.items() if known is module}
        self._models = weakref.WeakKeyDictionary(own)
        super().convert_module(module)
        if not shards(self._strategy):
            return_losses(module, getattr(type(module), "training_step", None))
        if self._is_fitting() and hasattr(self._strategy, "configure_ddp"):
            # DistributedDataParallel's buckets have the weights' dtype at the time of wrapping, and
            # the Trainer wraps before the optimizers exist. So delay the wrapping.
            self._strategy.configure_ddp = _wait
        return module

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> Any:
        """Connect the model, which is on its device, and its optimizers, which have no states yet.

        Raises:
            ValueError: the level does not support an option of an optimizer, or `bf16_last` is set
                and the number of steps is unknown.
        """
        (converted,) = self._live()
        # When it validates after a fit, the Trainer still has the optimizers of the fit.
        in_use = optimizers if self._is_fitting() else []
        converted.wrapped = weakref.ref(model)
        self._convert_optimizers([converted], in_use)
        if self._let_ddp_go_on():
            model = self._wrap(self._strategy, converted, self._configure_ddp)
        self._connect_sharded(converted)
        self._announce(converted)
        if in_use:
            trainer = self._strategy.lightning_module.trainer
            self.watch(converted.module(), in_use, trainer)
            if self.config.bf16_last:
                steps = _number_of_steps(self.config, trainer)
                self._last_steps = LastSteps(converted.live, self.config.bf16_last, steps)
                self.info(str(self._last_steps))
        return super().connect(model, optimizers, lr_schedulers)  # type: ignore[misc]

    def forward_context(self) -> Any:
        """Enter autocast; in the last steps, first set the precision of the forward."""
        if self._last_steps is not None:
            self._last_steps.before(self._strategy.lightning_module.trainer.global_step)
        return super().forward_context()  # type: ignore[misc]

    def pre_backward(self, tensor: torch.Tensor, module: Any) -> Any:
        """Run the host's hook; with manual optimization, also start a backward that averages."""
        ddp = self._strategy.model
        if not module.automatic_optimization and getattr(ddp, "require_backward_grad_sync", False):
            # The forward ran without averaging, because Lightning turns it on only for backward.
            connection = connection_of(ddp)
            if connection is not None:
                connection.prepare(ddp, (), tensor)
        return super().pre_backward(tensor, module)

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, *args: Any, **kw: Any) -> None:
        """Clip as the host does.

        Raises:
            ValueError: gradient release is on.
        """
        if clip_val and self.config.gradient_release:
            self.main_params(optimizer)
        super().clip_gradients(optimizer, clip_val, *args, **kw)  # type: ignore[misc]

    def teardown(self) -> None:
        """Restore a stock model with weights in the user's dtype."""
        self._last_steps = None
        self._let_ddp_go_on()
        super().teardown()

    def autocast_context_manager(self) -> torch.autocast:
        # The host's method uses bfloat16 only for the string "bf16-mixed", and float16 otherwise.
        return torch.autocast(self.device, dtype=torch.bfloat16, cache_enabled=False)

    def _is_fitting(self) -> bool:
        module = self._strategy.lightning_module
        return module is not None and module.trainer.state.fn == "fit"

    def _configure_ddp(self) -> Any:
        self._strategy.configure_ddp()
        return self._strategy.model

    def _let_ddp_go_on(self) -> bool:
        return vars(self._strategy).pop("configure_ddp", None) is not None


def _number_of_steps(config: FP8Config, trainer: Any) -> int:
    """Return the number of optimizer steps of a fit; raise ValueError if it is unknown."""
    if not trainer.lightning_module.automatic_optimization:
        refuse_share(config, "a Trainer with manual optimization")
    steps = trainer.estimated_stepping_batches
    if not math.isfinite(steps) or steps < 1:
        refuse_share(config, "a Trainer without max_steps or max_epochs")
    return int(steps)


def _wait() -> None:
    """A placeholder for the strategy's ``configure_ddp`` until the optimizers exist."""
