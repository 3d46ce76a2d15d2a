"""The kernels of messages on a card: bytes equal to the reference on the CPU."""

import pytest
import torch

from torch_fp8 import wire
from torch_fp8.random_bits import stream_keys
from torch_fp8.wire import Layout

pytestmark = pytest.mark.gpu

CASES = [(Layout(5000, 77), 4 * 5000 * 32), (Layout(70), 4 * 70 * 32 - 33), (Layout(0, 9), 0)]


@pytest.mark.parametrize("keys", [None, stream_keys(1)], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("exponent", [0, -120, 120], ids=["usual", "tiny", "huge"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("layout", "numel"), CASES, ids=str)
def test_messages_and_sums_equal_the_reference(layout, numel, dtype, exponent, keys):
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(numel, generator=generator) * 2.0**exponent).to(dtype)
    plain = torch.randn(4 * layout.num_plain, generator=generator)
    x[:2] = torch.tensor([float("nan"), 0.0])[:numel]
    want = wire.pack_flat(x, plain, layout, 4, keys=keys)
    got = wire.pack_flat(x.cuda(), plain.cuda(), layout, 4, keys=keys)
    _check_messages(got, want, layout)
    _check_messages(
        wire.combine(want.cuda(), layout, 1 / 3, keys=keys),
        wire.combine(want, layout, 1 / 3, keys=keys),
        layout,
    )
    results = []
    for messages in (want, want.cuda()):
        out = x.new_empty(layout.num_values, device=messages.device)
        out_plain = x.new_empty(layout.num_plain, device=messages.device)
        wire.unpack_sum(messages, layout, out, out_plain, 1 / 3)
        results.append([out.cpu(), out_plain.cpu()])
        results[-1] += [part.cpu() for part in wire.unpack(messages, layout, dtype)]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def _check_messages(got, want, layout):
    got = got.cpu()
    assert torch.equal(layout.scales(got), layout.scales(want))
    free = (layout.scales(want) == 255).repeat_interleave(32, 1)
    assert bool(((layout.codes(got) == layout.codes(want)) | free).all())
    if layout.num_plain:
        assert torch.equal(layout.plain(got), layout.plain(want))
