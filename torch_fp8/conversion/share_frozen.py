"""Sharing of equal frozen weights, such as those of a LoRA policy's base and its reference model.

If two weights stored as FP8 only have the same bytes and scales, they share memory. The comparison
is by content, whatever the names. Shared weights are copied on write: a callback that moves the
reference towards the policy, or ``load_state_dict``, first allocates memory for the weight that it
writes, and never changes the other one (`torch_fp8.tensor.frozen_payload.FrozenPayload`).
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from torch_fp8.nn.frozen_storage import FrozenStorage
from torch_fp8.tensor.frozen_payload import FrozenPayload

_SAMPLE = 256
"""Number of bytes from the middle of a weight in its fingerprint, before a full comparison."""


@dataclass(frozen=True)
class SharedWeights:
    """The result of `share_equal_weights`.

    Attributes:
        num_weights: number of weights that now use the memory of another one.
        num_bytes: number of bytes that they freed.
    """

    num_weights: int = 0
    num_bytes: int = 0


@torch.no_grad()
def share_equal_weights(models: Iterable[nn.Module]) -> SharedWeights:
    """Let the frozen weights of several models that have equal bytes and scales share memory.

    Args:
        models: any models; of equal weights, the memory of the first one is kept.
    Returns:
        The numbers of weights and of freed bytes.
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
    """Return the payloads of a module's frozen weights, and those kept during an adapter merge."""
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
