"""`FabricPrecision`: what Fabric's plugins do in addition to the common part.

Fabric sets up models and optimizers together or one by one, and informs its plugins only of the
models. So the plugin wraps methods of its strategy.
"""

import functools
import weakref
from collections.abc import MutableMapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fp8.fsdp import FP8FSDPStrategy
from lightning_fp8.monitoring import MonitoredPrecision
from lightning_fp8.precision import HostPrecision
from lightning_fp8.set_up_module import SetUpModule, refusal
from torch_fp8.conversion.forward_precision import refuse_share
from torch_fp8.conversion.selection import NothingToConvertError
from torch_fp8.optim.merged_state import whole_weights


class FabricPrecision(MonitoredPrecision, HostPrecision):
    """The part of Fabric's plugins: models come one by one, and optimizers later."""

    wrapped = (
        *HostPrecision.wrapped,
        *("setup_module_and_optimizers", "setup_module", "setup_optimizer"),
        "get_module_state_dict",
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # All optimizers that were set up, in any order with the models that they train.
        self._optimizers: MutableMapping[Optimizer, None] = weakref.WeakKeyDictionary()

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert as `HostPrecision.convert_module` does, unless `module` has no parameters.

        Raises:
            ValueError: see `HostPrecision.convert_module`; `bf16_last` is set.
        """
        refuse_share(self.config, "Fabric")
        if next(module.parameters(), None) is None:
            return module
        return super().convert_module(module)

    def leave(self, error: NothingToConvertError) -> str:
        """Return why a module is not converted; another module of the run may run in FP8."""
        return error.reason

    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        """Run the host's hook; at the first backward also check that some module runs FP8.

        Raises:
            ValueError: modules were set up, and none of them can run in FP8.
        """
        if not self.runs_fp8 and self._live():
            raise refusal("; ".join(str(converted.report) for converted in self._live()))
        return super().pre_backward(tensor, module)

    def forward_context(self) -> Any:
        """Enter autocast; a model's first forward logs its start-up summary at the latest."""
        for converted in self._live():
            self._announce(converted)
            if self.config.monitor and not isinstance(converted.report, str):
                self.watch(converted.module(), converted.optimizers, None)
        return super().forward_context()  # type: ignore[misc]

    def _setup_module_and_optimizers(
        self, strategy: Any, module: nn.Module, optimizers: list[Optimizer], *scheduler: Any
    ) -> Any:
        if not isinstance(strategy, FP8FSDPStrategy):  # it shards first, and converts them then
            self._optimizers.update(dict.fromkeys(optimizers))
        set_up = type(strategy).setup_module_and_optimizers  # which calls the other two
        result = set_up(strategy, module, optimizers, *scheduler)
        if module in self._models:
            self._announce(self._models[module])
        return result

    def _setup_module(self, strategy: Any, module: nn.Module) -> nn.Module:
        set_up = functools.partial(type(strategy).setup_module, strategy, module)
        converted = self._models.get(module)
        if converted is None:
            return set_up()
        trained_by = [o for o in self._optimizers if converted.trained_by(o)]
        self._convert([o for o in trained_by if o not in converted.optimizers])
        wrapped = self._wrap(strategy, converted, set_up)
        self._connect_sharded(converted)
        converted.wrapped = weakref.ref(wrapped)
        return wrapped

    def _setup_optimizer(self, strategy: Any, optimizer: Optimizer) -> Optimizer:
        if not any(optimizer in converted.optimizers for converted in self._live()):
            self._optimizers[optimizer] = None
            self._convert([optimizer])
        return type(strategy).setup_optimizer(strategy, optimizer)

    def _convert(self, optimizers: list[Optimizer]) -> None:
        """Convert optimizers, those of the same models together."""
        groups: dict[tuple[SetUpModule, ...], list[Optimizer]] = {}
        for optimizer in optimizers:
            trained = tuple(model for model in self._live() if model.trained_by(optimizer))
            groups.setdefault(trained, []).append(optimizer)
        for trained, group in groups.items():
            if trained:
                self._convert_optimizers(trained, group)

    def _get_module_state_dict(self, strategy: Any, module: nn.Module) -> dict[str, Any]:
        with whole_weights(module):
            return type(strategy).get_module_state_dict(strategy, module)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_optimizers": {}}
