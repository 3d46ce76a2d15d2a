"""Messages with 8 bits per element, in which ranks exchange values.

A message has groups of 32 values, encoded in `formats.GRADIENT` with an E8M0 scale for each group,
followed by plain BF16 values, for small tensors and those not worth encoding:

=========  =========================================================================
codes      32 bytes for each of G groups (`torch_fp8.quantization.block_scaled`)
scales     1 byte for each
plain      P BF16 values, from the next multiple of 16 on
=========  =========================================================================

In total this is 33 G + 2 P bytes and up to 30 bytes of padding. Two collectives of such messages
compute an average over N ranks. Each rank packs its gradient into N messages (`pack_flat`), one for
each rank that owns a part. The owner sums the messages that it receives in float32, encodes the
average again (`reduce_and_repack`) and sends it to all ranks. All ranks decode the same bytes, so
they get the same average bit for bit.

* Groups of 32 need less range than E4M3 has, and this format has more bits for large values: two
  roundings to nearest keep 36.2 dB of a Gaussian gradient, two of E4M3 28.1
  (benchmarks/results/wire.csv).
* An Inf or NaN makes its group NaN in every sum, so all ranks see it.
* Additions run in float32, in the order of the ranks.

On CUDA these functions call `kernels.messages`, with the same bytes.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from torch_fp8.quantization.block_scaled import BlockScaled, decode, encode
from torch_fp8.quantization.formats import GRADIENT, GROUP_SIZE
from torch_fp8.quantization.stochastic_rounding import element_index, random_words

Keys = tuple[int, int]

_ALIGNMENT = 16
_DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Layout:
    """The layout of a message: its numbers of groups and of plain values.

    Attributes:
        num_groups: the number of groups of 32 values, G.
        num_plain: the number of BF16 values, P.
    """

    num_groups: int
    num_plain: int = 0

    @property
    def num_values(self) -> int:
        """Number of values in the groups."""
        return GROUP_SIZE * self.num_groups

    @property
    def plain_offset(self) -> int:
        """Offset in bytes at which the BF16 values start."""
        return _aligned((GROUP_SIZE + 1) * self.num_groups)

    @property
    def num_bytes(self) -> int:
        """Size of a message in bytes."""
        return self.plain_offset + _aligned(2 * self.num_plain)

    def codes(self, messages: Tensor) -> Tensor:
        """View the codes of (N, B) messages, (N, 32 * G) uint8."""
        return messages[:, : self.num_values]

    def scales(self, messages: Tensor) -> Tensor:
        """View the scales of (N, B) messages, (N, G) uint8."""
        return messages[:, self.num_values : self.num_values + self.num_groups]

    def plain(self, messages: Tensor) -> Tensor:
        """View the plain values of (N, B) messages, (N, P) bfloat16."""
        part = messages[:, self.plain_offset : self.plain_offset + 2 * self.num_plain]
        return part.view(torch.bfloat16)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def split_layout(numel: int, num_plain: int, num_messages: int) -> Layout:
    """Return the layout of each message if `num_messages` share these numbers of values."""
    num_groups = -(-numel // GROUP_SIZE)
    return Layout(-(-num_groups // num_messages), -(-num_plain // num_messages))


def pack_flat(values: Tensor, plain: Tensor | None, layout: Layout, num_messages: int) -> Tensor:
    """Encode flat buffers, split over the messages and padded with zeros.

    Args:
        values: (E,) bfloat16 or float32, contiguous; E at most ``num_messages * 32 * G``.
        plain: (F,), any floating-point dtype, F at most ``num_messages * P``, or None without plain
            values.
        layout: the layout of each message.
        num_messages: the number of messages, N.
    Returns:
        (N, B) uint8.
    """
    _check_buffers(values, plain, layout, num_messages)
    messages = torch.empty(
        (num_messages, layout.num_bytes), dtype=torch.uint8, device=values.device
    )
    if values.is_cuda:
        from torch_fp8.kernels import messages as wire

        wire.pack(values, layout, messages)
    elif _has_values(values):
        more = num_messages * layout.num_values - values.numel()
        _store(F.pad(values.float(), (0, more)), layout, messages, None)
    if layout.num_plain:
        part = layout.plain(messages)
        flat = torch.zeros(part.numel(), dtype=torch.bfloat16, device=part.device)
        if plain is not None:
            flat[: plain.numel()] = plain
        part.copy_(flat.view(part.shape))
    return messages


def unpack_sum(
    messages: Tensor,
    layout: Layout,
    out_groups: Tensor,
    out_plain: Tensor | None,
    scale: float = 1.0,
) -> None:
    """Write `scale` times the float32 sum of the messages, added in their order.

    Args:
        messages: (N, B) uint8.
        layout: the layout of each message.
        out_groups: (32 * G,) bfloat16 or float32, contiguous; receives the result, rounded to
            nearest.
        out_plain: (P,), the same for plain values, or None if P is 0.
        scale: the factor of the sum, for example 1 / N.
    """
    assert out_groups.numel() == layout.num_values
    assert (0 if out_plain is None else out_plain.numel()) == layout.num_plain
    if messages.is_cuda:
        from torch_fp8.kernels import messages as wire

        wire.unpack_sum(messages, layout, out_groups, scale)
        if out_plain is not None:
            wire.sum_plain(layout.plain(messages), out_plain, scale)
        return
    if _has_values(messages):
        out_groups.copy_(_sum(_values(messages, layout)) * scale)
    if out_plain is not None:
        out_plain.copy_(_sum(layout.plain(messages)) * scale)


def reduce_and_repack(
    messages: Tensor,
    layout: Layout,
    scale: float = 1.0,
    *,
    keys: Keys | None = None,
) -> Tensor:
    """Encode the sum that `unpack_sum` computes as a message, without a float32 sum in memory.

    Args:
        messages, layout, scale: see `unpack_sum`.
        keys: the keys of the random bits for stochastic rounding, one word for each value by its
            index in the result, or None to round to nearest even.
    Returns:
        (1, B) uint8, the message of the sum.
    """
    combined = torch.empty((1, layout.num_bytes), dtype=torch.uint8, device=messages.device)
    if messages.is_cuda:
        from torch_fp8.kernels import messages as wire

        wire.reduce_and_repack(messages, layout, combined, scale, keys)
        if layout.num_plain:
            wire.sum_plain(layout.plain(messages), layout.plain(combined)[0], scale)
        return combined
    if _has_values(messages):
        _store(_sum(_values(messages, layout)) * scale, layout, combined, keys)
    if layout.num_plain:
        layout.plain(combined)[0] = _sum(layout.plain(messages)) * scale
    return combined


def unpack_flat(
    messages: Tensor, layout: Layout, out_values: Tensor, out_plain: Tensor | None
) -> None:
    """Decode the values of all messages into flat buffers, which may be shorter than these.

    Args:
        messages: (N, B) uint8.
        layout: the layout of each message.
        out_values: (E,) bfloat16 or float32, contiguous; E at most ``N * 32 * G``.
        out_plain: (F,), any floating-point dtype, F at most ``N * P``, or None if not needed.
    """
    _check_buffers(out_values, out_plain, layout, messages.shape[0])
    if messages.is_cuda:
        from torch_fp8.kernels import messages as wire

        wire.unpack(messages, layout, out_values)
    elif _has_values(messages):
        out_values.copy_(_values(messages, layout).view(-1)[: out_values.numel()])
    if out_plain is not None and out_plain.numel():
        out_plain.copy_(layout.plain(messages).reshape(-1)[: out_plain.numel()])


def _check_buffers(values: Tensor, plain: Tensor | None, layout: Layout, messages: int) -> None:
    if values.dtype not in _DTYPES:
        raise TypeError(f"values on the wire must be bfloat16 or float32, got {values.dtype}")
    assert values.ndim == 1
    assert values.is_contiguous()
    assert values.numel() <= messages * layout.num_values
    assert (0 if plain is None else plain.numel()) <= messages * layout.num_plain


def _has_values(tensor: Tensor) -> bool:
    """Return whether a tensor has memory, not only a shape."""
    return tensor.device.type != "meta" and not isinstance(tensor, FakeTensor)


def _values(messages: Tensor, layout: Layout) -> Tensor:
    """Decode the groups of messages (N, B) to (N, 32 * G) float32."""
    codes = layout.codes(messages).reshape(-1, GROUP_SIZE)  # (N, 32 * G) -> (N * G, 32)
    scales = layout.scales(messages).reshape(-1, 1)
    return decode(BlockScaled(codes, scales), GRADIENT).view(len(messages), layout.num_values)


def _sum(values: Tensor) -> Tensor:
    """Sum the rows (N, X) in float32, in their order."""
    first, *others = values.float()
    for row in others:
        first = first + row
    return first


def _store(values: Tensor, layout: Layout, messages: Tensor, keys: Keys | None) -> None:
    """Encode (N * 32 * G,) float32 into the groups of messages (N, B)."""
    x, random = values.view(-1, GROUP_SIZE), None
    if keys is not None:
        index = element_index(x.shape[0], x.shape[1], 0, 0, GROUP_SIZE, x.device)
        random = (random_words(index, keys) & 0xFFFF) << 4 | 8
    codes, scales = encode(x, GRADIENT, random)
    layout.codes(messages).copy_(codes.view(len(messages), layout.num_values))
    layout.scales(messages).copy_(scales.view(len(messages), layout.num_groups))
