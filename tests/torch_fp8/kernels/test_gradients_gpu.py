"""The kernels of 8-bit gradients on a card: bytes equal to the reference on the CPU."""

import pytest
import torch

from torch_fp8 import gradient_parts
from torch_fp8.random_bits import stream_keys

pytestmark = pytest.mark.gpu

SHAPES = ((1000, 1024), (5, 48), (36, 33), (3, 7), (2, 70000), (17, 4304), (0, 64), (1, 1))


@pytest.mark.parametrize("exponent", [0, -120, 120], ids=["usual", "tiny", "huge"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_equal_the_reference(shape, dtype, exponent):
    generator = torch.Generator().manual_seed(0)
    want = got = None
    for i in range(4):
        x = (torch.randn(shape, generator=generator) * 2.0**exponent).to(dtype)
        if x.numel():
            x[0, -1] = (0.0, float("nan"), 1.0, float("inf"))[i]
        keys = stream_keys(i)
        if i % 2:
            gradient_parts.accumulate_gradient(want, x, keys)
            gradient_parts.accumulate_gradient(got, x.cuda(), keys)
        else:
            want = gradient_parts.quantize_gradient(x, keys)
            got = gradient_parts.quantize_gradient(x.cuda(), keys)
        free = (want.scale == 255).repeat_interleave(32, 1)[:, : shape[1]]
        assert torch.equal(got.scale.cpu(), want.scale)
        assert bool(((got.qdata.cpu() == want.qdata) | free).all())
        for multiplier in (1.0, 0.37):
            want.multiplier.fill_(multiplier)
            got.multiplier.fill_(multiplier)
            decoded = gradient_parts.decode_gradient(got, dtype).cpu()
            expected = gradient_parts.decode_gradient(want, dtype)
            torch.testing.assert_close(decoded, expected, rtol=0, atol=0, equal_nan=True)
