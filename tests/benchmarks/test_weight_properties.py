"""The table of properties that decided how weights are held, of the weights as they are now."""

import pytest
import torch
from torch.utils import _pytree as pytree

from benchmarks import weight_designs, weight_prototypes
from benchmarks.weight_properties import NEAR, PROPERTIES, Kit
from torch_fp8.tensor.encoded import Encoded, EncodedView, plain
from torch_fp8.tensor.halves import EXACT_BITS
from torch_fp8.tensor.split_weight import SplitTensor, join_parameter, split_parameter
from torch_fp8.tensor.weight_half import half

DIFFERENT = {
    "0 a Parameter": {
        "type is Parameter": "a subclass",
        "data ptr is not 0": "nothing is joined for it",
        "data ptr is stable": "nothing is joined for it",
        "numpy write through": "read-only, so that it raises",
        "dlpack write through": "lost, as docs/weights.md says",
    },
    "0 compile": {"writes a weight": "breaks the graph, and fullgraph=True forbids that"},
    "1 reading": {"svd": "torch's other algorithm", "2-norm": "torch's other algorithm"},
    "1 reading, autocast": {
        "svd": "torch's other algorithm",
        "2-norm": "torch's other algorithm",
        "pinv": "float32, where autocast makes stock's BF16",
    },
}
"""What does not equal float32 weights, and why."""
LONG = ("0 compile", "5 saving", "8 leaving")
SECTIONS = [
    pytest.param(section, marks=pytest.mark.long) if section in LONG else section
    for section in PROPERTIES
]


class Product(torch.autograd.Function):
    """A layer's product with the half that our layers take."""

    @staticmethod
    def forward(ctx, input, high):
        ctx.save_for_backward(input, high)
        return weight_prototypes.product(input, high)

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            raise NotImplementedError("refused: a higher-order gradient through an FP8 layer")
        input, high = ctx.saved_tensors
        return (grad @ high).to(input.dtype), grad.t() @ input.to(torch.bfloat16)


class Layer(weight_prototypes.HalfLinear):
    def forward(self, input):
        if isinstance(self.weight, SplitTensor):
            return Product.apply(input, half(self.weight))
        return super().forward(input)


class Built(weight_prototypes.Design):
    def convert(self, model):
        for module in model.modules():
            if type(module) is weight_prototypes.HalfLinear:
                module.__class__ = Layer
        super().convert(model)

    def convert_parameter(self, parameter):
        split_parameter(parameter, EXACT_BITS, 8)

    def joined(self, x):
        return plain(x).detach()

    def revert(self, model):
        for parameter in model.parameters():
            join_parameter(parameter)

    def write_step(self, parameter, weight):
        parameter.halves.write(weight)
        parameter.halves.settle((1, 2))

    def stamp(self, parameter):
        return parameter.halves.version


@pytest.fixture
def designs(monkeypatch):
    of_kit = Kit.plain
    encoded = (Encoded, EncodedView)

    def joined(kit, value):
        return of_kit(kit, pytree.tree_map_only(encoded, plain, value))

    monkeypatch.setattr(Kit, "plain", joined)
    monkeypatch.setitem(weight_designs.DESIGNS, "built", Built())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("section", SECTIONS)
def test_a_weight_is_what_float32_is(designs, section, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    different = {}
    for name, function in PROPERTIES[section].items():
        if name.endswith("inductor"):  # the graph is AOTAutograd's
            continue
        outcomes = [weight_designs.measured(design, function) for design in ("built", "stock")]
        result = weight_designs.verdict(*outcomes, NEAR.get(f"{section}/{name}", 0.0))
        if result not in ("ok", "refused"):
            different[name] = result
    assert different.keys() == DIFFERENT.get(section, {}).keys(), different
