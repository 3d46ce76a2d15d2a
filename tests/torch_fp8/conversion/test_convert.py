import pytest
import torch
from torch import nn

import torch_fp8
from tests.internals import of_text
from tests.tied_model import LINEARS, Model
from torch_fp8 import Float8Linear, FP8Config, convert_to_float8


def test_converts_in_place_with_the_same_parameters():
    model = Model()
    model.layers[0]["up"].weight.requires_grad_(False)
    before = dict(model.named_parameters())
    keys = list(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters())
    report = convert_to_float8(model, FP8Config(recipe="delayed"))
    assert report.converted == LINEARS
    assert report.skipped == (("lm_head", "skip='lm_head'"),)
    after = dict(model.named_parameters())
    assert all(before[name] is after[name] for name in before)
    assert list(model.state_dict()) == keys
    assert model.lm_head.weight is model.embed.weight
    assert not model.layers[0]["up"].weight.requires_grad
    model(torch.arange(48).view(2, 24)).logsumexp(-1).sum().backward()
    old = model.layers[1]["up"].weight.clone()
    optimizer.step()
    assert not torch.equal(old, model.layers[1]["up"].weight)


@pytest.mark.parametrize(
    ("thing", "how"),
    [
        (torch.optim.SGD(nn.Linear(2, 2).parameters()), r"got SGD; torch_fp8.convert_optimizer"),
        (Model, "got the class Model; pass an instance of the class"),
        ({"weight": torch.zeros(2)}, "takes an nn.Module, got dict"),
    ],
    ids=["optimizer", "class", "state dict"],
)
def test_what_is_no_model_is_told(thing, how):
    for convert in (convert_to_float8, torch_fp8.conversion_report):
        with pytest.raises(TypeError, match=how):
            convert(thing)


def test_converting_twice_changes_nothing():
    model = Model()
    config = FP8Config(recipe="delayed", amax_history_len=4)
    first = convert_to_float8(model, config)
    model(torch.arange(48).view(2, 24))
    history = model.layers[0]["up"].fp8_amax_history
    second = convert_to_float8(model, config)
    assert (first.converted, first.skipped) == (second.converted, second.skipped)
    assert model.layers[0]["up"].fp8_amax_history is history


def test_another_config_replaces_the_first():
    model = Model()
    convert_to_float8(model, FP8Config(recipe="delayed"))
    report = convert_to_float8(model, FP8Config(recipe="rowwise", skip=("lm_head", "layers.0")))
    assert report.converted == LINEARS[2:]
    assert type(model.layers[0]["up"]) is nn.Linear
    assert model.layers[1]["up"].fp8.recipe.name == "rowwise"
    assert not dict(model.named_buffers())


def test_a_bare_linear_is_converted_itself():
    linear = nn.Linear(32, 32)
    report = convert_to_float8(linear)
    assert type(linear) is Float8Linear
    assert report.converted == ("",)


def test_tied_linears_stay_tied():
    a = nn.Linear(32, 32)
    b = nn.Linear(32, 32)
    b.weight = a.weight
    shared = nn.Sequential(a, b, a)
    report = convert_to_float8(shared)
    assert report.converted == ("0", "1")
    assert shared[0] is shared[2]
    assert shared[0].weight is shared[1].weight


@pytest.mark.parametrize(
    ("recipe", "emulate", "emulated"),
    [("tensorwise", False, False), ("tensorwise", True, False), ("mxfp8", True, True)],
    ids=str,
)
def test_emulation_is_decided_at_conversion(monkeypatch, recipe, emulate, emulated):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H100")
    monkeypatch.setattr("torch_fp8.conversion.convert.check_driver", lambda device: None)
    model = Model()
    config = FP8Config(recipe=recipe, emulate=emulate)
    report = convert_to_float8(model, config, device="cuda:0")
    assert report.emulated is emulated
    assert model.layers[0]["up"].fp8.emulate is emulated
    backend = "emulation" if emulated else "torch scaled_mm"
    assert f"{backend} on NVIDIA H100 (sm_90)" in report.summary()
    assert convert_to_float8(Model()).emulated


def test_a_second_conversion_decides_on_emulation_anew_for_graphs_too(monkeypatch):
    model, config = Model(), FP8Config(recipe="rowwise", emulate=True)
    for native in (False, True):
        monkeypatch.setattr("torch_fp8.conversion.convert.runs_natively", lambda *_, n=native: n)
        convert_to_float8(model, config)
        fp8 = model.layers[0]["up"].fp8
        assert fp8.emulate is not native
        assert of_text(fp8.casts)[:3] == (fp8.recipe, False, not native)


def test_an_old_card_is_refused_before_anything_changes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA A100")
    model = Model()
    with pytest.raises(ValueError, match="A100"):
        convert_to_float8(model, device="cuda:0")
    assert not any(isinstance(m, Float8Linear) for m in model.modules())
