"""`FabricPrecision`: what Fabric's plugins do beyond those of the Trainer.

Fabric sets models and optimizers up together or one by one, and tells its plugins of the models
only; so the plugin stands in front of methods of its strategy.
"""

import functools
import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_fp8.fsdp import FP8FSDPStrategy
from lightning_fp8.monitoring import MonitoredPrecision
from lightning_fp8.precision import Converted, HostPrecision, parameters_of
from torch_fp8.optim.optimizer import Float8Optimizer

_METHODS = (
    "setup_module_and_optimizers",
    "setup_module",
    "setup_optimizer",
    "get_module_state_dict",
    "load_module_state_dict",
)


class FabricPrecision(MonitoredPrecision, HostPrecision):
    """The part of Fabric's plugins: models are set up one by one, and optimizers come later."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Optimizers that were set up before their model.
        self._waiting: list[weakref.ref[Optimizer]] = []

    def attach(self, strategy: Any, accelerator: Any) -> None:
        """Attach as `HostPrecision.attach` does; and observe the modules and optimizers of
        `strategy`.
        """
        super().attach(strategy, accelerator)
        for name in _METHODS:
            # Only functions of modules and classes: ddp_spawn pickles the strategy.
            setattr(strategy, name, functools.partial(getattr(self, f"_{name}"), strategy))

    def forward_context(self) -> Any:
        """Enter autocast; a model's first forward is the last moment for its start-up summary."""
        for converted in self._live():
            self._announce(converted)
            if self.config.monitor:
                self.watch(converted.module(), converted.optimizers, None)
        return super().forward_context()  # type: ignore[misc]

    def _setup_module_and_optimizers(
        self, strategy: Any, module: nn.Module, optimizers: list[Optimizer], *scheduler: Any
    ) -> Any:
        converted = self._converted(module)
        if not isinstance(strategy, FP8FSDPStrategy):  # else `_setup_optimizer` does it
            self._convert_optimizers(converted, optimizers, module)
        # Calls the other two in turn.
        set_up = type(strategy).setup_module_and_optimizers(
            strategy, module, optimizers, *scheduler
        )
        self._announce(converted)
        return set_up

    def _setup_module(self, strategy: Any, module: nn.Module) -> nn.Module:
        converted = self._converted(module)
        waiting = [optimizer for reference in self._waiting if (optimizer := reference())]
        of_this_one = [o for o in waiting if self._model_of(o) is converted]
        self._waiting = [weakref.ref(o) for o in waiting if o not in of_this_one]
        self._convert_optimizers(converted, of_this_one, module)
        set_up = functools.partial(type(strategy).setup_module, strategy, module)
        wrapped = self._wrap(strategy, converted, set_up)
        self._connect_sharded(converted)
        converted.wrapped = weakref.ref(wrapped)
        return wrapped

    def _setup_optimizer(self, strategy: Any, optimizer: Optimizer) -> Optimizer:
        if not any(optimizer in converted.optimizers for converted in self._live()):
            self._set_up_alone(optimizer)
        set_up: Optimizer = type(strategy).setup_optimizer(strategy, optimizer)
        return set_up

    def _get_module_state_dict(self, strategy: Any, module: nn.Module) -> dict[str, Any]:
        with self.whole_weights(module):
            state: dict[str, Any] = type(strategy).get_module_state_dict(strategy, module)
        return state

    def _load_module_state_dict(
        self, strategy: Any, module: nn.Module, state_dict: Any, *args: Any, **kwargs: Any
    ) -> None:
        state_dict = self.split_loaded(module, state_dict)
        type(strategy).load_module_state_dict(strategy, module, state_dict, *args, **kwargs)

    def _set_up_alone(self, optimizer: Optimizer) -> None:
        converted = self._model_of(optimizer)
        if converted is None:
            self._waiting.append(weakref.ref(optimizer))
            return
        model = None if converted.wrapped is None else converted.wrapped()
        if model is None:
            model = converted.module()
        assert model is not None
        predecessors = list(converted.optimizers)
        self._convert_optimizers(converted, [optimizer], model)
        for predecessor in predecessors:
            _hand_over(predecessor, optimizer)

    def _converted(self, module: nn.Module) -> Converted:
        return next(c for c in self._live() if c.module() is module)

    def _model_of(self, optimizer: Optimizer) -> Converted | None:
        parameters = parameters_of(optimizer)
        for converted in self._live():
            module = converted.module()
            assert module is not None
            if any(parameter in parameters for parameter in module.parameters()):
                return converted
        return None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_waiting": []}


def _hand_over(old: Optimizer, new: Optimizer) -> None:
    """Give the residuals of weights that both optimizers train to the one that trains them from now
    on.
    """
    if not (isinstance(old, Float8Optimizer) and isinstance(new, Float8Optimizer)):
        return
    for parameter in parameters_of(old) & parameters_of(new):
        residual = old.residual_of(parameter)
        if residual is not None:
            old.set_residual(parameter, None)
            new.set_residual(parameter, residual)
