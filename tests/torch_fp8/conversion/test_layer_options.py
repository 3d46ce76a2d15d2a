import copy
import dataclasses
import json
import pickle
import warnings

import pytest
import torch

from tests.internals import Float8GatedMLP, Float8RMSNorm
from tests.torch_fp8.block_models import Model
from torch_fp8 import Float8Linear, FP8Config, convert_to_float8, freeze


def _model():
    torch.manual_seed(0)
    return Model()


def _config(recipe="tensorwise", opt_level="O1", **options):
    return FP8Config(recipe=recipe, opt_level=opt_level, **options)


def _recipes(model):
    return {
        name: module.fp8.recipe.name
        for name, module in model.named_modules()
        if isinstance(module, Float8Linear)
    }


def test_layers_get_the_options_of_the_last_pattern_that_matches():
    model = _model()
    overrides = {
        "layers.0": {"recipe": "blockwise", "wgrad": "bf16"},
        "layers.*.mlp.down_proj": {"recipe": "delayed", "margin": 2},
        "layers.0.mlp.down_proj": {"margin": 1},
        "layers.1.attention": None,
        "layers.1.mlp.up_proj": {"recipe": "bf16"},
    }
    report = convert_to_float8(model, _config(overrides=overrides))
    recipes = _recipes(model)
    assert recipes["layers.0.attention.q_proj"] == "blockwise"
    assert model.layers[0].attention.q_proj.fp8.recipe.wgrad is None
    downs = [layer.mlp.down_proj for layer in model.layers]
    assert [down.fp8.recipe.name for down in downs] == ["delayed", "delayed"]
    assert [down.fp8.config.margin for down in downs] == [1, 2]
    assert downs[0].fp8.recipe.wgrad is None  # of the first pattern
    assert recipes["layers.1.mlp.gate_proj"] == "tensorwise"
    assert not [name for name in recipes if name.startswith("layers.1.attention")]
    reasons = dict(report.skipped)
    assert reasons["layers.1.mlp.up_proj"] == "overrides={'layers.1.mlp.up_proj': bf16}"
    assert reasons["layers.1.attention.o_proj"] == "overrides={'layers.1.attention': bf16}"
    assert set(report.overridden) == set(recipes) - {"layers.1.mlp.gate_proj"}
    assert "  override  layers.0.attention.q_proj, " in str(report)
    assert "  override  layers.1.mlp.down_proj: delayed: input e4m3" in str(report)


@pytest.mark.parametrize("first_is_high", [True, False])
def test_the_last_pattern_says_whether_a_layer_is_in_high_precision(first_is_high):
    overrides = {"layers.1": None, "layers.1.mlp": {"recipe": "rowwise"}}
    if not first_is_high:
        overrides = dict(reversed(overrides.items()))
    model = _model()
    convert_to_float8(model, _config(overrides=overrides))
    second = {name: r for name, r in _recipes(model).items() if name.startswith("layers.1")}
    assert set(second.values()) == ({"rowwise"} if first_is_high else set())
    assert all(name.startswith("layers.1.mlp") for name in second)


def test_training_runs_and_a_layer_computes_what_it_would_alone():
    model, x = _model(), torch.randn(32, 64)
    plain = copy.deepcopy(model)
    convert_to_float8(model, _config(overrides={"layers.1.mlp": {"recipe": "rowwise"}}))
    y = model(x)
    y.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    alone = copy.deepcopy(plain.layers[1].mlp)
    convert_to_float8(alone, _config("rowwise"))
    x = torch.randn(32, 64)
    assert torch.equal(model.layers[1].mlp(x), alone(x))


def test_what_casts_differently_is_not_fused_and_the_summary_says_so():
    model = _model()
    overrides = {"layers.0.attention.k_proj": {"recipe": "delayed"}, "layers.1.mlp.up_proj": {}}
    overrides["layers.1.mlp.down_proj"] = {"recipe": "delayed", "margin": 1}
    report = convert_to_float8(model, _config("delayed", overrides=overrides))
    assert report.unfused == ("layers.1.mlp",)
    assert not isinstance(model.layers[1].mlp, Float8GatedMLP)
    assert isinstance(model.layers[0].mlp, Float8GatedMLP)
    assert "  not fused layers.1.mlp: the layers that read it have different recipes" in str(report)
    # One history for what a norm hands over would leave the other layer's margin out.
    overrides = {"layers.0.attention.k_proj": {"margin": 2}}
    report = convert_to_float8(model, _config("delayed", overrides=overrides))
    assert report.unfused == ("layers.0.attn_norm", "layers.0.mlp_norm")  # beside both
    attention = model.layers[0]
    assert attention.attn_norm.fp8.quantizer is None
    assert isinstance(attention.attn_norm, Float8RMSNorm)
    assert isinstance(model.layers[1].mlp, Float8GatedMLP)
    alone = _model().layers[0]
    convert_to_float8(alone.attention, _config("delayed", overrides={"k_proj": {"margin": 2}}))
    x = torch.randn(16, 64)
    got = attention.attention(attention.attn_norm(x))
    assert torch.equal(got, alone.attention(attention.attn_norm(x)))


def test_high_precision_leaves_norms_and_mlps_as_they_are():
    model = _model()
    report = convert_to_float8(model, _config(overrides={"layers.0": None}))
    kinds = (Float8Linear, Float8RMSNorm, Float8GatedMLP)
    assert not [m for m in model.layers[0].modules() if isinstance(m, kinds)]
    assert {name.partition(".mlp")[0] for name in report.producers} >= {"layers.1"}
    assert report.unfused == ()


def test_frozen_layers_keep_their_own_recipe():
    model = _model().requires_grad_(False)
    config = FP8Config(recipe="tensorwise", overrides={"layers.0": {"recipe": "rowwise"}})
    convert_to_float8(model, config)
    freeze(model)
    assert set(_recipes(model).values()) == {"blockwise"}
    assert isinstance(model.layers[0].mlp, Float8GatedMLP)


def test_an_unused_pattern_warns_with_the_nearest_names_once():
    overrides = {"layers.0.mlp.down_porj": None, "encoder": {"recipe": "rowwise"}}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = convert_to_float8(_model(), _config(overrides=overrides))
    (said,) = [str(w.message) for w in caught]
    assert "'layers.0.mlp.down_porj' (the nearest are 'layers.0.mlp.down_proj'" in said
    assert "'encoder'" in said
    assert report.unused_overrides == tuple(overrides)
    assert "pattern(s) of overrides 'layers.0.mlp.down_porj', 'encoder' match no" in str(report)


def test_goes_through_json_environment_copies_and_repr(monkeypatch):
    overrides = {"layers.0": {"recipe": "blockwise", "fast_accum": ["dgrad"]}, "layers.1": None}
    config = FP8Config(overrides=overrides)
    assert FP8Config.from_json(config.to_json()) == config == pickle.loads(pickle.dumps(config))
    assert copy.deepcopy(config) == config
    assert hash(copy.copy(config)) == hash(config)
    monkeypatch.setenv("TORCH_FP8_CONFIG", json.dumps({"overrides": overrides}))
    assert FP8Config.from_env() == config
    assert eval(repr(config)) == config
    assert dataclasses.replace(config, overrides={}) == FP8Config() != config
    with pytest.raises(TypeError, match="cannot be changed"):
        config.overrides["layers.2"] = None


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"overrides": ["a"]}, TypeError, "must map patterns to options"),
        ({"overrides": {"": None}}, TypeError, "non-empty string"),
        ({"overrides": {"a": "rowwise"}}, TypeError, "did you mean {'recipe': 'rowwise'}"),
        ({"overrides": {"a": {"seed": 1}}}, ValueError, "'seed' cannot differ between layers"),
        ({"overrides": {"a": {"recipe": "auto"}}}, ValueError, "'mxfp8', 'bf16'"),
        ({"overrides": {"a": {"recipe": "bf16", "wgrad": "fp8"}}}, ValueError, "'wgrad'; leave"),
        ({"overrides": {"a": {"margin": 1}}}, ValueError, "excludes margin; use recipe='delayed'"),
        ({"overrides": {"lm_head": {"recipe": "rowwise"}}}, ValueError, "skip=.'lm_head',"),
        (
            {"overrides": {"a": {"recipe": "mxfp8", "grad_format": "e5m2"}}},
            ValueError,
            "takes gradients in E4M3 only",
        ),
        (
            {"overrides": {"a": {"recipe": "delayed"}}, "backend": "transformer-engine"},
            ValueError,
            "which runs one recipe",
        ),
    ],
    ids=lambda value: "",
)
def test_mistakes_are_named(options, error, says):
    with pytest.raises(error, match=says) as raised:
        FP8Config(**options)
    if error is ValueError:
        assert "FP8Config.overrides['" in str(raised.value)


def test_options_of_several_patterns_that_exclude_each_other_name_the_layer():
    overrides = {"layers.0": {"recipe": "delayed"}, "layers.1.mlp": {"margin": 1}}
    with pytest.raises(ValueError, match=r"together, for 'layers.1.mlp.gate_proj': .* margin"):
        convert_to_float8(_model(), _config(overrides=overrides))


def test_another_recipe_does_not_take_over_what_belongs_to_this_one():
    config = FP8Config(
        recipe="delayed", margin=3, grad_format="e5m2", overrides={"a": {"recipe": "blockwise"}}
    )
    other = config.overridden(config.overrides["a"])
    assert (other.recipe, other.margin, other.grad_format) == ("blockwise", 0, None)
    assert config.overridden({"wgrad": "bf16"}).margin == 3
