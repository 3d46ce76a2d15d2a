"""In graphs for CUDA the compiler sees products as torch's own operator, where they fit it.

The graphs are traced as for CUDA, and run on the CPU, which has the operator, too.
"""

from collections import Counter
from unittest import mock

import pytest
import torch
from torch import nn

from tests.compiled_graphs import graphs_of
from torch_fp8 import FP8Config, convert_to_float8
from torch_fp8.ops import registry

OURS, TORCHS = "torch_fp8.scaled_mm.default", "aten._scaled_mm.default"
BF16, FP32 = torch.bfloat16, torch.float32
NEEDS_SCALED_MM = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="the CPU of torch 2.11 rounds rowwise products otherwise"
)


def trained(recipe, tokens, features, dtype, bias, *, cuda, dynamic=False):
    """Return result and gradients of a compiled layer, and how often each operator multiplies."""
    torch.manual_seed(0)
    layer = nn.Linear(*features, bias=bias, dtype=dtype)
    x = torch.randn(tokens, features[0], dtype=dtype, requires_grad=True)
    convert_to_float8(layer, FP8Config(recipe=recipe))
    torch.compiler.reset()
    graphs = []
    compiled = torch.compile(layer, backend=graphs_of(graphs), dynamic=dynamic, fullgraph=True)
    # The operators of a card without FP8 stay whole, so that the CPU can run them.
    as_on_card = {"on_cuda": lambda x: cuda, "emulates_casts": lambda device: True}
    with mock.patch.multiple(registry, **as_on_card):
        y = compiled(x)
    y.sum().backward()
    targets = Counter(str(node.target) for graph in graphs for node in graph.graph.nodes)
    gradients = [p.grad for p in layer.parameters()]
    return [y, x.grad, *gradients], (targets[TORCHS], targets[OURS])


@NEEDS_SCALED_MM
@pytest.mark.parametrize(
    ("recipe", "tokens", "features", "dtype", "bias", "visible"),
    [
        pytest.param("tensorwise", 32, (64, 48), BF16, False, 3, id="tensorwise"),
        pytest.param("tensorwise", 7, (64, 48), BF16, True, 3, id="odd tokens, bias"),
        pytest.param("tensorwise", 32, (64, 48), FP32, True, 3, id="float32"),
        pytest.param("tensorwise", 32, (64, 20), BF16, True, 1, id="odd output features"),
        pytest.param("tensorwise", 32, (20, 64), BF16, True, 0, id="odd input features"),
        pytest.param("tensorwise", 0, (64, 48), BF16, True, 0, id="no tokens"),
        pytest.param("rowwise", 512, (64, 512), BF16, True, 3, id="rowwise"),
        pytest.param("rowwise", 511, (64, 512), BF16, False, 1, id="rowwise, few tokens"),
        pytest.param("rowwise", 512, (64, 512), FP32, False, 0, id="rowwise to float32"),
        pytest.param("blockwise", 128, (128, 128), BF16, False, 0, id="blocks"),
    ],
)
def test_torchs_operator_multiplies_what_fits_it(recipe, tokens, features, dtype, bias, visible):
    arguments = recipe, tokens, features, dtype, bias
    results, counts = trained(*arguments, cuda=True)
    expected, on_cpu = trained(*arguments, cuda=False)
    assert counts == (visible, 3 - visible)
    assert on_cpu == (0, 3)
    for result, value in zip(results, expected, strict=True):
        assert torch.equal(result, value)


def test_products_over_lengths_that_change_are_torchs_operator():
    """Padding makes the number of tokens a multiple of 16, of whatever size."""
    counts = trained("tensorwise", 32, (64, 48), BF16, True, cuda=True, dynamic=True)[1]
    assert counts == (3, 0)
