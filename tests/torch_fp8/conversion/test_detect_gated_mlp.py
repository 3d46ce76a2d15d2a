"""Gated MLPs are found by what their forward does with its layers, and only these."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torch_fp8.conversion.detect_gated_mlp import find_gated_mlp
from torch_fp8.nn.gated_mlp import GatedMLPSpec


class Layers(nn.Module):
    """Everything that the forwards below use; `w` gives (..., 32), `d` takes (..., 16)."""

    def __init__(self):
        super().__init__()
        self.w, self.d = nn.Linear(8, 32), nn.Linear(16, 8)
        self.act, self.gelu, self.drop = nn.SiLU(), nn.GELU(), nn.Dropout(0.1)
        self.n, self.other, self.parts = 16, 8, 1


def _form(forward, base=Layers):
    return find_gated_mlp(type("MLP", (base,), {"forward": forward})())


def _chunk(self, x):  # as Phi-3, GLM
    gate, up = self.w(x).chunk(2, dim=-1)
    return self.d(up * self.act(gate))


def _chunk_indexed(self, x):  # as Granite's shared expert
    both = self.w(x).chunk(2, dim=-1)
    return self.d(self.act(both[0]) * both[1])


def _chunk_function(self, x):
    gate, up = torch.chunk(self.w(x), 2, -1)
    return self.d(torch.mul(F.silu(gate), up))


def _split(self, x):
    gate, up = self.w(x).split(self.n, dim=-1)
    return self.d(self.act(gate) * up)


def _split_sizes(self, x):
    gate, up = torch.split(self.w(x), [self.n, self.n], dim=-1)
    return self.d(self.act(gate) * up)


def _slices(self, x):
    both = self.w(x)
    return self.d(self.act(both[..., : self.n]) * both[..., self.n :])


def _slices_by_shape(self, x):
    both = self.w(x)
    half = both.shape[-1] // 2
    return self.d(both[..., half:] * self.act(both[..., : both.size(-1) // 2]))


GATE_FIRST = (
    _chunk,
    _chunk_indexed,
    _chunk_function,
    _split,
    _split_sizes,
    _slices,
    _slices_by_shape,
)


@pytest.mark.parametrize("forward", GATE_FIRST, ids=lambda f: f.__name__)
def test_halves_of_one_layer(forward):
    assert _form(forward).spec == GatedMLPSpec(("w",), "d", True)


def _up_first(self, x):  # as Moonshine
    up, gate = self.w(x).chunk(2, dim=-1)
    return self.d(self.act(gate) * up)


def _up_first_by_slices(self, x):
    both = self.w(x)
    return self.d(both[..., : self.n] * F.silu(both[..., self.n :]))


@pytest.mark.parametrize("forward", [_up_first, _up_first_by_slices], ids=lambda f: f.__name__)
def test_the_other_way_round(forward):
    assert _form(forward).spec == GatedMLPSpec(("w",), "d", False)


def _same_half(self, x):
    gate, _ = self.w(x).chunk(2, dim=-1)
    return self.d(self.act(gate) * gate)


def _another_dimension(self, x):
    gate, up = self.w(x).chunk(2, dim=1)
    return self.d(self.act(gate) * up)


def _default_dimension(self, x):
    gate, up = self.w(x).chunk(2)
    return self.d(self.act(gate) * up)


def _two_calls(self, x):
    gate, _ = self.w(x).chunk(2, dim=-1)
    _, up = self.w(x).chunk(2, dim=-1)
    return self.d(self.act(gate) * up)


def _quarters(self, x):
    gate, up, *_ = self.w(x).chunk(4, dim=-1)
    return self.d(self.act(gate) * up)


def _other_size(self, x):
    gate, up = self.w(x).split(self.other, dim=-1)
    return self.d(self.act(gate) * up)


def _uneven(self, x):
    both = self.w(x)
    return self.d(self.act(both[..., : self.other]) * both[..., self.other :])


def _every_other(self, x):
    both = self.w(x)
    return self.d(self.act(both[..., ::2]) * both[..., 1::2])


def _every_other_of_halves(self, x):
    both = self.w(x)
    return self.d(self.act(both[..., : self.n : 2]) * both[..., self.n :: 2])


def _by_a_number(self, x):  # which may change after it was looked at
    gate, up = self.w(x).chunk(2, dim=-1)
    return self.d(self.act(gate) * up) if self.parts == 1 else self.d(up)


def _of_rows(self, x):
    both = self.w(x)
    return self.d(self.act(both[:, : self.n]) * both[:, self.n :])


def _gelu(self, x):
    gate, up = self.w(x).chunk(2, dim=-1)
    return self.d(self.gelu(gate) * up)


def _without_activation(self, x):
    gate, up = self.w(x).chunk(2, dim=-1)
    return self.d(gate * up)


def _dropout(self, x):
    gate, up = self.w(x).chunk(2, dim=-1)
    return self.d(self.drop(self.act(gate) * up))


def _offset(self, x):
    gate, up = self.w(x).chunk(2, dim=-1)
    return self.d(self.act(gate) * (up + 1))


def _scaled(self, x):
    gate, up = self.w(x * 2).chunk(2, dim=-1)
    return self.d(self.act(gate) * up)


def _residual(self, x):
    gate, up = self.w(x).chunk(2, dim=-1)
    return self.d(self.act(gate) * up) + x


def _in_place(self, x):
    gate, up = self.w(x).chunk(2, dim=-1)
    return self.d(F.silu(gate, inplace=True) * up)


def _by_mode(self, x):
    gate, up = self.w(x).chunk(2, dim=-1)
    return self.d(self.act(gate) * up) if self.training else self.d(up)


def _backwards(self, x):
    gate, up = self.d(x).chunk(2, dim=-1)
    return self.d(self.act(gate) * up)


OTHERS = (
    _same_half,
    _another_dimension,
    _default_dimension,
    _two_calls,
    _quarters,
    _other_size,
    _uneven,
    _every_other,
    _every_other_of_halves,
    _by_a_number,
    _of_rows,
    _gelu,
    _without_activation,
    _dropout,
    _offset,
    _scaled,
    _residual,
    _in_place,
    _by_mode,
    _backwards,
)


@pytest.mark.parametrize("forward", OTHERS, ids=lambda f: f.__name__)
def test_whatever_computes_something_else_is_none(forward):
    assert _form(forward) is None


def test_an_odd_width_has_no_halves():
    class Odd(Layers):
        def __init__(self):
            super().__init__()
            self.w = nn.Linear(8, 33)

    assert _form(_chunk, Odd) is None
    assert _form(_split, Odd) is None


def test_a_third_layer_that_the_forward_leaves_out():
    class More(Layers):
        def __init__(self):
            super().__init__()
            self.unused = nn.Linear(8, 8)

    assert _form(_chunk, More) is None


def test_an_adapter_counts_as_its_layer():
    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base_layer, self.lora_A = base, nn.Linear(8, 4)
            self.lora_B = nn.Linear(4, base.out_features)

    class Adapted(Layers):
        def __init__(self):
            super().__init__()
            self.w = Adapter(self.w)

    assert _form(_slices, Adapted).spec == GatedMLPSpec(("w",), "d", True)


class Pair(Layers):
    def __init__(self):
        super().__init__()
        self.w, self.v = nn.Linear(8, 16), nn.Linear(8, 16)


def test_two_layers_with_an_activation_by_name_or_function():
    def module(self, x):
        return self.d(self.act(self.w(x)) * self.v(x))

    def reversed_(self, x):
        return self.d(self.v(x) * self.act(self.w(x)))

    def function(self, x):  # as Meta's Llama
        return self.d(F.silu(self.w(x)) * self.v(x))

    for forward in (module, reversed_, function):
        assert _form(forward, Pair).spec == GatedMLPSpec(("w", "v"), "d")


@pytest.mark.parametrize(
    "activation",
    [
        lambda x: torch.where(x < 0, torch.zeros_like(x), F.silu(x)),
        lambda x: x * torch.sigmoid(1.001 * x),
        F.hardswish,
    ],
    ids=["half", "steeper", "hardswish"],
)
def test_an_activation_that_is_almost_silu(activation):
    class Almost(nn.Module):
        def forward(self, x):
            return activation(x)

    class Uses(Layers):
        def __init__(self):
            super().__init__()
            self.act = Almost()

    assert _form(_chunk, Uses) is None


def test_halves_of_two_layers_are_no_form():
    def forward(self, x):
        gate, _ = self.w(x).chunk(2, dim=-1)
        _, up = self.v(x).chunk(2, dim=-1)
        return self.d(self.act(gate) * up)

    assert _form(forward, Pair) is None
