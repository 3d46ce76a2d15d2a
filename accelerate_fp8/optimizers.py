"""Optimizers at levels O2 and O3: each is converted as soon as the models that it trains are known.

Accelerate may get models and optimizers in any order and in several calls of ``prepare``. Only
weights that run under its autocast may become BF16, and only before DistributedDataParallel wraps
them.

Under FSDP2 the shards are split: Accelerate itself converts every trainable parameter to float32
before it shards.
"""

from collections.abc import Callable, Iterable, MutableMapping
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary, ref

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torch_fp8 import FP8Config, OptimizerReport, convert_optimizer
from torch_fp8.conversion.memory import expected_bytes_per_param
from torch_fp8.distributed.ddp.connection import DDPReport
from torch_fp8.distributed.ddp.wrap import connect_ddp, ddp_options
from torch_fp8.nn.class_swap import without_compiler
from torch_fp8.optim.convert import gradients_report
from torch_fp8.optim.state import is_large


class WeakKeys(WeakKeyDictionary[Any, Any]):
    """A WeakKeyDictionary that is pickled with its keys, which the stock one cannot be."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (), None, None, iter(list(self.items()))


class PreparedOptimizers:
    """The user's own optimizers that one Accelerator has prepared, with their reports.

    Attributes:
        config: the Accelerator's configuration.
    """

    def __init__(self, config: FP8Config) -> None:
        self.config = config
        self._reports: MutableMapping[Optimizer, OptimizerReport] = WeakKeys()
        self._unannounced: dict[Optimizer, None] = {}
        # Model -> its DistributedDataParallel, which Accelerate does not store. Its buckets exist
        # already when a later optimizer is prepared.
        self.ddps: MutableMapping[nn.Module, Any] = WeakKeys()

    def __getstate__(self) -> dict[str, Any]:  # weak references cannot be pickled
        return {**self.__dict__, "ddps": WeakKeys()}

    def convert(
        self, accelerator: Any, models: Iterable[nn.Module] = (), optimizers: Iterable[Any] = ()
    ) -> None:
        """Convert the optimizers whose weights are all known by now; others wait.

        Args:
            accelerator: the Accelerator with the models and optimizers prepared before.
            models: the models about to be prepared, not wrapped yet.
            optimizers: the optimizers about to be prepared.
        Raises:
            ValueError: 8-bit states do not support an option of an optimizer.
        """
        if self.config.opt_level == "O1":
            return
        known = [self.wrapped(model) or model for model in [*models, *accelerator._models]]
        for optimizer in dict.fromkeys(map(bare, [*optimizers, *accelerator._optimizers])):
            trained = None if optimizer in self._reports else _trained_by(optimizer, known)
            if trained is not None:
                self.record(optimizer, convert_optimizer(optimizer, self.config, model=trained))

    def record(self, optimizer: Optimizer, report: OptimizerReport) -> None:
        """Store the report of an optimizer for the next summary."""
        self._reports[optimizer] = report
        self._unannounced[optimizer] = None

    def announce(self, accelerator: Any, optimizer: Optimizer) -> OptimizerReport:
        """Return the report of an optimizer, which `take_unannounced` then leaves out."""
        self._unannounced.pop(optimizer, None)
        report = self._reports.get(optimizer)
        if report is None:
            report = OptimizerReport(type(optimizer).__name__, False, _why_as_it_was(accelerator))
        return gradients_report(optimizer, report)

    def take_unannounced(self, accelerator: Any) -> list[str]:
        """Return the reports that no summary contains yet, with the memory of their models."""
        lines = []
        for optimizer in list(self._unannounced):
            lines.append(str(self.announce(accelerator, optimizer)))
            for model in accelerator._models:
                if not set(_parameters(optimizer)).isdisjoint(model.parameters()):
                    lines[-1] += f"\n  memory    {expected_bytes_per_param(model, [optimizer])}"
        return lines

    def that_train(self, accelerator: Any, model: nn.Module) -> list[Optimizer]:
        """Return the user's own optimizers with a parameter of `model`, new ones included."""
        parameters = set(model.parameters())
        prepared = dict.fromkeys([*map(bare, accelerator._optimizers), *self._unannounced])
        return [o for o in prepared if not parameters.isdisjoint(_parameters(o))]

    def all_of(self, accelerator: Any) -> list[Optimizer]:
        """Return the user's own optimizers that were prepared, converted or not."""
        return [*map(bare, accelerator._optimizers), *self._reports]

    def wrapped(self, model: nn.Module) -> DistributedDataParallel | None:
        """Return the DistributedDataParallel around a model, or None if there is none."""
        return self.ddps.get(model, lambda: None)()


def bare(optimizer: Any) -> Any:
    """Return the user's own optimizer without Accelerate's wrapper; the user's wrappers stay."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def _trained_by(optimizer: Optimizer, known: list[nn.Module]) -> nn.Module | None:
    """Return the model with all large weights of `optimizer`, or several in a list; else None.

    A weight that is in no prepared model is used outside autocast, where it must not be BF16.
    """
    parameters = set(_parameters(optimizer))
    missing = {p for p in parameters if is_large(p) and p.requires_grad}
    trained = [m for m in dict.fromkeys(known) if not parameters.isdisjoint(m.parameters())]
    for model in trained:
        missing.difference_update(model.parameters())
    if missing or not trained:
        return None
    return trained[0] if len(trained) == 1 else nn.ModuleList(trained)


def _why_as_it_was(accelerator: Any) -> str:
    sharded = accelerator.distributed_type == DistributedType.FSDP
    if sharded and accelerator.state.fsdp_plugin.fsdp_version == 1:
        return "FSDP1 flattens the weights, so only the GEMMs run in FP8; use fsdp_version: 2"
    return "some of its weights belong to no prepared model"


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def wraps_in_ddp(accelerator: Any) -> bool:
    """Return whether this Accelerator will wrap the models that it trains in DDP."""
    return str(accelerator.distributed_type.value).startswith("MULTI_")


def is_sharded(model: nn.Module) -> bool:
    """Return whether a model has sharded weights."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def refuse_sharded_elsewhere(accelerator: Any, model: nn.Module) -> None:
    """Raise ValueError if a model is already sharded and would be wrapped in DDP."""
    if wraps_in_ddp(accelerator) and is_sharded(model):
        raise ValueError(
            f"{type(model).__name__} is already sharded, by "
            "from_pretrained(distributed_config=...) or parallelize_module, and Accelerate would "
            "wrap it in DistributedDataParallel, which cannot train it. Load it unsharded and pass "
            "Accelerate FullyShardedDataParallelPlugin(fsdp_version=2), or write your own training "
            "loop (docs/distributed.md)"
        )


def wrap_in_ddp(
    accelerator: Any,
    model: nn.Module,
    optimizers: PreparedOptimizers,
    wrap: Callable[[], nn.Module],
) -> tuple[nn.Module, DDPReport | None]:
    """Have Accelerate wrap a model with the options of `ddp_options`, and connect DDP.

    Accelerate's handler cannot distinguish an explicit ``gradient_as_bucket_view=False`` from the
    default. A hook of DistributedDataParallelKwargs, which Accelerate registers, takes precedence
    over ours.

    Args:
        accelerator: the Accelerator that prepares `model`.
        model: the model, on its device and not wrapped.
        optimizers: the optimizers known so far.
        wrap: the function that has Accelerate wrap the model.
    Returns:
        The prepared model, and a report on how gradients travel, or None if it was not wrapped.
    Raises:
        ValueError: ranks have converted different weights.
    """
    users, trained_by = accelerator.ddp_handler, optimizers.that_train(accelerator, model)
    options = ddp_options(model, trained_by, users.to_kwargs() if users is not None else {})
    register = getattr(users, "register_comm_hook", lambda model: None)
    handler = SimpleNamespace(to_kwargs=lambda: options, register_comm_hook=register)
    accelerator.ddp_handler = handler
    try:
        prepared = wrap()
    finally:
        accelerator.ddp_handler = users
    ddp = without_compiler(prepared)
    if not isinstance(ddp, DistributedDataParallel):
        return prepared, None
    optimizers.ddps[model] = ref(ddp)
    return prepared, connect_ddp(ddp, trained_by, optimizers.config)
