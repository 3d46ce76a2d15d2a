"""One copy of frozen weights that are equal: a reference beside the base of a LoRA policy.

Both are stored as FP8 alone, and where their bytes and scales are the same, one memory serves both.
It is found by content, whatever the weights are called. Who writes one of them (a callback that
moves a reference towards the policy, ``load_state_dict``) writes to memory of its own, which it
takes just before: the other is never changed (`torch_fp8.tensor.frozen_payload.FrozenPayload`).
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from torch_fp8.nn.frozen_storage import FrozenStorage
from torch_fp8.tensor.frozen_payload import FrozenPayload

_SAMPLE = 256
"""Bytes in the middle of a weight that tell most weights apart before all are compared."""


@dataclass(frozen=True)
class SharedWeights:
    """What `share_equal_weights` did.

    Attributes:
        num_weights: the number of weights that gave up their memory for that of another.
        num_bytes: the bytes that they held.
    """

    num_weights: int = 0
    num_bytes: int = 0


@torch.no_grad()
def share_equal_weights(models: Iterable[nn.Module]) -> SharedWeights:
    """Let the frozen weights of several models that have equal bytes and scales share memory.

    Args:
        models: any; the memory of the first one that has a weight is kept.
    Returns:
        The number of weights, and the bytes that were freed.
    """
    known: dict[Hashable, list[FrozenPayload]] = {}
    num_weights = num_bytes = 0
    layers = {id(m): m for model in models for m in model.modules() if isinstance(m, FrozenStorage)}
    for payload in (held for layer in layers.values() for held in _payloads(layer)):
        if payload.qdata.is_meta or not payload.qdata.numel():
            continue
        candidates = known.setdefault(_fingerprint(payload), [])
        equal = next((other for other in candidates if _equal(payload, other)), None)
        if equal is None:
            candidates.append(payload)
        elif payload.qdata.data_ptr() != equal.qdata.data_ptr():
            num_weights, num_bytes = num_weights + 1, num_bytes + payload.num_bytes
            payload.share(equal)
    return SharedWeights(num_weights, num_bytes)


def _payloads(layer: FrozenStorage) -> list[FrozenPayload]:
    """The bytes of a module's weights, and those without the adapters that are merged into them."""
    state = layer.fp8.frozen
    unmerged = {} if state is None else state.unmerged
    return [*unmerged.values(), *(weight.payload for weight in layer.frozen_weights.values())]


def _fingerprint(payload: FrozenPayload) -> Hashable:
    qdata = payload.qdata.view(torch.uint8).view(-1)
    middle = qdata[qdata.numel() // 2 :][:_SAMPLE]
    sample = torch.cat([payload.scale.view(-1).view(torch.uint8), middle]).tolist()
    form = (payload.qdata.shape, payload.qdata.device, payload.spec, payload.first_row)
    return (*form, bytes(sample))


def _equal(one: FrozenPayload, other: FrozenPayload) -> bool:
    same_scales = torch.equal(one.scale, other.scale)
    return same_scales and torch.equal(one.qdata.view(torch.uint8), other.qdata.view(torch.uint8))
