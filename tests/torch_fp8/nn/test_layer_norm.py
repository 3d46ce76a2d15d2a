import pytest
from torch import nn

from tests.internals import SharedOutput, share_output
from torch_fp8 import convert_to_float8, revert


class LayerNormOfBlocks(nn.LayerNorm):
    def __init__(self, size):
        super().__init__(size)
        self.inner = nn.Identity()


@pytest.mark.parametrize(
    "module",
    [nn.LayerNorm((2, 64)), nn.LayerNorm(64, elementwise_affine=False), LayerNormOfBlocks(64)],
    ids=["two dimensions", "no weight", "a module inside"],
)
def test_others_stay_as_they_are(module):
    cls = type(module)
    assert not share_output(module, "norm")
    assert type(module) is cls


def _model(norm):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            return self.q(x) + self.k(x)

    return nn.Sequential(norm, Attention())


def test_a_norm_with_a_forward_of_its_own_is_left_alone():
    norm = nn.LayerNorm(64)
    norm.forward = lambda x: x
    convert_to_float8(_model(norm))
    assert type(norm) is nn.LayerNorm


def test_names_are_those_of_the_last_conversion_and_go_with_it():
    norm = nn.LayerNorm(64)
    before = set(vars(norm))
    model = _model(norm)
    convert_to_float8(model)
    assert norm.fp8.name == "0"
    convert_to_float8(nn.ModuleDict({"block": model}))
    assert norm.fp8.name == "block.0"
    assert isinstance(norm, SharedOutput)
    revert(model)
    assert type(norm) is nn.LayerNorm
    assert set(vars(norm)) == before


def test_a_norm_in_front_of_one_layer_has_nothing_to_share():
    norm = nn.LayerNorm(64)
    convert_to_float8(nn.Sequential(norm, nn.Linear(64, 64)))
    assert type(norm) is nn.LayerNorm
