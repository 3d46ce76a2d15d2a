"""GPUs from the makers' data sheets: memory, peak rates and links."""

from dataclasses import dataclass

from torch_fp8.ops.hardware import check_card
from torch_fp8.quantization.suggestions import suggestion

GPUS_PER_NODE = 8
"""The number of GPUs in a node that share its fast links, as in NVIDIA's DGX and HGX."""


@dataclass(frozen=True)
class Card:
    """A GPU, and the links to other GPUs.

    Attributes:
        name: the common name.
        capability: the CUDA compute capability.
        memory: the size of its memory, GiB.
        bandwidth: the bandwidth of its memory, bytes per second.
        bf16, fp8: the dense tensor-core peaks, FLOP per second.
        link: the bandwidth to the other GPUs of its node, bytes per second in each direction.
        network: the bandwidth to other nodes, bytes per second in each direction: one 400 Gbit/s
            adapter per GPU for data centre cards.
        source: the page with these numbers; those of H100 and H200 are the SXM module's.
    """

    name: str
    capability: tuple[int, int]
    memory: float
    bandwidth: float
    bf16: float
    fp8: float
    link: float
    network: float
    source: str


_NVIDIA = "https://www.nvidia.com/en-us/data-center/"
CARDS = {
    card.name: card
    for card in (
        Card("h100", (9, 0), 80, 3.35e12, 989.4e12, 1978.9e12, 450e9, 50e9, _NVIDIA + "h100/"),
        Card("h200", (9, 0), 141, 4.8e12, 989.4e12, 1978.9e12, 450e9, 50e9, _NVIDIA + "h200/"),
        Card("b200", (10, 0), 180, 8.0e12, 2250e12, 4500e12, 900e9, 50e9, _NVIDIA + "dgx-b200/"),
        Card("l40s", (8, 9), 48, 864e9, 362e12, 733e12, 32e9, 25e9, _NVIDIA + "l40s/"),
        Card("rtx-4090", (8, 9), 24, 1008e9, 165.2e12, 330.3e12, 32e9, 12.5e9,
             "NVIDIA Ada GPU architecture whitepaper, appendix A"),
    )
}  # fmt: skip
_WITHOUT_FP8 = {
    **{"v100": (7, 0), "t4": (7, 5), "a100": (8, 0)},
    **{"a10": (8, 6), "a40": (8, 6), "a6000": (8, 6), "rtx-3090": (8, 6)},
}
SHARE_OF_FLOPS, SHARE_OF_BANDWIDTH, SHARE_OF_LINK = 0.78, 0.92, 0.8
"""The reachable shares of the peaks. The first two are torchao's (roofline_utils.py), that of the
links is an assumption. None is measured on a GPU of ours.
"""
LATENCY = 20e-6
"""Seconds that a collective takes beside its bytes, for each doubling of the ranks; an
assumption.
"""


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
