import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.internals import GatedMLPSpec, find_gated_layers, find_gated_mlp


class Layers(nn.Module):
    """Everything that the forwards below use; `w` gives (..., 32), `d` takes (..., 16)."""

    def __init__(self):
        super().__init__()
        self.w, self.d = nn.Linear(8, 32), nn.Linear(16, 8)
        self.act, self.gelu, self.drop = nn.SiLU(), nn.GELU(), nn.Dropout(0.1)
        self.n, self.other, self.parts = 16, 8, 1


def _form(forward, base=Layers):
    return find_gated_mlp(type("MLP", (base,), {"forward": forward})())


def _of_halves(combine, split=lambda self, both: both.chunk(2, dim=-1)):
    """A forward that combines what `split` makes of the first layer's output."""

    def forward(self, x):
        return self.d(combine(self, *split(self, self.w(x))))

    return forward


def _swiglu(self, gate, up):
    return self.act(gate) * up


def _halves_by_shape(self, both):
    half = both.shape[-1] // 2
    return both[..., : both.size(-1) // 2], both[..., half:]


def _slices(self, both):
    return both[..., : self.n], both[..., self.n :]


GATE_FIRST = {
    "chunk": _of_halves(lambda self, gate, up: up * self.act(gate)),  # as Phi-3, GLM
    "function": _of_halves(
        lambda self, gate, up: torch.mul(F.silu(gate), up),
        lambda self, both: torch.chunk(both, 2, -1),
    ),
    "split": _of_halves(_swiglu, lambda self, both: both.split(self.n, dim=-1)),
    "sizes": _of_halves(_swiglu, lambda self, both: torch.split(both, [self.n, self.n], dim=-1)),
    "slices": _of_halves(_swiglu, _slices),
    "slices by shape": _of_halves(lambda self, gate, up: up * self.act(gate), _halves_by_shape),
}
UP_FIRST = {
    "chunk": _of_halves(lambda self, up, gate: self.act(gate) * up),  # as Moonshine
    "slices": _of_halves(lambda self, up, gate: up * F.silu(gate), _slices),
}


@pytest.mark.parametrize("name", GATE_FIRST)
def test_halves_of_one_layer(name):
    assert _form(GATE_FIRST[name]).spec == GatedMLPSpec(("w",), "d", True)


@pytest.mark.parametrize("name", UP_FIRST)
def test_the_other_way_round(name):
    assert _form(UP_FIRST[name]).spec == GatedMLPSpec(("w",), "d", False)


def _two_calls(self, x):
    gate, _ = self.w(x).chunk(2, dim=-1)
    _, up = self.w(x).chunk(2, dim=-1)
    return self.d(self.act(gate) * up)


OTHERS = {
    "same half": _of_halves(lambda self, gate, up: self.act(gate) * gate),
    "another dimension": _of_halves(_swiglu, lambda self, both: both.chunk(2, dim=1)),
    "default dimension": _of_halves(_swiglu, lambda self, both: both.chunk(2)),
    "two calls": _two_calls,
    "quarters": _of_halves(_swiglu, lambda self, both: both.chunk(4, dim=-1)[:2]),
    "other size": _of_halves(_swiglu, lambda self, both: both.split(self.other, dim=-1)),
    "uneven": _of_halves(
        _swiglu, lambda self, both: (both[..., : self.other], both[..., self.other :])
    ),
    "every other": _of_halves(_swiglu, lambda self, both: (both[..., ::2], both[..., 1::2])),
    "every other of halves": _of_halves(
        _swiglu, lambda self, both: (both[..., : self.n : 2], both[..., self.n :: 2])
    ),
    "by the dtype": _of_halves(  # which may differ from the trial's
        lambda self, gate, up: self.act(gate) * (up if up.dtype == torch.float32 else 2 * up)
    ),
    "of rows": _of_halves(_swiglu, lambda self, both: (both[:, : self.n], both[:, self.n :])),
    "gelu": _of_halves(lambda self, gate, up: self.gelu(gate) * up),
    "without activation": _of_halves(lambda self, gate, up: gate * up),
    "activation of the product": _of_halves(lambda self, gate, up: self.act(gate * up)),
    "dropout": _of_halves(lambda self, gate, up: self.drop(self.act(gate) * up)),
    "offset": _of_halves(lambda self, gate, up: self.act(gate) * (up + 1)),
    "scaled": lambda self, x: _of_halves(_swiglu)(self, 2 * x),
    "scaled result": lambda self, x: _of_halves(_swiglu)(self, x) * 2,
    "residual": lambda self, x: _of_halves(_swiglu)(self, x) + x,
    "in place": _of_halves(lambda self, gate, up: F.silu(gate, inplace=True) * up),
    "by mode": _of_halves(lambda self, gate, up: self.act(gate) * up if self.training else up),
    "backwards": lambda self, x: self.d(_swiglu(self, *self.d(x).chunk(2, dim=-1))),
}


@pytest.mark.parametrize("name", OTHERS)
def test_whatever_computes_something_else_is_none(name):
    assert _form(_of_halves(_swiglu)).spec == GatedMLPSpec(("w",), "d", True)
    assert _form(OTHERS[name]) is None


def test_a_number_that_the_forward_reads_is_compared_afterwards():
    def combine(self, gate, up):
        return self.act(gate) * up if self.parts == 1 else up

    reads = _form(_of_halves(combine)).reads
    module = type("MLP", (Layers,), {"forward": reads.cls.forward})()
    assert reads.change(module) is None
    module.parts = 2
    assert reads.change(module) == "'parts' has changed"


def test_a_trial_calls_no_layer_of_the_module():
    calls = []
    reader = type("MLP", (Layers,), {"forward": lambda self, x: self.d(next(self.children())(x))})
    for module in (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), Layers(), reader()):
        for child in module.children():
            child.register_forward_pre_hook(lambda *_: calls.append(1))
        assert find_gated_mlp(module) is None
    assert calls == []


def test_an_odd_width_has_no_halves():
    class Odd(Layers):
        def __init__(self):
            super().__init__()
            self.w = nn.Linear(8, 33)

    assert _form(GATE_FIRST["chunk"], Odd) is None
    assert _form(GATE_FIRST["split"], Odd) is None


def test_a_third_layer_that_the_forward_leaves_out():
    class More(Layers):
        def __init__(self):
            super().__init__()
            self.unused = nn.Linear(8, 8)

    assert _form(GATE_FIRST["chunk"], More) is None


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

    assert _form(GATE_FIRST["slices"], Adapted).spec == GatedMLPSpec(("w",), "d", True)


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

    assert _form(GATE_FIRST["chunk"], Uses) is None


def test_layers_of_other_activations():
    def module(self, x):
        return self.d(self.v(x) * self.gelu(self.w(x)))

    def of_both(self, x):
        return self.d(self.w(x) * self.v(x))

    def of_sum(self, x):
        return self.d(self.gelu(self.w(x)) + self.v(x))

    specs = [find_gated_layers(type("MLP", (Pair,), {"forward": f})()) for f in (module, of_both)]
    assert specs == [GatedMLPSpec(("w", "v"), "d"), None]
    assert find_gated_layers(type("MLP", (Pair,), {"forward": of_sum})()) is None


def _chained(self, x):
    gate = self.w(x)
    return self.d(self.act(gate) * self.v(gate))


OF_TWO_LAYERS = {
    "one after the other": _chained,
    "halves": lambda self, x: self.d(
        self.act(self.w(x).chunk(2, -1)[0]) * self.v(x).chunk(2, -1)[1]
    ),
    "activation of the product": lambda self, x: self.d(self.act(self.w(x) * self.v(x))),
    "scaled result": lambda self, x: self.d(self.act(self.w(x)) * self.v(x)) * 2,
    "scaled input of one": lambda self, x: self.d(self.act(self.w(x)) * self.v(x * 2)),
    "one layer twice": lambda self, x: self.d(self.act(self.w(x)) * self.w(x)),
    "gelu": lambda self, x: self.d(self.gelu(self.w(x)) * self.v(x)),
}


@pytest.mark.parametrize("name", OF_TWO_LAYERS)
def test_two_layers_that_compute_something_else_are_none(name):
    assert _form(OF_TWO_LAYERS[name], Pair) is None
