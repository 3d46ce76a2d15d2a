import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.internals import Float8GatedMLP, sqnr_db
from tests.steps import Calls, adamw, gaussian, renew_scales, saved_bytes, train
from tests.torch_fp8.block_models import MLP, Adapter, JoinedMLP
from torch_fp8 import (
    FP8Config,
    convert_to_float8,
    freeze,
    load_scaling_state_dict,
    scaling_state_dict,
)
from torch_fp8.ops.swiglu import swiglu

RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8")
SIZE, INNER, ALIGNED = 64, 512, 3


class GeGLU(MLP):
    def forward(self, x):
        gate = F.gelu(self.gate_proj(x), approximate="tanh")
        return self.down_proj(gate * self.up_proj(x))


def _stock(cls=MLP, aligned=1.0, dtype=torch.bfloat16):
    torch.manual_seed(0)
    model = nn.Sequential(nn.RMSNorm(SIZE, eps=1e-5), cls(SIZE, INNER)).to(dtype)
    if aligned != 1:
        gate, up = model[1].gate_proj.weight, model[1].up_proj.weight
        with torch.no_grad():
            up[ALIGNED] = gate[ALIGNED]
            for weight in (gate, up):
                weight[ALIGNED] *= aligned
    return model


def _model(cls=MLP, aligned=1.0, dtype=torch.bfloat16, opt_level="O1", **options):
    model = _stock(cls, aligned, dtype)
    options = {"recipe": "tensorwise", "smooth_swiglu": True, **options}
    convert_to_float8(model, FP8Config(opt_level=opt_level, **options))
    return model


def _worst_rows(want, got):
    """SQNR in dB of the median row: one row of outliers would hide what the others lost."""
    want, got = want.float(), got.float()
    noise = (got - want).square().sum(-1)
    return (10 * torch.log10(want.square().sum(-1) / noise)).median().item()


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_is_swiglu_to_rounding(recipe):
    """A power of two changes no mantissa: where the others' scales are such, it changes nothing."""
    x = gaussian(96, SIZE)
    want = train(_stock().double(), x.double())
    plain = train(_model(recipe=recipe, smooth_swiglu=False), x)
    smooth = train(_model(recipe=recipe), x)
    assert sqnr_db(want[0], smooth[0].double()) > sqnr_db(want[0], plain[0].double()) - 0.5
    assert sqnr_db(want[1], smooth[1].double()) > sqnr_db(want[1], plain[1].double()) - 0.5
    for name, grad in want[2].items():
        floor = sqnr_db(grad, plain[2][name].double()) - 0.5
        assert sqnr_db(grad, smooth[2][name].double()) > floor, name
    if recipe in ("rowwise", "mxfp8"):
        assert sqnr_db(plain[0], smooth[0]) > 40


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_an_aligned_channel_leaves_the_others_their_bits(recipe):
    """200 times larger in gate and up: forward and the weight's gradient, row by row."""
    x = gaussian(512, SIZE)
    want = train(_stock(aligned=200.0), x)
    found = {}
    for smooth in (False, True):
        model = _model(aligned=200.0, recipe=recipe, smooth_swiglu=smooth)
        y, _, grads = train(model, x)
        down = "1.down_proj.weight"
        found[smooth] = _worst_rows(want[0], y), _worst_rows(want[2][down].t(), grads[down].t())
    assert max(found[False]) < 10
    assert min(found[True]) > 21


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise"])
@pytest.mark.parametrize("cls", [MLP, JoinedMLP], ids=["two", "one"])
def test_fused_and_unfused_have_the_same_bytes(recipe, cls):
    fused, unfused = _model(cls, recipe=recipe), _model(cls, recipe=recipe)

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self._modules = unfused[1]._modules

        def forward(self, x):
            if cls is JoinedMLP:
                gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
            else:
                gate, up = self.gate_proj(x), self.up_proj(x)
            return self.down_proj(swiglu(gate[0], up[0], None)[None])

    x = gaussian(1, 96, SIZE)
    with Calls() as calls, torch.no_grad():
        want = nn.Sequential(unfused[0], Plain())(x)
        calls.names.clear()
        got = fused(x)
    assert torch.equal(want, got)
    assert calls.names.count("swiglu_save_columns") == 1
    assert "swiglu" not in calls.names


def test_one_read_finds_the_channels_and_saves_gate_and_up():
    for recipe in ("tensorwise", "delayed"):
        model = _model(recipe=recipe)
        train(model, gaussian(32, SIZE))
        renew_scales()
        with Calls() as calls:
            train(model, gaussian(32, SIZE))
        assert calls.names.count("swiglu_save_columns") == 1
        assert calls.names.count("swiglu_quantize") == 1
        assert "swiglu_save" not in calls.names
        assert calls.names.count("column_amax") == 1  # of the weight
    same = [saved_bytes(_model(smooth_swiglu=s), gaussian(32, SIZE)) for s in (False, True)]
    assert same[1] - same[0] < 5 * INNER * 4


@pytest.mark.parametrize("cls", [GeGLU, JoinedMLP], ids=["gelu", "one layer"])
def test_other_gated_mlps_are_found(cls):
    model = _stock(cls)
    report = convert_to_float8(model, FP8Config(recipe="tensorwise", smooth_swiglu=True))
    assert report.smooth == ("1.down_proj",)
    assert "  smooth    1 down projections of gated MLPs" in str(report)
    assert isinstance(model[1], Float8GatedMLP) == (cls is JoinedMLP)
    want, got = train(_stock(cls), gaussian(64, SIZE)), train(model, gaussian(64, SIZE))
    assert sqnr_db(want[0], got[0]) > 22


def test_a_model_without_gated_mlps_is_told():
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, SIZE))
    report = convert_to_float8(model, FP8Config(recipe="tensorwise", smooth_swiglu=True))
    assert report.smooth == ()
    assert "smooth_swiglu=True changes nothing: no gated MLP" in str(report)


def test_single_layers_by_overrides():
    model = nn.Sequential(MLP(SIZE, INNER), MLP(SIZE, INNER))
    config = FP8Config(recipe="delayed", overrides={"1": {"smooth_swiglu": True}})
    report = convert_to_float8(model, config)
    assert report.smooth == ("1.down_proj",)
    assert report.unfused == ()
    config = FP8Config(recipe="tensorwise", graph_scales="last_step", smooth_swiglu=True)
    convert_to_float8(model, config)
    assert model[1].down_proj.fp8.scaling is None  # its factors are of the current input
    with pytest.raises(ValueError, match="backend='transformer-engine' excludes smooth_swiglu"):
        FP8Config(smooth_swiglu=True, backend="transformer-engine")


def test_state_dict_and_histories_are_those_without():
    models = [_model(recipe="delayed", smooth_swiglu=smooth) for smooth in (False, True)]
    assert models[0].state_dict().keys() == models[1].state_dict().keys()
    for model in models:
        model(gaussian(32, SIZE)).sum().backward()
    plain, smooth = (scaling_state_dict(model) for model in models)
    down = "1.down_proj.amax_history"
    assert torch.equal(plain[down][:2], smooth[down][:2])  # input and weight as they are
    load_scaling_state_dict(models[0], smooth)
    before = models[0].state_dict()
    convert_to_float8(models[1], FP8Config(recipe="delayed", opt_level="O1"))
    assert not models[1][1].down_proj.fp8.recipe.smooth
    assert all(torch.equal(v, before[k]) for k, v in models[1].state_dict().items())


def test_a_frozen_down_projection():
    x, frozen, trained = gaussian(64, SIZE), _model(), _model()
    frozen[1].down_proj.weight.requires_grad_(False)
    want, got = train(trained, x), train(frozen, x)
    assert torch.equal(want[0], got[0])
    assert torch.equal(want[1], got[1])
    assert got[2]["1.down_proj.weight"] is None


def test_down_projections_stored_as_fp8_alone_and_behind_an_adapter():
    stock = _stock(aligned=200.0).requires_grad_(False)
    plain = copy.deepcopy(stock)
    plain[1].down_proj = Adapter(plain[1].down_proj)
    model = copy.deepcopy(plain)
    options = {"skip": ("lora_A", "lora_B"), "smooth_swiglu": True}
    convert_to_float8(model, FP8Config(recipe="tensorwise", **options))
    assert freeze(model).frozen == ("1.gate_proj", "1.up_proj", "1.down_proj.base_layer")
    assert model[1].down_proj.base_layer.fp8.recipe.smooth
    x = gaussian(128, SIZE)
    want, got = train(plain, x), train(model, x)
    assert _worst_rows(want[0], got[0]) > 20
    assert {n for n, g in got[2].items() if g is not None} == {
        f"1.down_proj.lora_{part}.weight" for part in "AB"
    }
    assert sqnr_db(want[1], got[1]) > 15


@pytest.mark.parametrize("cached", [False, True])
def test_a_payload_that_is_kept_serves_dgrad_alone(cached):
    config = FP8Config(recipe="tensorwise", smooth_swiglu=True, cache_weights=cached)
    model = _stock().float()
    optimizer, _ = adamw(model, config, lr=1e-2)
    losses = []
    for _ in range(6):
        loss = (model(gaussian(64, SIZE)) - 1).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    with torch.no_grad():
        model.eval()
        first = model(gaussian(8, SIZE))
        assert torch.equal(first, model(gaussian(8, SIZE)))
        model[1].down_proj.weight.mul_(2)
        assert sqnr_db(2 * first, model(gaussian(8, SIZE))) > 25
