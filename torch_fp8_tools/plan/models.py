"""The models of a run, built on the meta device and converted by this package."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW

from torch_fp8.conversion.convert import convert_to_float8
from torch_fp8.conversion.freeze import freeze
from torch_fp8.distributed.fsdp.connect import connect_fsdp
from torch_fp8.distributed.fsdp.split_weights import split_sharded
from torch_fp8.optim.convert import convert_optimizer
from torch_fp8_tools.host_models import imported
from torch_fp8_tools.plan.layouts import blocks_of, build, num_layers, split_for_tensor_parallel
from torch_fp8_tools.plan.setup import BF16, JUDGES, TRAINED, Setup


def make_model(setup: Setup, role: str, level: str, *, layers: int | None = None) -> nn.Module:
    """Build a model of a run in the dtype in which it is loaded, converted at a level.

    BF16-mixed keeps trained weights in float32, and those of a frozen model or base in BF16.

    Args:
        setup: the planned run.
        role: one of `torch_fp8_tools.plan.setup.ROLES`.
        level: one of `torch_fp8_tools.plan.setup.LEVELS`.
        layers: the number of its layers; None: all.
    """
    model = build(setup.config, num_layers=layers, judges=role in JUDGES)
    split_for_tensor_parallel(model, setup.config, setup.tensor)
    if setup.checkpointing and role in TRAINED:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if role not in TRAINED:
        model.requires_grad_(False).to(torch.bfloat16)
    elif setup.method == "lora":
        model = _adapted(model.to(torch.bfloat16), setup.rank)
    if level == BF16:
        return model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = setup.fp8_config(level)
        if role in TRAINED or level == "O1":
            convert_to_float8(model, config, device="cpu")
        else:
            freeze(model, config, device="cpu")
    return model


def optimizers_of(model: nn.Module, setup: Setup, role: str, level: str) -> list[AdamW]:
    """Return an AdamW, converted at a level, for a model; none if the model is frozen."""
    optimizers = _optimizers(model, role)
    for optimizer in optimizers if level not in (BF16, "O1") else ():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            convert_optimizer(optimizer, setup.fp8_config(level), model=model)
    return optimizers


def sharded(
    model: nn.Module, setup: Setup, role: str, level: str, mesh: DeviceMesh | None
) -> list[AdamW]:
    """Shard a model with FSDP2, block by block; return its optimizers as `optimizers_of` does."""
    if mesh is None:
        return optimizers_of(model, setup, role, level)
    shard(model, mesh)
    optimizers = _optimizers(model, role)
    if optimizers and level not in (BF16, "O1"):
        split_sharded(model, optimizers, setup.fp8_config(level))
    connect(model, setup, level)
    return optimizers


def _optimizers(model: nn.Module, role: str) -> list[AdamW]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [AdamW(trained)] if role in TRAINED else []


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Apply ``fully_shard`` to the blocks and to the whole model, with BF16 compute."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for module in (*blocks_of(model), model):
        fully_shard(module, mesh=mesh, mp_policy=policy)


def connect(model: nn.Module, setup: Setup, level: str) -> None:
    """Connect FSDP2's collectives to FP8, as the level requires."""
    if level != BF16:
        connect_fsdp(model, setup.fp8_config(level))


def stages(setup: Setup) -> list[tuple[str, int]]:
    """Return the kinds of pipeline stages that can be the fullest, with their number of layers."""
    total = num_layers(setup.config)
    if setup.pipeline == 1:
        return [("whole", total)]
    most = -(-total // setup.pipeline)
    return [("first", most), ("last", total - most * (setup.pipeline - 1) or most)]


@contextlib.contextmanager
def only_stage(model: Any, stage: str) -> Iterator[None]:
    """Leave out the output layer of a first stage, or the embedding of a last one, while counting.

    A tied weight is in both stages.
    """
    base = getattr(model, "base_model", model)
    hidden = {
        "first": [(base, "norm"), (model, "lm_head"), (model, "score")],
        "last": [(base, "embed_tokens"), (base, "embed_in")],
    }.get(stage, [])
    tied = model.get_input_embeddings().weight is getattr(
        model.get_output_embeddings(), "weight", None
    )
    taken = []
    for owner, name in hidden:
        if not tied and isinstance(getattr(owner, name, None), nn.Module):
            taken.append((owner, name, getattr(owner, name)))
            setattr(owner, name, nn.Identity())
    try:
        yield
    finally:
        for owner, name, module in taken:
            setattr(owner, name, module)


def _adapted(model: nn.Module, rank: int) -> nn.Module:
    peft = imported("peft", "LoRA's adapters are made by peft")
    config = peft.LoraConfig(r=rank, target_modules="all-linear")
    adapted: nn.Module = peft.get_peft_model(model, config, low_cpu_mem_usage=True)
    return adapted
