"""``loss_head="auto"``: which layers run in FP8, when that is decided, and what changes it."""

import copy
import dataclasses
import warnings

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.internals import Float8FrozenWeight, OutputLayer, logit_losses
from tests.torch_fp8.loss_head.logits_cases import (
    LanguageModel,
    Largest,
    V,
    batch,
    is_fused,
    small_chunks,
)
from torch_fp8 import FP8Config, Monitor, convert_optimizer, convert_to_float8, revert

SHAPE = (4, 96)


@pytest.fixture(autouse=True)
def _chunks(monkeypatch):
    small_chunks(monkeypatch)


def _model(frozen=True, **options):
    torch.manual_seed(0)
    model = LanguageModel(**options)
    model.lm_head.weight.requires_grad_(not frozen)
    return model


def _heads(model, **options):
    return dict(convert_to_float8(model, FP8Config("tensorwise", **options)).loss_heads)


def _step(model):
    tokens, labels = batch(0, SHAPE)
    with Largest() as largest, torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(tokens).float().view(-1, V), labels.view(-1))
        loss.backward()
    return loss.detach(), largest.numel


def test_frozen_layers_of_trained_models_run_in_fp8():
    assert _heads(_model()) == {"lm_head": "fp8"}
    assert _heads(_model(frozen=False)) == {"lm_head": "bf16"}
    assert _heads(_model().requires_grad_(False)) == {"lm_head": "bf16"}  # a reference, perhaps
    tied = _model(tied=True)
    assert tied.embed.weight is tied.lm_head.weight
    assert _heads(tied) == {"lm_head": "fp8"}
    assert type(tied.embed) is nn.Embedding


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"loss_head": "bf16"}, {"lm_head": "bf16"}),
        ({"loss_head": "off"}, {}),
        ({"skip": ("lm_head", "inner.x")}, {"lm_head": "fp8"}),
        ({"skip": ("*_head",)}, {}),
        ({"overrides": {"lm_head": None}}, {}),
        ({"skip": (), "overrides": {"lm_head": {"recipe": "rowwise"}}}, {}),
        ({"loss_head": "fp8", "overrides": {"lm_head": {"recipe": "rowwise"}}}, {}),
        ({"loss_head": "fp8", "overrides": {"lm_head": {"eval_fp8": False}}}, {"lm_head": "fp8"}),
    ],
    ids=str,
)
def test_what_names_the_layer_wins(options, kind):
    assert _heads(_model(), **options) == kind


def test_an_override_runs_the_layer_as_it_says():
    model = _model(frozen=False)
    _heads(model, loss_head="fp8", overrides={"lm_head": {"recipe": "rowwise"}})
    assert model.lm_head.fp8.recipe.name == "rowwise"
    assert not isinstance(model.lm_head, OutputLayer)


def test_the_conversion_decides_and_training_warns_once():
    model = _model()
    _heads(model)
    copied = copy.deepcopy(model)
    for each in (model, copied):
        each.lm_head.weight.requires_grad_(True)
        with pytest.warns(UserWarning, match=r"'lm_head' was frozen .*loss_head='bf16'"):
            _step(each)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _step(each)
        assert each.lm_head.weight.grad.any()
    assert _heads(model) == {"lm_head": "bf16"}, "another conversion decides again"
    frozen_later = _model(frozen=False)
    _heads(frozen_later)
    frozen_later.lm_head.weight.requires_grad_(False)
    assert frozen_later.lm_head._precision == "bf16"


def test_a_warning_of_a_graph():
    model = _model()
    _heads(model)
    compiled = torch.compile(model, backend="eager")
    compiled(batch()[0])
    model.lm_head.weight.requires_grad_(True)
    with pytest.warns(UserWarning, match="'lm_head' was frozen"):
        compiled(batch()[0])


def test_a_second_conversion_of_a_model_that_no_longer_trains_changes_nothing():
    model = _model()
    _heads(model)
    model.requires_grad_(False)
    assert _heads(model) == {"lm_head": "fp8"}
    revert(model)
    assert _heads(model) == {"lm_head": "bf16"}


def test_trained_fp8_layers_are_no_layers_that_a_program_bypasses():
    config, model = FP8Config("tensorwise", loss_head="fp8"), _model(frozen=False)
    convert_to_float8(model, config)
    optimizer = torch.optim.AdamW(model.parameters())
    convert_optimizer(optimizer, config, model=model)
    _step(model)
    assert model.lm_head.fp8.called  # a graph of another test would suppress the warning
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
def test_the_monitor_measures_operands_of_a_few_tokens_and_changes_no_gradient(frozen, monkeypatch):
    monkeypatch.setattr(logit_losses, "_OBSERVED", 8)
    model, logged = _model(frozen), {}
    stock = copy.deepcopy(model)
    config = FP8Config("tensorwise", opt_level="O1", monitor=2, loss_head="fp8")
    convert_to_float8(stock, dataclasses.replace(config, monitor=0))
    convert_to_float8(model, config)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad])
    Monitor(model, [optimizer], config, log=lambda values, _: logged.update(values))
    others = torch.optim.SGD([p for p in stock.parameters() if p.requires_grad])
    for _ in range(4):
        loss, numel = _step(model)
        assert torch.equal(loss, _step(stock)[0])
        assert is_fused(numel, SHAPE)
        for got, want in zip(model.parameters(), stock.parameters(), strict=True):
            assert (got.grad is None) == (want.grad is None)
            assert got.grad is None or torch.equal(got.grad, want.grad)
        optimizer.step()
        others.step()
    for operand in ("input", "weight", "grad_output"):
        assert logged[f"fp8/lm_head/{operand}/sqnr"] > 15
    assert torch.isfinite(torch.tensor(list(logged.values()))).all()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_lora_stores_the_layer_with_the_scale_of_its_products(tied):
    model = get_peft_model(_model(tied=tied), LoraConfig(r=4, target_modules=["inner"]))
    losses = []
    for loss_head in ("bf16", "auto"):
        adapted = copy.deepcopy(model)
        report = convert_to_float8(adapted, FP8Config("tensorwise", loss_head=loss_head))
        loss, numel = _step(adapted)
        losses.append(loss)
        assert is_fused(numel, SHAPE)
        assert all(p.grad is None for n, p in adapted.named_parameters() if "lora" not in n)
    assert list(report.loss_heads.values()) == ["fp8"]
    head = adapted.base_model.model.lm_head
    if tied:  # the embedding reads the same Parameter
        assert type(head.weight) is nn.Parameter
        assert head.weight is adapted.base_model.model.embed.weight
    else:
        assert isinstance(head.weight, Float8FrozenWeight)
        assert head.weight.payload.spec.granularity == "tensorwise"
    torch.testing.assert_close(losses[1], losses[0], rtol=5e-3, atol=0)
    assert adapted.eval()(batch()[0]).shape == (4, 24, V)
