import copy
import warnings

import pytest
import torch
from torch import nn

import torch_fp8
from tests.internals import Float8FrozenWeight, LinearFunction, convert_producers
from tests.steps import through_a_file
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8, freeze, memory_report, thaw


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 128)
        self.up = nn.Linear(128, 208)
        self.down = nn.Linear(208, 128, bias=False)
        self.lm_head = nn.Linear(128, 64, bias=False)

    def forward(self, ids):
        return self.lm_head(self.down(self.up(self.embed(ids)).relu()))


IDS = torch.arange(48).view(2, 24)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise", "mxfp8"])
def test_a_frozen_model_takes_a_byte_and_runs_block_scales(recipe):
    model = Net()
    stock = copy.deepcopy(model)
    weights = [model.up.weight, model.down.weight]
    report = freeze(model, FP8Config(recipe=recipe))
    assert report.frozen == ("up", "down")
    assert report.bytes_after <= 1.02 * report.num_params
    assert report.recipe.name == "blockwise"
    assert model.up.weight is weights[0], "the Parameters are the same objects"
    assert model.down.weight is weights[1]
    assert "Float8" in type(model.up).__name__
    assert model.up.fp8.recipe.name == "blockwise"
    counted = memory_report(model)
    others = 4 * (2 * 64 * 128 + 208)
    assert counted.weights == others + 2 * 128 * 208
    assert counted.scales == 4 * (2 + 2)
    assert (model(IDS) - stock(IDS)).norm() / stock(IDS).norm() < 0.08


@pytest.mark.parametrize("is_converted", [False, True])
def test_norms_and_mlps_are_connected_once(monkeypatch, is_converted):
    model, connected = Net(), []
    if is_converted:
        convert_to_float8(model)

    def connect(model, config):
        connected.append(model)
        return convert_producers(model, config)

    for module in ("convert", "freeze"):
        monkeypatch.setattr(f"torch_fp8.conversion.{module}.convert_producers", connect)
    assert freeze(model).frozen == ("up", "down")
    assert connected == [model]
    thaw(model)
    assert connected == [model] * 2


def test_backward_takes_no_wgrad_and_keeps_nothing_for_it(spy):
    model = Net()
    freeze(model, FP8Config(recipe="tensorwise"))
    from tests.internals import linear_function

    def shapes(a, b, *_, **options):
        return tuple(a.qdata.shape), tuple(b.qdata.shape)

    products, saved = spy(linear_function, "scaled_matmul", shapes), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        hidden = model.embed(IDS)
        out = model.up(hidden)
    assert products == [((48, 128), (208, 128))]
    kept = [t for t in saved if isinstance(t, torch.Tensor) and t.dtype == torch.float8_e4m3fn]
    assert kept == []
    out.sum().backward()
    assert products[1:] == [((48, 208), (128, 208))], "dgrad in FP8, no wgrad"
    assert model.embed.weight.grad is not None
    assert LinearFunction is linear_function.LinearFunction


def test_the_gradient_of_the_input_is_that_of_the_bytes():
    model = Net()
    freeze(model, FP8Config(recipe="blockwise"))
    x = torch.randn(32, 128, requires_grad=True)
    g = torch.randn(32, 208)
    model.up(x).backward(g)
    exact = g @ model.up.weight.dequantize().float()
    assert (x.grad - exact).norm() / exact.norm() < 0.04


def test_state_dict_is_plain_and_loads_in_stock_and_back():
    model = Net()
    stock = copy.deepcopy(model)
    keys = list(stock.state_dict())
    freeze(model, FP8Config(recipe="blockwise"))
    state = model.state_dict()
    assert list(state) == keys
    assert {type(v) for v in state.values()} == {torch.Tensor}
    assert state["up.weight"].dtype == torch.bfloat16
    stock.load_state_dict(through_a_file(state, weights_only=True))
    assert torch.equal(stock.up.weight, model.up.weight.dequantize().float())
    other = Net()
    freeze(other, FP8Config(recipe="blockwise"))
    for assign in (False, True):
        other.load_state_dict(state, assign=assign)
        weight = other.up.weight
        assert isinstance(weight, Float8FrozenWeight)
        assert torch.equal(weight.qdata.view(torch.uint8), model.up.weight.qdata.view(torch.uint8))
    with pytest.raises(RuntimeError, match=r"size mismatch for up\.weight"):
        other.load_state_dict({**state, "up.weight": torch.zeros(3, 3)})


def test_it_survives_moving_casting_copying_and_materialising():
    model = Net()
    freeze(model, FP8Config(recipe="blockwise"))
    bytes_before = model.up.weight.qdata.clone()
    names = [name for name, _ in model.named_parameters()]
    for move in (
        lambda m: m.to(torch.bfloat16),
        lambda m: m.half(),
        lambda m: m.double(),
        lambda m: m.float(),
        lambda m: m.to("cpu"),
        copy.deepcopy,
        lambda m: m.eval().train(),
    ):
        model = move(model)
        assert torch.equal(model.up.weight.qdata.view(torch.uint8), bytes_before.view(torch.uint8))
        assert model.up.weight.scale.dtype == torch.float32
        assert [name for name, _ in model.named_parameters()] == names
    state = model.state_dict()
    empty = copy.deepcopy(model).to("meta")
    assert empty.up.weight.device.type == "meta"
    assert isinstance(empty.up.weight, Float8FrozenWeight)
    for assign in (False, True):
        other = copy.deepcopy(empty)
        if not assign:
            other = other.to_empty(device="cpu")
        other.load_state_dict(state, assign=assign)
        assert torch.equal(other.up.weight.dequantize(), model.up.weight.dequantize())
        assert torch.equal(other(IDS), model(IDS))
        thaw(other)
        assert other.up.weight.dtype == torch.float32


def test_asking_for_gradients_thaws_with_one_warning():
    model = Net()
    freeze(model, FP8Config(recipe="delayed"))
    model = copy.deepcopy(model)
    up = model.up.weight
    values = up.dequantize().float()
    with pytest.warns(UserWarning, match="'up.weight' was stored in FP8 only") as told:
        model.requires_grad_(True)
    assert len(told) == 1
    assert model.up.weight is up
    assert not isinstance(up, Float8FrozenWeight)
    assert up.dtype == torch.float32
    assert up.requires_grad
    assert torch.equal(up, values)
    assert model.up.fp8.recipe.name == "delayed"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    convert_optimizer(optimizer, FP8Config(recipe="delayed"), model=model)
    model(IDS).sum().backward()
    optimizer.step()
    assert not torch.equal(up.detach().float(), values)


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("converted", [False, True])
def test_an_optimizer_of_frozen_weights_is_an_error_that_names_them(order, converted):
    model = Net()
    if order == "before":
        optimizer = torch.optim.AdamW(model.parameters())
    freeze(model)
    if order == "after":
        optimizer = torch.optim.AdamW(model.parameters())
    model(IDS).sum().backward()
    message = r"AdamW has 'up\.weight' of Net, which torch_fp8\.freeze.*thaw\(model\)"
    with pytest.raises(ValueError, match=message):
        convert_optimizer(optimizer, model=model) if converted else optimizer.step()
    others = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    convert_optimizer(others, model=model) if converted else None
    others.step()
    thaw(model)
    model.requires_grad_(True)
    optimizer.step()


def test_weights_that_were_frozen_together_warn_once_of_lost_changes():
    model = Net()
    freeze(model)
    with pytest.warns(UserWarning, match=r"up\.weight is.*FP8Config\(frozen_weights='keep'\)"):
        model.up.weight.mul_(0.999)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.down.weight.mul_(0.999)


def test_thaw_and_revert_leave_nothing():
    model = Net()
    stock = copy.deepcopy(model)
    up = model.up.weight
    freeze(model, FP8Config(recipe="tensorwise"))
    assert thaw(model) == 2
    assert thaw(model) == 0
    assert model.up.fp8.recipe.name == "tensorwise"
    assert model.up.weight is up
    freeze(model)
    assert torch_fp8.revert(model) == 2
    assert type(model.up) is nn.Linear
    assert (model.up.weight - stock.up.weight).abs().max() < 0.01
    assert list(model.up.__dict__) == list(stock.up.__dict__)


def test_what_is_frozen_by_hand_is_stored_so_only_when_asked():
    model = Net()
    model.up.requires_grad_(False)
    assert convert_to_float8(model, FP8Config(recipe="blockwise")).frozen.frozen == ()
    report = convert_to_float8(model, FP8Config(recipe="blockwise", frozen_weights="fp8"))
    assert report.frozen.frozen == ("up",)
    assert "frozen    1 frozen weight stored in FP8 only, 1.00" in report.summary(model)
    again = convert_to_float8(model, FP8Config(recipe="blockwise", frozen_weights="fp8"))
    assert again.frozen.frozen == ("up",)
    report = convert_to_float8(model, FP8Config(recipe="blockwise", frozen_weights="keep"))
    assert report.frozen.frozen == ()
    assert not isinstance(model.up.weight, Float8FrozenWeight)


def test_level_1_leaves_weights_as_they_are():
    model = Net()
    with pytest.raises(ValueError, match=r"opt_level='O1'\) leaves frozen weights"):
        freeze(model, FP8Config(opt_level="O1"))
    with pytest.raises(ValueError, match=r"opt_level='O1' excludes frozen_weights='fp8'"):
        FP8Config(opt_level="O1", frozen_weights="fp8")


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_and_those_that_share_memory_stay(tied):
    model = Net()
    model.again = nn.Linear(128, 208)
    model.again.weight = model.up.weight if tied else nn.Parameter(model.up.weight.detach())
    report = freeze(model, FP8Config(recipe="blockwise"))
    assert report.frozen == ("down",)
    assert set(dict(report.kept)) == {"up", "again"}
    assert not tied or dict(report.kept)["up"] == "its weight is shared with another module"
    assert type(model.up.weight) is not Float8FrozenWeight


def test_evaluation_in_high_precision_reads_the_bytes():
    model = Net()
    freeze(model, FP8Config(recipe="blockwise", eval_fp8=False))
    model.eval()
    expected = copy.deepcopy(model)
    thaw(expected)
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            assert torch.allclose(model(IDS), expected(IDS), rtol=2e-2, atol=4e-3)


@pytest.mark.parametrize("shape", [(16, 16), (129, 131), (300, 16), (17, 400)])
def test_odd_shapes(shape):
    layer = nn.Sequential(nn.Linear(shape[1], shape[0]))
    stock = copy.deepcopy(layer)
    freeze(layer, FP8Config(recipe="blockwise"))
    x = torch.randn(5, shape[1], requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert (y - stock(x)).norm() / stock(x).norm() < 0.08
    assert x.grad.isfinite().all()
