import copy
import pickle
import warnings

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("peft")

from peft import LoHaConfig, LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from tests import fp8_checkpoints
from tests.fp8_checkpoints import tiny_llama
from tests.internals import MergeAware, merge_aware, split_parameter
from torch_fp8 import (
    FP8Config,
    convert_to_float8,
    export,
    high_precision,
    load_frozen,
    revert,
    rollout,
    weights_for_engine,
)
from torch_fp8.ops.quantize import dequantize

IDS = torch.arange(64).reshape(2, 32)
AWARE = FP8Config(recipe="blockwise", merge_aware=True)


def adapted(config=AWARE, changes=None, std=0.05, **options):
    options = {"target_modules": ["q_proj", "up_proj"], **options}
    return fp8_checkpoints.adapted(tiny_llama(**(changes or {})), config, std, **options)


def layers_of(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, MergeAware)}


def up(model):
    return model.base_model.model.model.layers[0].mlp.up_proj


@pytest.fixture
def folds(spy):
    return spy(MergeAware, "merged_weight", lambda layer, _: layer.base_layer.fp8.name)


@pytest.mark.parametrize("use_rslora", [False, True])
def test_gradients_are_those_of_the_merged_weight(use_rslora):
    """In float32, straight through the cast of the weight; activations are cast to FP8 as ever."""
    layer = up(adapted(use_rslora=use_rslora))
    x = torch.randn(3, 5, layer.in_features, requires_grad=True)
    a, b = (p["default"].weight for p in (layer.lora_A, layer.lora_B))
    g = torch.randn(3, 5, layer.out_features)
    y = layer(x)
    y.backward(g)
    merged = dequantize(layer.merged_weight("default"))
    flat, rows = x.detach().reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
    product = rows.t() @ flat * layer.scaling["default"]
    torch.testing.assert_close(b.grad, product @ a.t(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(a.grad, b.t() @ product, rtol=1e-4, atol=1e-4)
    for got, exact in ((y, x @ merged.t()), (x.grad, g @ merged)):
        assert (got - exact).norm() / exact.norm() < 0.04  # E4M3's, of activations and gradients


def test_under_autocast_gradients_are_near_those_of_float32():
    layer = up(adapted())
    x, g = torch.randn(64, layer.in_features), torch.randn(64, layer.out_features)
    layer(x).backward(g)
    exact = [p["default"].weight.grad.clone() for p in (layer.lora_A, layer.lora_B)]
    layer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.backward(g.bfloat16())
    for parts, want in zip((layer.lora_A, layer.lora_B), exact, strict=True):
        got = parts["default"].weight.grad
        assert got.dtype == torch.float32
        assert (got - want).norm() / want.norm() < 2.0**-7


@pytest.mark.parametrize("autocast", [False, True])
def test_the_export_is_what_the_forward_multiplies_by(tmp_path, autocast):
    model = adapted()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(IDS).logits
        trained = model.train()(IDS).logits
        kept = {n: m.merged_weight("default") for n, m in layers_of(model).items()}
    assert torch.equal(logits, trained)
    export(model, tmp_path / "out", adapters="merge")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert len(kept) == 4
    for name, payload in kept.items():
        name = f"{name.removeprefix('base_model.model.')}.weight"
        codes, scale = stored[name], stored[f"{name}_scale_inv"]
        assert torch.equal(codes.view(torch.uint8), payload.qdata.view(torch.uint8))
        assert torch.equal(scale, payload.scale)
    handed = dict(weights_for_engine(model, "fp8_per_block"))
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(handed[name].float(), dequantize(kept[f"base_model.model.{name[:-7]}"]))
    served = load_frozen(AutoModelForCausalLM, tmp_path / "out", "blockwise")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert torch.equal(served(IDS).logits, logits)
    for change in (model.base_model.merge_adapter, model.base_model.unmerge_adapter):
        change()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            assert torch.equal(model(IDS).logits, logits)


def test_each_forward_folds_once_and_a_rollout_once_in_all(folds):
    model = adapted()
    for _ in range(2):
        model(IDS).logits.sum().backward()
    assert len(folds) == 2 * 4
    folds.clear()
    model.generate(input_ids=IDS[:, :4], max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert len(folds) == 4
    model.eval()
    with torch.no_grad():
        for _ in range(2):
            folds.clear()
            model(IDS)
            assert len(folds) == 4  # of plain adapters nobody can tell
        for layer in layers_of(model).values():
            for adapters in (layer.lora_A, layer.lora_B):
                split_parameter(adapters["default"].weight)
        model(IDS)
        for change in (
            lambda: up(model).lora_A["default"].weight.mul_(2),
            lambda: up(model).lora_B["default"].weight.data.mul_(2),
            lambda: up(model).base_layer.weight.mul_(2),
            lambda: up(model).set_scale("default", 3.0),
            torch.optim.SGD(up(model).lora_A.parameters(), lr=1.0, fused=True).step,
        ):
            before = model(IDS).logits
            folds.clear()
            change()
            assert not torch.equal(model(IDS).logits, before)
            assert folds == ["base_model.model.model.layers.0.mlp.up_proj.base_layer"]
        assert all(m.base_layer.fp8.payloads.payload is not None for m in layers_of(model).values())
    model(IDS)
    assert all(m.base_layer.fp8.payloads.payload is None for m in layers_of(model).values())


def test_the_summary_says_that_it_is_on():
    model = adapted(config=None)
    told = str(convert_to_float8(model, AWARE))
    assert f"; {len(layers_of(model))} LoRA layers multiply by the merged weight" in told
    plain = adapted(config=None)
    assert "merged weight" not in str(convert_to_float8(plain, FP8Config(recipe="blockwise")))


def test_adapters_switched_off_are_the_base():
    model, plain = adapted(), adapted(FP8Config(recipe="blockwise"))
    with torch.no_grad():
        with model.disable_adapter(), plain.disable_adapter():
            assert torch.equal(model(IDS).logits, plain(IDS).logits)
        assert not torch.equal(model(IDS).logits, plain(IDS).logits)


def test_checkpoints_copies_and_stock_classes_are_as_without_it():
    model, plain = adapted(), adapted(FP8Config(recipe="blockwise"))
    assert model.state_dict().keys() == plain.state_dict().keys()
    with torch.no_grad():
        logits = model(IDS).logits
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert len(layers_of(twin)) == 4
            assert torch.equal(twin(IDS).logits, logits)
    for undo in (lambda m: convert_to_float8(m, FP8Config(recipe="blockwise")), revert):
        model = adapted()
        undo(model)
        assert not layers_of(model)
        assert type(up(model)) is type(up(adapted(None)))
        assert type(up(model).lora_A["default"].weight) is nn.Parameter


def test_a_checkpointed_forward_has_the_same_gradients():
    gradients = []
    for options in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        model = adapted().train()
        if options is not None:
            model.enable_input_require_grads()
            model.base_model.model.gradient_checkpointing_enable(options)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(IDS, labels=IDS).loss
        loss.backward()
        gradients.append(up(model).lora_B["default"].weight.grad.clone())
    assert gradients[0].abs().max() > 0
    assert all(torch.equal(gradients[0], other) for other in gradients[1:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, "uses DoRA"),
        ({"lora_dropout": 0.1}, "lora_dropout=0.1, and dropout before the adapter only"),
        ({"lora_bias": True}, "trains a LoRA bias"),
    ],
    ids=["dora", "dropout", "bias"],
)
def test_adapters_that_make_no_one_weight_are_refused_by_name(options, message):
    name = "'base_model.model.model.layers.0.self_attn.q_proj'"
    changes = {"attention_bias": True, "mlp_bias": True} if "lora_bias" in options else None
    with pytest.raises(ValueError, match=rf"merge_aware=True\): {name} .*{message}"):
        adapted(changes=changes, **options)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="no FP8 layer of LlamaForCausalLM has an adapter"):
        convert_to_float8(tiny_llama(), AWARE)
    other = get_peft_model(
        tiny_llama(), LoHaConfig(r=4, target_modules=["up_proj"], rank_dropout=0.1)
    )
    with pytest.raises(ValueError, match="not LoRA; use LoraConfig"):
        convert_to_float8(other, AWARE)
    for options, message in (
        ({"opt_level": "O1"}, "opt_level='O1' excludes merge_aware=True: O1 leaves weights"),
        ({"frozen_weights": "keep"}, "merge_aware=True excludes frozen_weights='keep'"),
        ({"eval_fp8": False}, "merge_aware=True excludes eval_fp8=False"),
    ):
        with pytest.raises(ValueError, match=message):
            FP8Config(merge_aware=True, **options)
    several = adapted()
    several.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
    several.base_model.set_adapter(["default", "other"])
    with pytest.raises(ValueError, match=r"layers.0.self_attn.q_proj.* adapters 'default', 'oth"):
        several(IDS)
    several.base_model.set_adapter("other")
    several(IDS)
    thawed = adapted()
    with pytest.warns(UserWarning, match="is trained from now on"):
        up(thawed).base_layer.weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"up_proj.base_layer' is no longer an FP8 base"):
        thawed(IDS)


def test_what_is_folded_for_a_cuda_graph_is_not_kept(monkeypatch):
    model = adapted().eval()
    layer = up(model)
    x = torch.randn(1, layer.in_features)
    with torch.no_grad(), rollout(model):
        monkeypatch.setattr(merge_aware, "is_capturing", lambda _: True)
        layer(x)
        assert layer.base_layer.fp8.payloads.payload is None
        monkeypatch.undo()
        layer(x)
        assert layer.base_layer.fp8.payloads.payload is not None


def test_an_adapter_that_is_added_later_is_looked_at_too():
    """Its dropout would be left out without a word."""
    model = adapted()
    targets = ["q_proj", "up_proj"]
    model.add_adapter("plain", LoraConfig(r=4, target_modules=targets))
    model.add_adapter("dropping", LoraConfig(r=4, target_modules=targets, lora_dropout=0.5))
    model.set_adapter("dropping")
    with pytest.raises(ValueError, match=r"q_proj.*' has lora_dropout=0.5"):
        model(IDS)
    model.delete_adapter("dropping")
    model.set_adapter("plain")
    model(IDS).logits.sum().backward()
    assert up(model).lora_A["plain"].weight.grad is not None
    with torch.no_grad(), rollout(model):
        logits = [(model.set_adapter(n), model(IDS).logits)[1] for n in ("default", "plain")]
    assert not torch.equal(*logits)
    up(model).lora_dropout["plain"] = torch.nn.Dropout(0.25)
    with pytest.raises(ValueError, match=r"up_proj.*' has lora_dropout=0.25"):
        model(IDS)


def test_gradients_of_gradients_are_refused_by_name():
    layer = up(adapted())
    x = torch.randn(3, layer.in_features, requires_grad=True)
    y = layer(x).square().sum()
    with pytest.raises(RuntimeError, match=r"up_proj.*torch_fp8\.high_precision"):
        torch.autograd.grad(y, x, create_graph=True)


def test_peft_computes_transforms_exports_and_passes_in_high_precision(folds):
    layer = up(adapted())
    x = torch.randn(3, layer.in_features)
    with high_precision():
        want = layer(x)
        assert torch.equal(want, type(layer).__bases__[-1].forward(layer, x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batched = torch.func.vmap(layer)(x[:, None])[:, 0]
    torch.testing.assert_close(batched, want)
    for strict in (False, True):
        program = torch.export.export(layer, (x,), strict=strict)
        torch.testing.assert_close(program.module()(x), want)
    assert not folds
