"""Messages of 8 bits per element, packed and unpacked as matrices with a row for each message."""

import torch

from torch_fp8.ops import messages as wire
from torch_fp8.ops.messages import Layout


def pack(groups, plain=None):
    """Encode (N, G, 32) or (N, 32 * G) values, and plain ones (N, P), as (N, B) messages."""
    groups = groups.reshape(len(groups), -1)  # (N, 32 * G)
    layout = Layout(groups.shape[1] // 32, 0 if plain is None else plain.shape[1])
    flat = None if plain is None else plain.reshape(-1)
    return wire.pack_flat(groups.reshape(-1), flat, layout, len(groups))


def pieces(x):
    """Return messages that sum to (G, 32) float32 values, exactly."""
    parts, layout = [], Layout(len(x))
    while x.any():
        parts.append(pack(x[None]))
        x = x - unpack(parts[-1], layout, x.dtype)[0].view_as(x)
    return torch.cat(parts)


def unpack(messages, layout, dtype, codec=wire):
    """Decode (N, B) messages to values (N, 32 * G) and plain ones (N, P)."""
    groups = torch.empty((len(messages), layout.num_values), dtype=dtype, device=messages.device)
    plain = groups.new_empty(len(messages), layout.num_plain)
    codec.unpack_flat(messages, layout, groups.view(-1), plain.view(-1))
    return groups, plain
