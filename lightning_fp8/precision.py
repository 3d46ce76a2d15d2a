"""`FP8Precision`: the precision plugin, for the Trainer and for Fabric.

The user passes ``FP8Precision(FP8Config(...))`` to ``plugins=[...]`` of a Trainer or a Fabric.
Lightning exists in two copies with separate base classes, so this object is only a request. The
connector that receives it calls `Request.for_host` for the plugin of its own copy
(`unified_trainer`, `unified_fabric`, `standalone_trainer`, `standalone_fabric`), a subclass of that
copy's ``MixedPrecision``.

The plugin runs forward in bfloat16 autocast, as ``bf16-mixed`` does. It converts the linear layers
in place when the strategy sets up the model, and the optimizers (levels O2 and O3) as soon as they
are known. At teardown the layers become stock ``nn.Linear`` again and the weights get the user's
dtype, so code that saves, exports or trains the model on finds a stock model.
"""

import functools
import weakref
from collections import Counter
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_fp8._register import Request, refuse_strategy
from lightning_fp8.set_up_module import SetUpModule, parameters_of, refusal
from torch_fp8 import (
    ConversionReport,
    FP8Config,
    OptimizerReport,
    convert_optimizer,
    convert_to_float8,
    load_scaling_state_dict,
    revert,
    scaling_state_dict,
)
from torch_fp8.checkpoint.adopt import take_over
from torch_fp8.config import given_config
from torch_fp8.conversion.forward_precision import unscheduled
from torch_fp8.conversion.selection import NothingToConvertError
from torch_fp8.distributed.agreement import check_same_config
from torch_fp8.distributed.ddp.wrap import connect_ddp, ddp_options
from torch_fp8.distributed.fsdp.connect import FSDPReport, connect_fsdp
from torch_fp8.distributed.fsdp.split_weights import (
    join_sharded,
    reshard,
    sharded_modules,
    split_sharded,
)
from torch_fp8.nn.transformer_engine import refuse_sharding
from torch_fp8.ops.one_rank import in_several_ranks
from torch_fp8.optim.convert import gradients_report
from torch_fp8.optim.split_optimizer import adopt_steps

_summaries: "weakref.WeakKeyDictionary[nn.Module, str]" = weakref.WeakKeyDictionary()
"""The last logged summary of each model."""


class FP8Precision(Request):
    """The precision plugin: ``Trainer(plugins=[FP8Precision(FP8Config(...))])``, or in Fabric.

    ``precision="fp8-mixed"`` is the same with the default configuration.

    Args:
        config: the configuration, or None for ``TORCH_FP8_CONFIG``'s, or else ``FP8Config()``.
        options: fields of FP8Config instead of `config`, as in ``FP8Precision(opt_level="O3")``.
    Raises:
        TypeError: `config` is not an FP8Config.
        ValueError: an option or value is not valid, also in ``TORCH_FP8_CONFIG``; both `config` and
            options are given.
    """

    config: FP8Config

    def __init__(self, config: FP8Config | None = None, **options: Any) -> None:
        given = given_config(config, options, "FP8Precision")
        self.config = given or FP8Config.from_env() or FP8Config()
        self.request = {"config": self.config}

    def __repr__(self) -> str:
        return f"FP8Precision({self.config})"


class HostPrecision(FP8Precision):
    """The common part of all hosts' plugins; a ``MixedPrecision`` follows it in their bases."""

    info: ClassVar[Any]
    warn: ClassVar[Any]
    is_of_host = True
    runs_fp8 = False
    """Whether a module with FP8 layers was converted."""
    wrapped: ClassVar[tuple[str, ...]] = ("setup_environment", "load_checkpoint")
    """The methods of the strategy that methods of this class, with an underscore, replace."""

    def __init__(self, config: FP8Config | None = None, **options: Any) -> None:
        super().__init__(config, **options)
        super(Request, self).__init__("bf16-mixed", device="cuda")  # type: ignore[call-arg]
        self.precision = "fp8-mixed"
        self._strategy: Any = None
        self._models: MutableMapping[nn.Module, SetUpModule] = weakref.WeakKeyDictionary()

    def attach(self, strategy: Any, accelerator: Any) -> None:
        """Attach the plugin to `strategy`; called by the connector.

        Raises:
            ValueError: the strategy cannot run FP8 layers, or not those of Transformer Engine.
        """
        for cls in type(strategy).__mro__:
            refuse_strategy(cls.__name__)
        if shards(strategy):
            refuse_sharding(self.config)
        self._strategy = strategy
        # By the class's name, because accelerators have no `name` before Lightning 2.5.
        name = type(accelerator).__name__.removesuffix("Accelerator").lower()
        self.device = name if name in ("cpu", "mps") else "cuda"
        for method in self.wrapped:
            # Only picklable functions, because ddp_spawn pickles the strategy.
            setattr(strategy, method, functools.partial(getattr(self, f"_{method}"), strategy))

    def _setup_environment(self, strategy: Any) -> None:
        """Set up the environment as the strategy does, then compare the ranks' configurations.

        Raises:
            ValueError: ranks have different configurations.
        """
        type(strategy).setup_environment(strategy)
        if getattr(strategy, "world_size", 1) > 1:
            check_same_config(self.config)

    def _load_checkpoint(self, strategy: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load as the strategy does; then adopt step counts from a folder of shards."""
        loaded = type(strategy).load_checkpoint(strategy, path, *args, **kwargs)
        if shards(strategy):
            path = strategy.broadcast(path)
            for converted in self._live():
                adopt_steps(path, converted.optimizers)
        return loaded

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert `module` in place and return it (the DDP strategies ignore the return value).

        Raises:
            ValueError: a Trainer's model has nothing to convert, or the device cannot run the
                recipe.
        """
        device = self._strategy.root_device
        for line in take_over(module, self.config, device, sharded=shards(self._strategy)):
            self.info(f"FP8: {line}")
        report: ConversionReport | str
        try:
            report = convert_to_float8(module, unscheduled(self.config), device=device)
            self.runs_fp8 = True
        except NothingToConvertError as error:
            report = self.leave(error)
        converted = self._models.setdefault(module, SetUpModule(weakref.ref(module), report))
        converted.report = report
        load_scaling_state_dict(module, converted.history)
        return module

    def leave(self, error: NothingToConvertError) -> str:
        """Return why a module is not converted, or refuse it.

        Raises:
            ValueError: the module is the only one of the run.
        """
        raise refusal(error.reason) from None

    def state_dict(self) -> dict[str, Any]:
        """Return the scaling state, delayed scaling's history; all ranks must call it together.

        Returns:
            ``{"scaling": [[state of a model, in the order of set-up], ... for each rank]}``,
            because each rank has seen other data.
        """
        states = [self._history(converted) for converted in self._live()]
        if not any(states):
            return {}
        of_ranks: list[Any] = [states]
        if in_several_ranks():
            of_ranks = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(of_ranks, states)
        return {"scaling": of_ranks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of `state_dict`; all models must be set up already.

        Exact with as many ranks as saved it; otherwise a rank may get another one's history.

        Raises:
            ValueError: the state belongs to other models.
        """
        of_ranks = state_dict.get("scaling")
        if not of_ranks:
            return
        rank = torch.distributed.get_rank() if in_several_ranks() else 0
        states, models = of_ranks[rank % len(of_ranks)], self._live()
        if len(states) != len(models):
            raise ValueError(
                f"FP8 scaling state of {len(states)} model(s), but {len(models)} are set up; set "
                "up the models before loading, in the same order as when it was saved"
            )
        for converted, state in zip(models, states, strict=True):
            report = converted.report
            if isinstance(report, str):
                continue
            if any("amax_history" in key for key in state) and not report.delayed:
                self.warn(
                    "The checkpoint holds the history of FP8Config(recipe='delayed'), which is not "
                    f"used: the recipe is {report.recipe.name!r}"
                )
            load_scaling_state_dict(converted.live, state)

    def teardown(self) -> None:
        """Restore stock models; a model that is set up again continues with its history."""
        for converted in self._live():
            module = converted.live
            converted.history = self._history(converted)
            if isinstance(converted.communication, FSDPReport):
                reshard(module)
                connect_fsdp(module, replace(self.config, communication="off"))
            join_sharded(module, converted.optimizers)
            converted.optimizers.clear()
            revert(module)
        super().teardown()  # type: ignore[misc]

    def _live(self) -> list[SetUpModule]:
        return list(self._models.values())

    def _history(self, converted: SetUpModule) -> dict[str, Tensor]:
        return scaling_state_dict(converted.live) or converted.history

    def main_params(self, optimizer: Optimizer) -> Any:
        """Return the parameters whose gradients to clip; both hosts call this.

        Raises:
            ValueError: gradient release is on, which leaves no gradients to clip.
        """
        if self.config.gradient_release:
            raise ValueError(
                "FP8Config(gradient_release=True) cannot clip gradients: each gradient is used and "
                "freed in backward; leave gradient_release or the clipping out"
            )
        return super().main_params(optimizer)  # type: ignore[misc]

    def _convert_optimizers(
        self, models: Sequence[SetUpModule], optimizers: Sequence[Optimizer]
    ) -> None:
        """Convert optimizers, each of which trains all of `models`."""
        foreign = [type(o).__name__ for o in optimizers if not isinstance(o, Optimizer)]
        if foreign and self.config.opt_level != "O1":
            self.warn(
                f"{foreign[0]} does not derive from torch.optim.Optimizer: its states and weights "
                "stay as they are, as with FP8Config(opt_level='O1')"
            )
        optimizers = [o for o in optimizers if isinstance(o, Optimizer)]
        model = models[0].outer if len(models) == 1 else nn.ModuleList(m.outer for m in models)
        if any(isinstance(p, DTensor) for p in model.parameters()):
            self._split(models, model, optimizers)
            return
        owners = Counter(p for optimizer in optimizers for p in parameters_of(optimizer))
        for optimizer in optimizers:
            shares = any(owners[p] > 1 for p in parameters_of(optimizer))
            if self.config.opt_level != "O1" and shares:
                name, reason = type(optimizer).__name__, "another optimizer has some of its weights"
                report = OptimizerReport(name, False, reason)
            else:
                report = convert_optimizer(optimizer, self.config, model=model)
            for converted in models:
                converted.optimizers[optimizer] = report

    def _split(
        self, models: Sequence[SetUpModule], model: nn.Module, optimizers: Sequence[Optimizer]
    ) -> None:
        """Convert `optimizers`, and split the shards that they train."""
        together = dict.fromkeys([o for m in models for o in m.optimizers] + [*optimizers])
        reports = split_sharded(model, together, self.config)
        for optimizer, report in zip(together, reports, strict=True):
            for converted in models:
                if optimizer in optimizers or optimizer in converted.optimizers:
                    converted.optimizers[optimizer] = report
        for converted in models:
            self._connect_sharded(converted)  # splitting has replaced the shards

    def _connect_sharded(self, converted: SetUpModule) -> None:
        """Connect FSDP2's collectives to FP8 if the model is sharded; may be called repeatedly."""
        if sharded_modules(converted.live):
            converted.communication = connect_fsdp(converted.live, self.config)

    def _wrap(
        self, strategy: Any, converted: SetUpModule, wrap: Callable[[], nn.Module]
    ) -> nn.Module:
        """Wrap the module with `wrap`, a function of `strategy`; for DDP also with our options.

        Raises:
            ValueError: see `ddp_options`.
        """
        if not hasattr(strategy, "_ddp_kwargs"):
            return wrap()
        optimizers = list(converted.optimizers)
        given = strategy._ddp_kwargs
        strategy._ddp_kwargs = ddp_options(converted.live, optimizers, given)
        try:
            wrapped = wrap()
        finally:
            strategy._ddp_kwargs = given
        if isinstance(wrapped, DistributedDataParallel):
            # On the CPU Lightning drops the user's hook; our hook must not replace it there.
            users = getattr(strategy, "_ddp_comm_hook", None)
            reason = None if users is None else f"ddp_comm_hook of {type(strategy).__name__}"
            converted.communication = connect_ddp(wrapped, optimizers, self.config, reason=reason)
        for optimizer, report in converted.optimizers.items():
            converted.optimizers[optimizer] = gradients_report(optimizer, report)
        return wrapped

    def _announce(self, converted: SetUpModule) -> None:
        """Log the start-up summary once per model, on rank zero."""
        if converted.announced:
            return
        converted.announced = True
        of_optimizers = [] if self.config.opt_level == "O1" else converted.optimizers.values()
        summary, module = converted.summary(of_optimizers), converted.live
        if _summaries.get(module) != summary:  # skip what an earlier fit has logged
            _summaries[module] = summary
            self.info(summary)

    def __getstate__(self) -> dict[str, Any]:
        # A spawned process gets the plugin, but not the models converted in this process. Weak
        # dicts cannot be pickled.
        return {**self.__dict__, "_models": {}}


def shards(strategy: Any) -> bool:
    """Return whether the strategy, or the user's ``configure_model``, uses FSDP2."""
    return any(cls.__name__ == "ModelParallelStrategy" for cls in type(strategy).__mro__)
