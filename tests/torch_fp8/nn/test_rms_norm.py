import copy

import pytest
import torch
from torch import nn

from tests.internals import OF_TENSOR, CastOptions, LazyQuantizedTensor, Quantizer
from tests.torch_fp8.block_models import Norm
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8, revert
from torch_fp8.ops.quantize import quantize_layouts


def _x(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def _stack(*layers, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*layers).bfloat16()
    convert_to_float8(model, FP8Config(**options))
    return model


class Offset(Norm):
    """As Gemma's, in the dtype of x, and with an offset that each instance has."""

    def __init__(self, size, offset):
        super().__init__(size)
        self.offset = offset

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (y * (self.offset + self.weight.float())).type_as(x)


def test_each_instance_is_tried_with_its_own_attributes():
    norms = [Offset(48, offset) for offset in (1.0, 0.0, 2.0)]
    report = convert_to_float8(nn.Sequential(*norms, nn.Linear(48, 48)))
    assert report.producers == ("0", "1")
    assert [norm.fp8.spec.offset for norm in norms[:2]] == [1.0, 0.0]


@pytest.mark.parametrize("cls", [Norm, lambda size: Offset(size, 1.0)], ids=["Norm", "Offset"])
def test_of_mixed_dtypes_the_result_has_that_of_the_stock_norm(cls):
    norm = cls(64)
    want = norm(_x(4, 64)).dtype
    convert_to_float8(nn.Sequential(norm, nn.Linear(64, 64)))
    assert norm(_x(4, 64)).dtype == want


def test_inputs_of_other_dtypes_and_widths_are_the_norms_own_matter():
    model = _stack(Norm(64), nn.Linear(64, 64))
    stock = copy.deepcopy(model)
    revert(stock)
    for x in (_x(4, 64, dtype=torch.float64), _x(4, 1)):  # the second is broadcast
        y, want = model[0](x), stock[0](x)
        assert type(y) is torch.Tensor
        assert y.dtype == want.dtype
        assert torch.equal(y, want)


def test_a_second_conversion_counts():
    model = _stack(Norm(64), nn.Linear(64, 64))
    config = FP8Config(recipe="blockwise", save_activations="bf16")
    convert_to_float8(model, config)
    assert model[0].fp8.config is config
    assert model[0].fp8.quantizer.spec == model[1].fp8.recipe.input


def test_frozen_layers_get_no_transposed_blocks():
    layers = [nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 64)]
    for used, wanted in ((layers[:1], False), (layers, True)):
        norm = Norm(64)
        _stack(norm, *copy.deepcopy(used), recipe="blockwise")
        y = norm(_x(8, 64))
        ((row, col),) = y.production.payloads.values()
        assert row is not None
        assert (col is not None) == wanted
    norm = Norm(64)
    _stack(norm, copy.deepcopy(layers[1]), recipe="blockwise", wgrad="bf16")
    ((_, col),) = norm(_x(8, 64)).production.payloads.values()
    assert col is None


def test_a_reader_with_one_scale_behind_a_norm_that_casts_in_blocks():
    y = _stack(Norm(64), nn.Linear(64, 64), recipe="blockwise")[0](_x(8, 64))
    assert isinstance(y, LazyQuantizedTensor)
    spec = _stack(nn.Linear(64, 64))[0].fp8.recipe.input
    assert spec.granularity == "tensorwise"
    row, col = y.production.layouts(Quantizer(spec, OF_TENSOR), rowwise=True, columnwise=True)
    dense = y.production.producer.dense()
    want_row, want_col = quantize_layouts(
        dense, CastOptions.of(spec, rowwise=True, columnwise=True)
    )
    assert y.production.amax() == dense.abs().max()
    for got, want in ((row, want_row), (col, want_col)):
        assert torch.equal(got.qdata.view(torch.uint8), want.qdata.view(torch.uint8))
        assert torch.equal(got.scale, want.scale)


OPTIMIZERS = {
    "converted": lambda p: torch.optim.AdamW(p, lr=0.1),
    "stock": lambda p: torch.optim.SGD(p, lr=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "released": lambda p: torch.optim.AdamW(p, lr=0.1),
}


@pytest.mark.parametrize(
    ("name", "recipe"),
    [*((name, "delayed") for name in OPTIMIZERS), ("converted", "blockwise"), ("stock", "rowwise")],
)
def test_an_output_that_a_hook_kept_is_read_after_the_step(name, recipe):
    net, outputs = nn.Sequential(Norm(64), nn.Linear(64, 64)), []
    config = FP8Config(opt_level="O3", recipe=recipe, gradient_release=name == "released")
    convert_to_float8(net, config)
    optimizer = OPTIMIZERS[name](net.parameters())
    if name in ("converted", "released"):
        convert_optimizer(optimizer, config, model=net)
    net[0].register_forward_hook(lambda module, args, output: outputs.append(output))
    for _ in range(2):
        stock, before = copy.deepcopy(net), net[0].weight.detach().clone()
        revert(stock)
        expected = stock[0](_x(8, 64))
        outputs.clear()  # of the copy, which has the hook
        with torch.no_grad():
            net(_x(8, 64))
        net(_x(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert not torch.equal(net[0].weight, before)
        for output in outputs:
            assert isinstance(output, LazyQuantizedTensor)
            torch.testing.assert_close(output + 0, expected, rtol=0.01, atol=0)
        outputs.clear()
