"""The models of a run, built on the meta device, converted by this package, and sharded."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW

from torch_fp8.conversion.convert import convert_to_float8
from torch_fp8.conversion.forward_precision import unscheduled
from torch_fp8.distributed.fsdp.connect import connect_fsdp
from torch_fp8.distributed.fsdp.split_weights import split_sharded
from torch_fp8.optim.convert import convert_optimizer
from torch_fp8_tools.host_models import imported
from torch_fp8_tools.plan.layouts import blocks_of, split_for_tensor_parallel
from torch_fp8_tools.plan.setup import BF16, Setup


def make_model(setup: Setup, level: str, layers: Sequence[int]) -> nn.Module:
    """Build a model of a run in the dtype in which it is loaded, converted at a level.

    BF16-mixed keeps trained weights in float32, and those of a frozen base in BF16.

    Args:
        setup: the planned run.
        level: one of `torch_fp8_tools.plan.setup.LEVELS`.
        layers: the layers to keep.
    """
    model: Any = setup.layers.model(layers)
    split_for_tensor_parallel(model, setup.config, setup.tensor)
    if setup.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if setup.method == "lora":
        peft = imported("peft", "peft creates LoRA's adapters")
        adapters = peft.LoraConfig(r=setup.rank, target_modules="all-linear")
        model = peft.get_peft_model(model.to(torch.bfloat16), adapters, low_cpu_mem_usage=True)
    if level != BF16:
        convert_to_float8(model, unscheduled(setup.fp8_config(level)), device="cpu")
    return model


def prepare(model: nn.Module, setup: Setup, level: str, mesh: DeviceMesh | None) -> list[AdamW]:
    """Shard a model with FSDP2, and return an AdamW, converted at a level."""
    if mesh is not None:
        shard(model, mesh)
    config = None if level == BF16 else setup.fp8_config(level)
    optimizers = [AdamW([p for p in model.parameters() if p.requires_grad])]
    if config is not None and config.opt_level != "O1":
        if mesh is None:
            convert_optimizer(optimizers[0], config, model=model)
        else:
            split_sharded(model, optimizers, config)
    if config is not None and mesh is not None:
        connect_fsdp(model, config)
    return optimizers


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Apply ``fully_shard`` to the blocks and to the whole model, with BF16 compute."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for module in (*blocks_of(model), model):
        fully_shard(module, mesh=mesh, mp_policy=policy)


@contextlib.contextmanager
def fake_ranks(number: int) -> Iterator[DeviceMesh | None]:
    """Enter a process group of `number` ranks as rank 0; collectives move nothing.

    Yields:
        The mesh of all ranks, or None for one rank, which needs no group.
    Raises:
        ValueError: this process already is in a process group.
    """
    if number == 1:
        yield None
        return
    if dist.is_initialized():
        raise ValueError(
            "this process is already in a torch.distributed process group, and planning for "
            "several GPUs needs its own: plan before init_process_group, or in another process"
        )
    dist.init_process_group("fake", rank=0, world_size=number)
    try:
        yield init_device_mesh("cpu", (number,))
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def grouped_in_bf16() -> Iterator[None]:
    """Run grouped GEMMs in BF16, as autocast would if it supported them.

    With float32 weights stock experts compute in float32, which is no useful baseline for FP8.
    """
    grouped_mm = torch._grouped_mm  # the operator behind F.grouped_mm

    def in_bf16(*args: Any, **kwargs: Any) -> Tensor:
        wide = [isinstance(x, Tensor) and x.dtype == torch.float32 for x in args]
        lowered = (x.bfloat16() if is_wide else x for x, is_wide in zip(args, wide, strict=True))
        return grouped_mm(*lowered, **kwargs)

    with patch.object(torch, "_grouped_mm", in_bf16):
        yield


@contextlib.contextmanager
def unpadded_rows() -> Iterator[None]:
    """Let transformers make the masks that rows of one sequence each, without padding, need.

    It reads position ids and padding masks for that. Fake tensors have no values to read, so it
    would make a causal mask where such rows have none, and repeat grouped keys and values for it.
    """
    transformers = imported("transformers", "transformers builds models")
    masks = getattr(transformers, "masking_utils", None)
    arguments_of = getattr(masks, "_preprocess_mask_arguments", None)
    if arguments_of is None:  # the masks of another version are counted as it makes them
        yield
        return

    def unpadded(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        is_mask, mask, _, *sizes = arguments_of(*args, **kwargs)
        return is_mask, mask if is_mask else None, None, *sizes

    with patch.object(masks, "_preprocess_mask_arguments", unpadded):
        yield
