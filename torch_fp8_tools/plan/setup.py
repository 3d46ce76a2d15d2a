"""`Setup`: the run to plan on a card."""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch_fp8.config import FP8Config
from torch_fp8.quantization.argument_types import check_arguments
from torch_fp8.quantization.recipe import RECIPES
from torch_fp8.quantization.wording import check_choice
from torch_fp8_tools.plan.layers import Layers
from torch_fp8_tools.plan.layouts import read_config, text_of

BF16 = "bf16-mixed"
LEVELS = (BF16, "O1", "O2", "O3")
METHODS = ("full", "lora")
_DEGREES = ("data", "fsdp", "tensor")
_AUTO = "tensorwise"
"""The recipe planned for ``auto``, which needs a GPU to measure."""


@dataclass(frozen=True)
class Card:
    """A GPU.

    Attributes:
        name: the common name.
        capability: the CUDA compute capability.
        memory: the size of its memory, GiB.
        source: the page with these numbers; those of H100 and H200 are the SXM module's.
    """

    name: str
    capability: tuple[int, int]
    memory: float
    source: str


_NVIDIA = "https://www.nvidia.com/en-us/data-center/"
CARDS = {
    card.name: card
    for card in (
        Card("h100", (9, 0), 80, _NVIDIA + "h100/"),
        Card("h200", (9, 0), 141, _NVIDIA + "h200/"),
        Card("b200", (10, 0), 180, _NVIDIA + "dgx-b200/"),
        Card("l40s", (8, 9), 48, _NVIDIA + "l40s/"),
        Card("rtx-4090", (8, 9), 24, "NVIDIA Ada GPU architecture whitepaper, appendix A"),
    )
}
_WITHOUT_FP8 = {
    **{"v100": (7, 0), "t4": (7, 5), "a100": (8, 0)},
    **{"a10": (8, 6), "a40": (8, 6), "a6000": (8, 6), "rtx-3090": (8, 6)},
}


def card_for(name: str, recipe: str) -> Card:
    """Return a card by its name, in any case.

    Raises:
        ValueError: the card is unknown, or cannot run the recipe.
    """
    from torch_fp8.ops.hardware import check_card  # ``torch-fp8 --help`` needs no operators

    key = str(name).lower()
    if key in _WITHOUT_FP8:
        check_card(str(name), _WITHOUT_FP8[key], recipe)
    check_choice("card", key, CARDS)
    check_card(key, CARDS[key].capability, recipe)
    return CARDS[key]


class Setup:
    """A training run to plan, checked for contradictions.

    Args:
        model, gpus, card, memory, sequence, micro_batch, accumulate, data, fsdp, tensor, pipeline,
            recipe, checkpointing, method, rank: see `torch_fp8.plan`.
    Attributes:
        config: the configuration of the Hugging Face model.
        name: the user's name for it; for a path its last part.
        card: the GPU.
        recipe: the FP8 recipe; ``tensorwise`` for ``auto``.
        recipe_is_auto: whether the user chose no recipe.
    Raises:
        ValueError, TypeError, ImportError: see `torch_fp8.plan`.
    """

    def __init__(
        self,
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
        rank: int = 16,
    ) -> None:
        options = locals()
        check_arguments(Setup.__init__, options, "plan")
        config = read_config(model)
        check_choice("recipe", recipe, ("auto", *RECIPES))
        planned = _AUTO if recipe == "auto" else recipe
        chosen = card_for(card, planned)
        for name in (*_DEGREES, "gpus", "micro_batch", "accumulate", "rank", "sequence"):
            if options[name] is not None and not 1 <= options[name] < 2**31:
                raise ValueError(f"{name} must be at least 1 and below 2**31, got {options[name]}")
        memory = chosen.memory if memory is None else memory
        if not 0 < memory < math.inf:
            raise ValueError(f"memory must be finite and above 0 GiB, got {memory}")
        if data is None:
            data = max(gpus // (fsdp * tensor), 1) if fsdp is not None else 1
        others = data * tensor
        if fsdp is None and gpus % others:
            raise ValueError(f"data={data} x tensor={tensor} do not divide the {gpus} GPUs")
        fsdp = fsdp or gpus // others
        if fsdp * others != gpus:
            raise ValueError(
                f"data={data} x fsdp={fsdp} x tensor={tensor} are {fsdp * others} GPUs, but "
                f"gpus={gpus}"
            )
        text = text_of(config)
        if pipeline != 1:
            raise ValueError(
                "pipeline is no longer planned: plan the layers of one stage, with its share of "
                "the GPUs"
            )
        if method == "rlhf":
            raise ValueError(
                "method='rlhf' is no longer planned: plan each trained model, and add a byte for "
                "each parameter of a frozen one"
            )
        check_choice("method", method, METHODS)
        positions = getattr(text, "max_position_embeddings", None)
        if sequence is not None and isinstance(positions, int) and sequence > positions:
            raise ValueError(
                f"sequence={sequence} is longer than the model's {positions} positions"
            )
        is_named = isinstance(model, (str, Path))
        self.name = Path(model).resolve().name if is_named else type(config).__name__
        self.gpus, self.memory = gpus, float(memory)
        self.sequence, self.micro_batch = sequence or min(4096, positions or 4096), micro_batch
        self.accumulate = accumulate
        self.data, self.fsdp, self.tensor = data, fsdp, tensor
        self.recipe, self.checkpointing, self.method = planned, checkpointing, method
        self.rank = rank
        self.config, self.card, self.recipe_is_auto = config, chosen, recipe == "auto"

    @property
    def tokens(self) -> int:
        """The tokens of a micro-batch."""
        return self.sequence * self.micro_batch

    @cached_property
    def layers(self) -> Layers:
        """The layers of the model."""
        return Layers(self.config)

    def fp8_config(self, level: str) -> FP8Config:
        """Return the configuration of a level."""
        return FP8Config(recipe=self.recipe, opt_level=level)
