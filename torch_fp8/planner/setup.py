"""`Setup`: the run to plan, checked for contradictions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch_fp8.config import FP8Config
from torch_fp8.ops.hardware import check_card
from torch_fp8.planner.cards import Card, card_named
from torch_fp8.planner.layouts import layers_alike, num_layers, read_config
from torch_fp8.quantization.argument_types import check_arguments
from torch_fp8.quantization.recipe import RECIPES
from torch_fp8.quantization.suggestions import suggestion

BF16 = "bf16-mixed"
LEVELS = (BF16, "O1", "O2", "O3")
METHODS = ("full", "lora", "rlhf")
ROLES = ("policy", "value", "reference", "reward")
"""The models of RLHF; the first two are trained, the others only evaluated."""
TRAINED = ("policy", "value")
JUDGES = ("value", "reward")
"""The models whose head returns one number."""
DEFAULT_SKIP = FP8Config().skip
_AUTO = "tensorwise"
"""The recipe planned for ``auto``, which needs a GPU to measure."""


@dataclass(frozen=True)
class Setup:
    """A training run to plan.

    Attributes:
        config: the configuration of the Hugging Face model.
        name: the user's name for it; for a path its last part.
        card: the GPU.
        gpus: the number of GPUs, the product of the four degrees.
        memory: the memory of each GPU, GiB.
        sequence: the tokens of a sequence.
        micro_batch: the sequences in one forward of a GPU.
        accumulate: the micro-batches of a step.
        data, fsdp, tensor, pipeline: the degrees of replication, of FSDP2 sharding, and of tensor
            and pipeline parallelism.
        recipe: the FP8 recipe; ``tensorwise`` for ``auto``.
        recipe_is_auto: whether the user chose no recipe.
        checkpointing: whether layers use activation checkpointing.
        method: ``full``, ``lora`` or ``rlhf``.
        roles: the models of ``rlhf`` that exist.
        rank: the rank of LoRA adapters.
        skip: patterns of modules that stay in BF16 in addition to the default ones.
    """

    config: Any
    name: str
    card: Card
    gpus: int
    memory: float
    sequence: int
    micro_batch: int
    accumulate: int
    data: int
    fsdp: int
    tensor: int
    pipeline: int
    recipe: str
    recipe_is_auto: bool
    checkpointing: bool
    method: str
    roles: tuple[str, ...]
    rank: int
    skip: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """The tokens of a micro-batch."""
        return self.sequence * self.micro_batch

    @cached_property
    def layers_alike(self) -> bool:
        """Whether all layers of the model hold the same."""
        return layers_alike(self.config)

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients persist between micro-batches, or in DDP's buckets."""
        return self.accumulate > 1 or self.pipeline > 1 or (self.data > 1 and self.fsdp == 1)

    def fp8_config(self, level: str) -> FP8Config:
        """Return the configuration of a level."""
        return FP8Config(
            recipe=self.recipe,
            opt_level=level,
            skip=(*DEFAULT_SKIP, *self.skip),
        )


def make_setup(
    model: Any,
    *,
    gpus: int = 1,
    card: str = "h100",
    memory: float | None = None,
    sequence: int | None = None,
    micro_batch: int = 1,
    accumulate: int = 1,
    data: int | None = None,
    fsdp: int | None = None,
    tensor: int = 1,
    pipeline: int = 1,
    recipe: str = "auto",
    checkpointing: bool = False,
    method: str = "full",
    roles: Sequence[str] | str = ROLES,
    rank: int = 16,
) -> Setup:
    """Check the arguments of `torch_fp8.plan` and fill in the defaults.

    Raises:
        ValueError, TypeError, ImportError: see `torch_fp8.plan`.
    """
    check_arguments(make_setup, locals(), "plan")
    config = read_config(model)
    chosen = card_named(card)
    counts = {
        "gpus": gpus, "micro_batch": micro_batch, "accumulate": accumulate,
        "tensor": tensor, "pipeline": pipeline, "rank": rank,
    }  # fmt: skip
    given = {"data": data, "fsdp": fsdp, "sequence": sequence}
    counts |= {name: value for name, value in given.items() if value is not None}
    for name, value in counts.items():
        if not 1 <= value < 2**31:
            raise ValueError(f"{name} must be at least 1 and below 2**31, got {value}")
    memory = chosen.memory if memory is None else memory
    if not 0 < memory < math.inf:
        raise ValueError(f"memory must be finite and above 0 GiB, got {memory}")
    if data is None:
        data = max(gpus // (fsdp * tensor * pipeline), 1) if fsdp is not None else 1
    others = data * tensor * pipeline
    if fsdp is None:
        if gpus % others:
            raise ValueError(
                f"data={data} x tensor={tensor} x pipeline={pipeline} do not divide the {gpus} GPUs"
            )
        fsdp = gpus // others
    if fsdp * others != gpus:
        raise ValueError(
            f"data={data} x fsdp={fsdp} x tensor={tensor} x pipeline={pipeline} are "
            f"{fsdp * others} GPUs, but gpus={gpus}"
        )
    if pipeline > num_layers(config):
        raise ValueError(
            f"pipeline={pipeline} has more stages than the model has layers, {num_layers(config)}"
        )
    _check_choice("recipe", recipe, ("auto", *RECIPES))
    check_card(chosen.name, chosen.capability, _AUTO if recipe == "auto" else recipe)
    _check_choice("method", method, METHODS)
    if isinstance(roles, str):
        roles = (roles,)
    for role in roles:
        _check_choice("roles", role, ROLES)
    if method == "rlhf" and "policy" not in roles:
        raise ValueError("roles: RLHF trains a policy; add it to the roles")
    if pipeline > 1:
        accumulate = max(accumulate, pipeline)  # so that each stage has a micro-batch
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if sequence is not None and isinstance(positions, int) and sequence > positions:
        raise ValueError(f"sequence={sequence} is longer than the model's {positions} positions")
    return Setup(
        config=config,
        name=Path(model).resolve().name
        if isinstance(model, (str, Path))
        else type(config).__name__,
        card=chosen,
        gpus=gpus,
        memory=float(memory),
        sequence=min(4096, positions or 4096) if sequence is None else sequence,
        micro_batch=micro_batch,
        accumulate=accumulate,
        data=data,
        fsdp=fsdp,
        tensor=tensor,
        pipeline=pipeline,
        recipe=_AUTO if recipe == "auto" else recipe,
        recipe_is_auto=recipe == "auto",
        checkpointing=checkpointing,
        method=method,
        roles=tuple(dict.fromkeys(roles)) if method == "rlhf" else ("policy",),
        rank=rank,
    )


def _check_choice(name: str, value: Any, valid: tuple[str, ...]) -> None:
    if value not in valid:
        hint = suggestion(value, valid)
        raise ValueError(f"{name}={value!r} is unknown; one of {', '.join(valid)}{hint}")
