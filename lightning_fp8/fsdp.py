"""`FP8FSDPStrategy`: FSDP2 for models without their own sharding code, in Trainer and Fabric.

As with `lightning_fp8.FP8Precision`, the user's object is only a request. The connector that
receives it calls `Request.for_host` for the strategy of its own copy of Lightning, a
subclass of that copy's ``ModelParallelStrategy``.

The strategy shards each transformer block, and the rest of each root, which is a module that is
called as a whole. They compute in BF16 and keep float32 weights in shards, stored in two halves at
O2 and O3.

As under ``bf16-mixed``, the values between layers are float32. FSDP2 gathers all weights of a block
in BF16. Linear layers are autocast anyway, but an embedding's output has the weight's dtype, so the
residual stream would be BF16 and its sums would lose bits. `keep_stream` adds hooks that prevent
this; inputs are not cast.
"""

import sys
from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import partialmethod
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.optim import Optimizer

from lightning_fp8._register import Request
from lightning_fp8.blocks import find_blocks, find_roots
from torch_fp8.distributed.fsdp.split_weights import reshard
from torch_fp8.optim.embedding_dtype import Hook, hide_weights, keep_output_dtype


class FP8FSDPStrategy(Request):
    """FSDP2 in FP8: ``Trainer(strategy=FP8FSDPStrategy(), precision="fp8-mixed")``, or in Fabric.

    The LightningModule needs no ``configure_model``. All devices form one data-parallel group; for
    tensor parallelism use ``ModelParallelStrategy``.

    Args:
        blocks: classes or their names, each of whose modules is sharded as a unit, or None if
            blocks are found by structure, see `lightning_fp8.blocks.find_blocks`.
        reshard_after_forward: whether a block is freed after forward and gathered again in
            backward. False needs memory for the whole BF16 or FP8 model, and saves a gather.
        cpu_offload: whether shards, gradients and optimizer states are kept in CPU memory.
        save_distributed_checkpoint: whether a checkpoint is a folder with the shards of each rank;
            if False, it is one file with the full weights.
        process_group_backend: the backend of the process group, or None for the device's default.
        timeout: the timeout of collectives, or None for torch's default.
    """

    def __init__(
        self,
        blocks: Sequence[str] | None = None,
        reshard_after_forward: bool = True,
        cpu_offload: bool = False,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        if isinstance(blocks, str):
            raise TypeError(f"blocks takes a sequence of class names, got {blocks!r}")
        self.blocks = blocks
        self.reshard_after_forward = reshard_after_forward
        self.cpu_offload = cpu_offload
        self.of_host: dict[str, Any] = {
            "save_distributed_checkpoint": save_distributed_checkpoint,
            "process_group_backend": process_group_backend,
            **({} if timeout is None else {"timeout": timeout}),
        }
        own = {n: vars(self)[n] for n in ("blocks", "reshard_after_forward", "cpu_offload")}
        self.request = own | self.of_host


def register_as_strategy() -> None:
    """Register `FP8FSDPStrategy` as a strategy of the imported Trainers.

    LightningCLI requires a subclass of Strategy before any Trainer can replace the request.
    """
    for host in ("lightning.pytorch", "pytorch_lightning"):
        module = sys.modules.get(f"{host}.strategies.strategy")
        if module is not None:
            module.Strategy.register(FP8FSDPStrategy)


class HostStrategy(FP8FSDPStrategy):
    """The common part of all hosts' strategies, a mixin before ``ModelParallelStrategy``."""

    is_of_host = True
    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return an attribute of ModelParallelStrategy."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        own = {"parallelize_fn": self._parallelize} if isinstance(self, FabricStrategy) else {}
        super(Request, self).__init__(**self.of_host, **own)

    def setup_environment(self) -> None:
        """Set up as the host does, with all processes in one data-parallel group."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        self._tensor_parallel_size = 1
        super().setup_environment()  # type: ignore[misc]

    def shard(self, model: nn.Module, roots: Sequence[nn.Module]) -> None:
        """Apply ``fully_shard`` to the model's blocks and roots that are not sharded yet.

        Raises:
            ValueError: no module has a class in ``blocks``.
        """
        if any(isinstance(root, FSDPModule) for root in roots):  # from an earlier set-up
            reshard(model)
            keep_stream(model)
            return
        blocks = find_blocks(model, self.blocks)
        if not blocks:
            self.warn(
                f"FP8FSDPStrategy found no repeated blocks in {type(model).__name__}: the whole "
                "model is gathered at once. Name the classes to shard: "
                "FP8FSDPStrategy(blocks=('MyBlock',))"
            )
        offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        options: dict[str, Any] = {
            "mesh": self.device_mesh["data_parallel"],
            # Gathers and reduces in BF16; torch 2.15 would reduce in float32 by default.
            "mp_policy": MixedPrecisionPolicy(
                torch.bfloat16, torch.bfloat16, cast_forward_inputs=False
            ),
            "offload_policy": offload if self.cpu_offload else OffloadPolicy(),
        }
        for block in reversed(blocks):
            if not isinstance(block, FSDPModule):
                fully_shard(block, reshard_after_forward=self.reshard_after_forward, **options)
        for root in roots:
            if not isinstance(root, FSDPModule):
                fully_shard(root, **options)
        keep_stream(model)


class TrainerStrategy(HostStrategy):
    """The part of the Trainer's strategies."""

    def setup(self, trainer: Any) -> None:
        """Shard the model, then set up as the host does with a model that its user has sharded.

        Raises:
            ValueError: a LightningModule that is its own root uses manual optimization; a callback
                averages weights.
        """
        module = self.lightning_module
        _refuse_averaging(trainer.callbacks)
        roots = find_roots(module)
        if roots == [module] and not module.automatic_optimization:
            raise ValueError(
                f"{type(module).__name__} holds parameters or lists of layers directly, so "
                "FP8FSDPStrategy gathers them around training_step; with manual optimization, move "
                "them into a module with a forward, self.model = ..."
            )
        self.shard(module, roots)
        # The host requires that the user overrides this hook; if so, it has already been called.
        own = vars(module).get("configure_model")
        module.configure_model = own or _sharded
        try:
            super().setup(trainer)  # type: ignore[misc]
        finally:
            if own is None:
                del module.configure_model

    def model_to_device(self) -> None:
        """Move the model as the host does, but leave offloaded shards on the CPU."""
        if not self.cpu_offload:
            super().model_to_device()  # type: ignore[misc]
            return
        module = self.lightning_module
        for child in module.children():
            if not isinstance(child, FSDPModule):
                child.to(self.root_device)

    def _step(self, name: str, context: str, *args: Any, **kwargs: Any) -> Any:
        """Step as the host does, through the hooks of a LightningModule that is its own root."""
        module = self.lightning_module
        if not isinstance(module, FSDPModule):
            return getattr(super(), name)(*args, **kwargs)
        with getattr(self.precision_plugin, context)():
            return self._forward_redirection(module, module, name, *args, **kwargs)

    training_step = partialmethod(_step, "training_step", "train_step_context")
    validation_step = partialmethod(_step, "validation_step", "val_step_context")
    test_step = partialmethod(_step, "test_step", "test_step_context")
    predict_step = partialmethod(_step, "predict_step", "predict_step_context")


class FabricStrategy(HostStrategy):
    """The part of Fabric's strategies."""

    def _parallelize(self, module: nn.Module, _: Any) -> nn.Module:
        self.shard(module, [module])
        return module

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], *scheduler: Any
    ) -> tuple[Any, ...]:
        """Shard the module, and give its optimizers the new parameters.

        Raises:
            ValueError: an optimizer already has states of whole parameters.
        """
        for optimizer in optimizers:
            if optimizer.state:
                raise ValueError(
                    f"{type(optimizer).__name__} has states of parameters that are not sharded "
                    "yet; set it up before its first step and before its checkpoint is loaded"
                )
        names = dict(module.named_parameters(remove_duplicate=False))
        sharded = self.setup_module(module)
        new = {names[n]: p for n, p in sharded.named_parameters(remove_duplicate=False)}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [new.get(p, p) for p in group["params"]]
        return sharded, [self.setup_optimizer(o) for o in optimizers], *(scheduler or (None,))


def _refuse_averaging(callbacks: Iterable[Any]) -> None:
    """Raise ValueError for EMA and SWA, which copy the model before it is sharded."""
    for callback in callbacks:
        names = {cls.__name__ for cls in type(callback).__mro__}
        if names & {"WeightAveraging", "StochasticWeightAveraging"}:
            raise ValueError(
                f"{type(callback).__name__} averages whole weights, but FP8FSDPStrategy shards "
                "them; leave it out, or use strategy='ddp'"
            )


def _sharded() -> None:
    """A placeholder for ``configure_model`` while the host checks that it is overridden."""


def host_classes(module: str, host: str) -> tuple[Any, Any]:
    """Return a copy of Lightning's `FP8Precision` and `FP8FSDPStrategy`, which have its bases.

    Args:
        module: the name of the module that has the two classes.
        host: the package of the host, such as ``lightning.fabric``. It decides between
            `lightning_fp8.fabric.FabricPrecision` and `lightning_fp8.trainer.TrainerPrecision`.
    """
    name = "fabric" if host.endswith("fabric") else "trainer"
    strategy = FabricStrategy if name == "fabric" else TrainerStrategy
    precision = getattr(import_module(f"lightning_fp8.{name}"), f"{name.title()}Precision")
    mixed = import_module(f"{host}.plugins.precision").MixedPrecision
    parallel = import_module(f"{host}.strategies").ModelParallelStrategy
    zero = import_module(f"{host}.utilities.rank_zero")
    body = {"__module__": module, "warn": staticmethod(zero.rank_zero_warn)}
    body["info"] = staticmethod(zero.rank_zero_info)
    bases = {"FP8Precision": (precision, mixed), "FP8FSDPStrategy": (strategy, parallel)}
    ours, theirs = (
        type(name, own, {**body, "__doc__": f"`lightning_fp8.{name}` for ``{host}``."})
        for name, own in bases.items()
    )
    return ours, theirs


class Float32Weights(Hook):
    """A forward pre-hook that gives a norm float32 copies of the BF16 weights that FSDP2 gathers.

    Batch and instance norms need weights in the dtype of their running statistics. On the CPU all
    norms refuse a float32 input with BF16 weights; on CUDA autocast casts those of the others.
    """

    def __call__(self, module: nn.Module, args: Any) -> None:
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.dtype != torch.bfloat16:
                continue
            if parameter.device.type == "cpu" or hasattr(module, "running_mean"):
                # The attribute hides the Parameter of this name, which stays where it is.
                module.__dict__[name] = parameter.float()


def keep_stream(model: nn.Module) -> None:
    """Add hooks to embeddings and norms, which `torch_fp8.revert` removes.

    A repeated call changes nothing.
    """
    keep_output_dtype(model, set(model.parameters()))
    for module in model.modules():
        # running_mean: batch and instance norms, whose common base class is not public in torch.
        if isinstance(module, (nn.LayerNorm, nn.GroupNorm)) or hasattr(module, "running_mean"):
            hide_weights(module, Float32Weights())
