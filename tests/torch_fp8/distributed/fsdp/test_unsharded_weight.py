import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from tests.internals import (
    RECIPES,
    CastOptions,
    Payload,
    UnshardedFloat8Weight,
    make_recipe,
    sqnr_db,
    transposed_or_recast,
    worst_row_sqnr_db,
)
from torch_fp8 import FP8Config, convert_to_float8
from torch_fp8.ops.quantize import dequantize, quantize, quantize_layouts


def spread(rows=192, cols=160):
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(0))
    return x * 2.0 ** torch.linspace(-8, 8, rows)[:, None]


def gathered(x, spec, dtype=torch.float32):
    whole = quantize(x, spec)
    return UnshardedFloat8Weight(Payload(whole.qdata, whole.scale, spec), dtype)


@pytest.mark.parametrize("kind", ["even", "spread"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_transposed_weight_is_as_exact_as_a_cast_of_its_own(recipe, kind):
    """Within 0.1 dB, where codes are rounded a second time."""
    spec = make_recipe(recipe).weight
    x = spread() if kind == "spread" else torch.randn(192, 160)
    _, direct = quantize_layouts(x, CastOptions.of(spec, rowwise=False, columnwise=True))
    col = transposed_or_recast(gathered(x, spec).rowwise(), spec)
    assert col.qdata.shape == (160, 192)
    assert col.qdata.is_contiguous()
    made, best = dequantize(col), dequantize(direct)
    assert sqnr_db(x.t(), made) >= sqnr_db(x.t(), best) - 0.1
    assert worst_row_sqnr_db(x.t(), made) >= worst_row_sqnr_db(x.t(), best) - 0.3


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_where_scales_are_symmetric_the_transposed_codes_are_the_codes(recipe):
    spec = make_recipe(recipe).weight
    weight = gathered(spread(), spec)
    _, direct = quantize_layouts(spread(), CastOptions.of(spec, rowwise=False, columnwise=True))
    col = transposed_or_recast(weight.rowwise(), spec)
    assert torch.equal(col.qdata.view(torch.uint8), direct.qdata.view(torch.uint8))
    assert torch.equal(col.scale, direct.scale)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_takes_it_as_it_would_take_the_weight(recipe):
    layer = nn.Linear(64, 96)
    convert_to_float8(layer, FP8Config(recipe=recipe, emulate=True))
    made = []
    for weight in (layer.weight.detach(), gathered(layer.weight.detach(), layer.fp8.recipe.weight)):
        if isinstance(weight, UnshardedFloat8Weight):
            weight.payload.amax = weight.dequantize().abs().amax()
            layer.restart()
        layer.weight = nn.Parameter(weight)
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = layer(x)
        y.square().sum().backward()
        made.append((y.detach(), layer.weight.grad, x.grad))
    (y, weight_grad, input_grad), others = made
    assert torch.equal(y, others[0])
    assert torch.equal(weight_grad, others[1])
    assert type(others[1]) is torch.Tensor
    if recipe in ("rowwise", "mxfp8"):
        assert sqnr_db(input_grad, others[2]) > 40
    else:
        assert torch.equal(input_grad, others[2])


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(64, 96), nn.Linear(64, 96)
        self.down = nn.Linear(96, 64)

    def forward(self, x):
        return self.down(self.gate(x).relu() * self.up(x))


@pytest.mark.long
@pytest.mark.parametrize("recipe", [pytest.param("tensorwise", marks=pytest.mark.smoke), "rowwise"])
def test_compiled_layers_take_it_in_one_graph_and_keep_no_copy(recipe):
    model = Gated()
    convert_to_float8(model, FP8Config(recipe=recipe))
    for layer in model.children():
        layer.weight = nn.Parameter(gathered(layer.weight.detach(), layer.fp8.recipe.weight))
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    partition = min_cut_rematerialization_partition
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=partition)
    made = []
    for function in (model, torch.compile(model, fullgraph=True, backend=backend)):
        model.zero_grad()
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = function(x)
        y.square().sum().backward()
        made.append((y, x.grad, *(p.grad for p in model.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))
    (results,) = (n.args[0] for n in graphs[0].graph.nodes if n.op == "output")
    kept = [n for n in results if isinstance(n, torch.fx.Node) and n.op != "placeholder"]
    assert all(n.meta["val"].numel() < 64 * 96 for n in kept)


def test_it_reads_as_a_tensor_of_its_dtype():
    weight = gathered(spread(), make_recipe("tensorwise").weight, torch.bfloat16)
    plain = weight.dequantize()
    assert weight.dtype == plain.dtype == torch.bfloat16
    assert type(weight + 0) is torch.Tensor
    assert torch.equal(weight @ torch.eye(160, dtype=torch.bfloat16), plain)
    assert torch.equal(torch.cat([weight, weight])[192:], plain)
    assert type(weight.detach()) is UnshardedFloat8Weight
    assert weight.detach().payload is weight.payload
    assert type(weight.view(weight.shape)) is UnshardedFloat8Weight
    assert weight.view(-1).shape == (192 * 160,)
    assert torch.equal(weight.t(), plain.t())


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.mul_(2),
        lambda w: w.data.zero_(),
        lambda w: torch._foreach_mul_([w], 2.0),
        lambda w: torch.add(w, w, out=w),
        lambda w: nn.init.normal_(w),
    ],
)
def test_writing_it_is_an_error(write):
    weight = gathered(spread(), make_recipe("tensorwise").weight)
    with torch.no_grad(), pytest.raises(RuntimeError, match="write to the sharded parameter"):
        write(weight)
