"""Preparation of models under this engine: conversion, and the start-up summary."""

import contextlib
import functools
import logging
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from types import MethodType
from typing import Any
from weakref import ref

import torch
from accelerate.logging import get_logger
from accelerate.utils import extract_model_from_parallel
from torch import nn

from accelerate_fp8.frozen import EvaluationModels
from accelerate_fp8.history import load_history, save_history
from accelerate_fp8.monitoring import Monitoring
from accelerate_fp8.optimizers import PreparedOptimizers, WeakKeys, bare
from torch_fp8 import ConversionReport, FP8Config, convert_to_float8, revert
from torch_fp8.checkpoint.adopt import take_over
from torch_fp8.conversion.forward_precision import refuse_share, unscheduled
from torch_fp8.conversion.selection import RUNS_IN_FP8, NothingToConvertError
from torch_fp8.distributed.fsdp.connect import connect_fsdp
from torch_fp8.distributed.fsdp.split_weights import sharded_modules
from torch_fp8.nn.layer_filter import is_linear
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.optim.split_optimizer import adopt_steps

LOGGER_NAME = "accelerate_fp8"


class Preparation:
    """One Accelerator's use of the engine: its configuration, and the models that it prepared.

    Attributes:
        config: the configuration, resolved from the script, the environment and the launcher's
            flags.
        optimizers: the prepared optimizers.
        evaluated: the models prepared for evaluation.
        monitoring: the monitors of trained models.
        left: the reason for each model, without wrappers, that was prepared but cannot run in FP8.
        communication: the report on what travels between ranks in FP8, by model.
    """

    def __init__(self, config: FP8Config) -> None:
        self.config = config
        self.optimizers = PreparedOptimizers(config)
        self.evaluated = EvaluationModels(config)
        self.monitoring = Monitoring(config, log_visibly)
        self.communication: MutableMapping[nn.Module, object] = WeakKeys()
        self._reports: MutableMapping[nn.Module, ConversionReport] = WeakKeys()
        self._announced: MutableMapping[nn.Module, None] = WeakKeys()
        self.left: MutableMapping[nn.Module, str] = WeakKeys()
        self._runs_fp8 = self._knows_steps = False
        self._waiting: dict[nn.Module, None] = {}
        self._collecting = False

    def convert(
        self,
        model: nn.Module,
        device: torch.device | None,
        evaluation_mode: bool = False,
        sharded: bool = False,
    ) -> None:
        """Convert `model` in place; a repeated call changes nothing.

        If nothing in the model can run in FP8, it stays unchanged and a line says so, because
        another model of the run may run in FP8, as in a GAN whose critic cannot. `refuse_idle`
        checks that there is one. A module without parameters, such as a criterion, is ignored.

        Models that are prepared for evaluation (reference and reward models, or the trained model
        before training) are converted, too, so that compared models use the same FP8.

        Args:
            model: the model given to ``prepare``; its Parameters stay the same objects.
            device: the device on which it will run, or None for its current device.
            evaluation_mode: whether the model is prepared only for evaluation.
            sharded: whether FSDP2 shards it next.
        Raises:
            ValueError: see `torch_fp8.convert_to_float8`.
        """
        if next(model.parameters(), None) is None:
            return
        inner = extract_model_from_parallel(model, keep_torch_compile=False)
        prepared = "_fp8_prepared" in vars(inner)
        trained = not evaluation_mode
        for line in take_over(model, self.config, device, trained=trained, sharded=sharded):
            log_visibly(f"FP8: {line}")
        if not (prepared and any(isinstance(m, Float8Layer) for m in model.modules())):
            try:
                with _forwards_reachable(model):
                    config = unscheduled(self.config)
                    self._reports[model] = convert_to_float8(model, config, device=device)
            except NothingToConvertError as error:
                if model not in self.left:
                    log_visibly(f"FP8: {type(model).__name__} runs without FP8: {error.reason}")
                self.left[model] = error.reason
        vars(model)["_fp8_prepared"] = True  # also if only its optimizer can split weights
        if model not in self._reports:
            return
        self._runs_fp8 = True
        if evaluation_mode:
            self.evaluated.note(model)
            if model not in self._announced:
                report = self._reports[model]
                total = report.num_converted + len(report.skipped)
                log_visibly(
                    f"FP8: {type(model).__name__}, prepared with evaluation_mode=True: "
                    f"{report.num_converted} of {total} linear layers, recipe {report.recipe.name}"
                )
        elif model not in self._announced:
            self._waiting[model] = None

    def release(self, model: nn.Module) -> None:
        """Restore a stock model in place: classes, hooks and dtypes."""
        if model not in self._reports:
            return
        num_layers = revert(model)
        vars(model).pop("_fp8_prepared", None)
        del self._reports[model]
        self._waiting.pop(model, None)
        log_visibly(
            f"FP8: {type(model).__name__} is a stock model again ({num_layers} layers) and runs in "
            "high precision until you prepare it again"
        )

    def refuse_idle(self) -> None:
        """Refuse to train if no prepared model runs in FP8.

        The first backward calls this, because the models of a run are prepared in any order and in
        several calls of ``prepare``.

        Raises:
            ValueError: none does, and models were left unconverted.
        """
        if self.left and not self._runs_fp8:
            raise ValueError(
                "mixed_precision='fp8', but no prepared model can run in FP8: "
                f"{'; '.join(self.left.values())}. {RUNS_IN_FP8}: prepare a model that has some "
                "before the first backward, or train with mixed_precision='bf16'"
            )

    def serve(self, trainer: Any) -> None:
        """Let a Trainer's steps drive the monitor, and the precision of the last steps."""
        if (self.config.monitor or self.config.bf16_last) and not self._knows_steps:
            from accelerate_fp8.trainer_callback import StepsCallback

            self._knows_steps, self.monitoring.trainer = True, ref(trainer)
            trainer.add_callback(StepsCallback(self))

    def refuse_share(self) -> None:
        """Raise ValueError in the first backward if `bf16_last` is set and no Trainer counts."""
        if not self._knows_steps:
            refuse_share(self.config, "a loop of your own")

    def connect_sharded(
        self, model: nn.Module, sharded: nn.Module, evaluation_mode: bool = False
    ) -> None:
        """Have FSDP2 gather weights and reduce-scatter gradients of a converted model in FP8.

        Args:
            model: the model given to `convert`.
            sharded: the same model after FSDP2 has sharded it.
            evaluation_mode: whether to log the report at once, because no summary follows.
        """
        if model in self._reports and sharded_modules(sharded):
            report = self.communication[model] = connect_fsdp(sharded, self.config)
            if evaluation_mode:
                name = type(model).__name__.removeprefix("FSDP")
                log_visibly(f"FP8: {name}, prepared with evaluation_mode=True: {report}")

    def save(
        self, models: Sequence[nn.Module], folder: str, process_index: int, is_main: bool
    ) -> None:
        """Add to a checkpoint's folder what stock hosts don't save: histories and monitors."""
        save_history(models, folder, process_index)
        self.monitoring.save(folder, is_main)

    def load(
        self, models: Sequence[nn.Module], optimizers: Iterable[Any], folder: str, index: int
    ) -> None:
        """Load the result of `save`, and step counts from a folder of shards.

        Args:
            models, optimizers: those of the checkpoint, in order.
            folder: the checkpoint.
            index: the index of this process among all.
        """
        load_history(models, folder, index)
        if any(map(sharded_modules, models)):  # the hosts do not load step counts of shards
            adopt_steps(folder, map(bare, optimizers))
        self.monitoring.load(folder)

    @contextlib.contextmanager
    def collected(self, accelerator: Any) -> Iterator[None]:
        """Log the summaries of models converted in this context at its end."""
        outermost, self._collecting = not self._collecting, True
        try:
            yield
            if outermost:
                # transformers prepares a model that it has sharded itself for evaluation, but
                # then trains it.
                for model in self._reports:
                    trained_by = self.optimizers.that_train(accelerator, model)
                    if trained_by and model not in self._announced:
                        self._waiting[model] = None
                for model in self._waiting:
                    self._announced[model] = None
                    optimizers = self.optimizers.that_train(accelerator, model)
                    reports = [self.optimizers.announce(accelerator, o) for o in optimizers]
                    communication = self.communication.get(model)
                    report = self._reports[model]
                    summary = report.summary(model, optimizers, reports, communication)
                    name = type(model).__name__.removeprefix("FSDP")
                    log_visibly(summary.replace("\n", f"\n  model     {name}\n", 1))
                for line in self.optimizers.take_unannounced(accelerator):
                    log_visibly(f"FP8: optimizer {line}")
                frozen = self.evaluated.freeze(self.optimizers.all_of(accelerator))
                for model, stored in frozen.items():
                    log_visibly(f"FP8: {type(model).__name__}, which no optimizer trains: {stored}")
                shared = self.evaluated.share(self._announced) if frozen or self._waiting else None
                if shared is not None:
                    log_visibly(f"FP8: {shared}")
                for model in list(self._announced) if self.config.monitor else ():
                    trained_by = self.optimizers.that_train(accelerator, model)
                    ddp = functools.partial(self.optimizers.wrapped, model)
                    self.monitoring.attach(accelerator, model, trained_by, ddp)
        finally:
            if outermost:
                self._waiting, self._collecting = {}, False


def log_visibly(message: str) -> None:
    """Log at INFO on the main process so that the message is visible by default.

    Python hides messages below WARNING by default, and few training scripts configure logging; yet
    a message that FP8 runs, or where it does not, is no warning. So the level of this package's
    logger is INFO if no level is set, and a message that would reach no handler goes to stderr. To
    silence it, use ``logging.getLogger("accelerate_fp8").setLevel(logging.WARNING)``, a root level
    above WARNING, or ``ACCELERATE_LOG_LEVEL=warning``.
    """
    logger = get_logger(LOGGER_NAME)
    own = logger.logger
    if own.level == logging.NOTSET and logging.root.level <= logging.WARNING:
        own.setLevel(logging.INFO)
    handler = logging.StreamHandler()
    if not own.hasHandlers():
        own.addHandler(handler)
    try:
        logger.info(message)
    finally:
        own.removeHandler(handler)


@contextlib.contextmanager
def _forwards_reachable(model: nn.Module) -> Iterator[None]:
    """Expose the linear layers under Accelerate's hooks (``device_map``) during conversion.

    A hook stores the bound ``forward`` of the module's class in ``_old_forward`` and sets its own
    on the instance, so it would not notice a new class. Afterwards the hook calls the new class's
    forward.
    """
    hooked = [
        module
        for module in model.modules()
        if is_linear(module)
        and getattr(vars(module).get("_old_forward"), "__func__", None) is type(module).forward
    ]
    forwards = [module.__dict__.pop("forward") for module in hooked]
    try:
        yield
    finally:
        for module, forward in zip(hooked, forwards, strict=True):
            module.__dict__["_old_forward"] = MethodType(type(module).forward, module)
            module.__dict__["forward"] = forward
