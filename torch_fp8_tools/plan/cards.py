"""GPUs from the makers' data sheets, and their memory."""

from dataclasses import dataclass

from torch_fp8.ops.hardware import check_card
from torch_fp8.quantization.suggestions import suggestion


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


def card_named(name: str) -> Card:
    """Return a card by its name, in any case.

    Raises:
        ValueError: the card is unknown, or has no FP8 tensor cores.
    """
    card = CARDS.get(str(name).lower())
    if card is None:
        if str(name).lower() in _WITHOUT_FP8:
            check_card(str(name), _WITHOUT_FP8[str(name).lower()], "tensorwise")
        hint = suggestion(name, CARDS)
        raise ValueError(f"card {name!r} is unknown; one of {', '.join(CARDS)}{hint}")
    return card
