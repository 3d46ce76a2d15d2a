import pytest
import torch
from torch import nn

from tests.internals import Halves, split_parameter

LARGEST_BF16 = 0x7F7F0000
WORDS = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x10000, 0x7FFFFF, 0x800000]  # zero, subnormals
WORDS += [0x3F800000, 0x3F807FFF, 0x3F808000, 0x3F818000, 0x7F7EFFFF, LARGEST_BF16]
WORDS += [0x7F7F7FFF, 0x7F7F8000, 0x7F7F8001, 0x7F7FFFFF, 0x7F800000]  # above it, and Inf
NANS = [0x7F800001, 0x7F80FFFF, 0x7FC00000, 0x7FFFFFFF]


def floats(words):
    words = torch.tensor(words, dtype=torch.int64)
    return torch.cat([words, words - (1 << 31)]).to(torch.int32).view(torch.float32)


def any_floats():
    """All the above with both signs, and every upper half with the edges of the lower ones."""
    upper = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    every = (upper[:, None] | lower).flatten().view(torch.float32)
    return torch.cat([floats(WORDS), floats(NANS), every])


def assert_same_numbers(read, expected):
    assert torch.equal(read.isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert torch.equal(read.view(torch.int32)[numbers], expected.view(torch.int32)[numbers])


def test_what_is_written_reads_as_it_was_written():
    values = any_floats()
    weight = split_parameter(nn.Parameter(torch.zeros_like(values)[None]))
    with torch.no_grad():
        weight.copy_(values[None])
    assert_same_numbers(weight.detach().clone()[0], values)
    assert_same_numbers(weight.halves.mapped(torch.clone).join()[0], values)


@pytest.mark.parametrize("settled", [False, True], ids=["split", "settled"])
def test_rounding_saturates_and_keeps_inf(settled):
    values = any_floats()[None]
    halves = Halves.of(torch.zeros_like(values) if settled else values, 8)
    if settled:
        halves.write(values)
        halves.settle((1, 2))
    read = halves.join()
    assert torch.equal(read.isnan(), values.isnan())
    assert torch.equal(read.isinf(), values.isinf())
    finite = values.isfinite()
    assert torch.equal(read[finite].signbit(), values[finite].signbit())
    error = (read[finite].double() - values[finite].double()).abs()
    spacing = (values[finite].abs().double() * 2**-7).clamp(min=2.0**-133)
    # A spacing of what is kept; above the largest number that two halves have, the way to it.
    saturated = values[finite].abs().view(torch.int32) > LARGEST_BF16
    assert bool((error <= spacing * 2.0**-8)[~saturated].all())
    assert bool((error <= spacing / 2)[saturated].all())


def test_layers_take_inf_where_a_cast_to_bf16_gives_it():
    values = floats([0x7F7F7FFF, 0x7F7F8000, 0x7F7F8001, 0x7F7FFFFF])
    halves = Halves.of(torch.zeros(1, 8), 8)
    halves.write(values[None])
    assert torch.equal(halves.high[0].isinf(), values.bfloat16().isinf())
