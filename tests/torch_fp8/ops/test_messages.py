import pytest
import torch

from tests.internals import stream_keys
from tests.rows_of_messages import pack, pieces, unpack
from torch_fp8.ops import messages as wire
from torch_fp8.ops.messages import Layout, split_layout

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def _values(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _close(got, want, most):
    return float((got.float() - want.float()).norm() / want.float().norm()) < most


@pytest.mark.parametrize(
    "layout", [Layout(0, 0), Layout(0, 5), Layout(3, 0), Layout(7, 9)], ids=str
)
def test_a_message_has_a_byte_per_value_one_per_group_and_two_per_plain_one(layout):
    payload = 33 * layout.num_groups + 2 * layout.num_plain
    assert payload <= layout.num_bytes <= payload + 30
    assert layout.num_bytes % 16 == layout.plain_offset % 16 == 0
    messages = pack(_values(4, layout.num_values), _values(4, layout.num_plain))
    assert messages.shape == (4, layout.num_bytes)
    assert messages.dtype == torch.uint8


def test_shares_of_a_buffer_cover_it():
    assert split_layout(1000, 7, 4) == Layout(8, 2)
    assert split_layout(1024, 8, 4) == Layout(8, 2)
    assert split_layout(0, 0, 4) == Layout(0, 0)


@DTYPES
def test_what_is_packed_comes_out_again(dtype):
    x, plain = _values(3, 20, 32, dtype=dtype), _values(3, 7)
    layout = Layout(20, 7)
    messages = pack(x, plain)
    values, of_plain = unpack(messages, layout, dtype)
    assert values.dtype == of_plain.dtype == dtype
    assert _close(values, x.view(3, -1), 0.014)
    assert torch.equal(of_plain, plain.bfloat16().to(dtype))
    again = pack(values, of_plain)
    assert torch.equal(unpack(again, layout, dtype)[0], values)


def test_codes_are_those_of_the_block_scaled_format():
    from tests.internals import GRADIENT, encode

    x = _values(2, 96)
    messages = pack(x)
    want = encode(x, GRADIENT)
    layout = Layout(3)
    assert torch.equal(layout.codes(messages), want.qdata)
    assert torch.equal(layout.scales(messages), want.scale)


@pytest.mark.parametrize("numel", [0, 1, 31, 32, 200, 767, 768])
def test_flat_buffers_may_end_before_the_messages(numel):
    x, plain = _values(numel), _values(5)
    layout = Layout(8, 2)
    messages = wire.pack_flat(x, plain, layout, 3)
    values, of_plain = torch.full((numel,), 9.0), torch.full((5,), 9.0)
    wire.unpack_flat(messages, layout, values, of_plain)
    padded = torch.zeros(3 * 8 * 32)
    padded[:numel] = x
    assert torch.equal(
        values, unpack(pack(padded.view(3, -1)), Layout(8), x.dtype)[0].view(-1)[:numel]
    )
    assert torch.equal(of_plain, plain.bfloat16().float())
    assert not unpack(messages, layout, x.dtype)[0].view(-1)[numel:].any()


@DTYPES
def test_sums_are_made_in_float32_in_the_order_of_the_messages(dtype):
    x, plain = _values(5, 640), _values(5, 9)
    layout = Layout(20, 9)
    messages = pack(x, plain)
    values, of_plain = unpack(messages, layout, torch.float32)
    want, want_plain = values[0].clone(), of_plain[0].clone()
    for i in range(1, 5):
        want, want_plain = want + values[i], want_plain + of_plain[i]
    out, out_plain = torch.empty(640, dtype=dtype), torch.empty(9, dtype=dtype)
    wire.unpack_sum(messages, layout, out, out_plain, 0.2)
    assert torch.equal(out, (want * 0.2).to(dtype))
    assert torch.equal(out_plain, (want_plain * 0.2).to(dtype))


def test_combining_is_summing_and_packing():
    messages = pack(_values(4, 640), _values(4, 9))
    layout = Layout(20, 9)
    total, total_plain = torch.empty(640), torch.empty(9)
    wire.unpack_sum(messages, layout, total, total_plain, 0.25)
    want = pack(total[None], total_plain[None])
    got = wire.reduce_and_repack(messages, layout, 0.25)
    assert torch.equal(layout.codes(got), layout.codes(want))
    assert torch.equal(layout.scales(got), layout.scales(want))
    assert torch.equal(layout.plain(got), layout.plain(want))


def test_rounding_is_stochastic_with_keys():
    """The mean of 400 is off by a twentieth of one's error; words are one for each value."""
    messages, layout = pack(_values(1, 32 * 100)), Layout(100)
    exact = unpack(messages, layout, torch.float32)[0] * 0.3
    draws = []
    for i in range(400):
        got = wire.reduce_and_repack(messages, layout, 0.3, keys=stream_keys(i))
        draws.append(unpack(got, layout, torch.float32)[0] - exact)
    errors = torch.stack(draws)
    size = float(errors.pow(2).mean(0).sum().sqrt())
    assert float(errors.mean(0).norm()) < 1.2 / 20 * size
    up = (errors > 0).float()
    assert abs(float(torch.corrcoef(up[:, 0, 2:4].t())[0, 1])) < 0.2


def test_random_words_round_to_the_mean(monkeypatch):
    """With each of the 2^16 words once, the mean is right to half of one of their steps."""
    monkeypatch.setattr(wire, "random_words", lambda index, keys: index // 32)
    x = torch.cat([torch.tensor([100.0]), 0.03 + 90 * torch.rand(31) ** 6])
    parts, _ = unpack(pieces(x[None]), Layout(1), x.dtype)
    messages = pack(parts.repeat(1, 1 << 16))
    messages = wire.reduce_and_repack(messages, Layout(1 << 16), keys=(0, 0))
    mean = unpack(messages, Layout(1 << 16), torch.float32)[0].view(-1, 32).double().mean(0)
    spacing = torch.exp2(x.log2().floor() - 3).clamp(min=2.0**-5)  # or finer
    assert ((mean - x).abs() <= spacing * 0.51 * 2.0**-16).all()


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_reads_nan_in_its_group_of_every_sum(bad):
    x, plain = _values(3, 96), _values(3, 4)
    x[1, 40], plain[2, 1] = bad, bad
    messages = pack(x, plain)
    layout = Layout(3, 4)
    out, out_plain = torch.empty(96), torch.empty(4)
    wire.unpack_sum(messages, layout, out, out_plain, 1 / 3)
    assert out.isnan().tolist() == [False] * 32 + [True] * 32 + [False] * 32
    assert out_plain.isfinite().tolist() == [True, False, True, True]
    combined = unpack(wire.reduce_and_repack(messages, layout, 1 / 3), layout, torch.float32)
    assert combined[0].isnan().sum() == 32
    assert not combined[1].isfinite().all()


def test_other_dtypes_are_refused_by_name():
    with pytest.raises(TypeError, match=r"bfloat16 or float32, got torch\.float16"):
        pack(torch.zeros(1, 32, dtype=torch.float16))
