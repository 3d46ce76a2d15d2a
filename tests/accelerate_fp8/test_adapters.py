import copy
import gc
import inspect
import sys

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from tests.fp8_checkpoints import LiveStorages
from tests.internals import Float8FrozenWeight, reasons_to_stay
from tests.models import llama_config
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8, freeze, memory_report

CONFIG = llama_config(num_hidden_layers=1, vocab_size=96)
IDS = torch.arange(64).view(2, 32)
KINDS = {
    "lora": LoraConfig(r=4, target_modules="all-linear", modules_to_save=["lm_head"]),
    "rslora": LoraConfig(r=4, target_modules="all-linear", use_rslora=True),
    "dora": LoraConfig(r=4, target_modules="all-linear", use_dora=True),
    "loha": peft.LoHaConfig(r=4, target_modules=["q_proj", "up_proj"]),
    "ia3": peft.IA3Config(
        target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
}


def adapted(kind="lora", dtype=torch.float32):
    model = get_peft_model(LlamaForCausalLM(CONFIG).to(dtype), copy.deepcopy(KINDS[kind]))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lm_head" not in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model, convert_to_float8(model, FP8Config(recipe="tensorwise"))


def up_proj(model):
    return model.base_model.model.model.layers[0].mlp.up_proj


def logits(model):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return model(IDS).logits


def step(model, optimizer):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(IDS, labels=IDS).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Lora", {"r": 16, "target_modules": "all-linear"}),
        ("Gralora", {"r": 32, "hybrid_r": 16, "target_modules": ["q_proj"]}),
        ("Lily", {"r": 16, "target_modules": ["q_proj", "up_proj"]}),
        ("Peanut", {"r": 16, "target_modules": ["q_proj", "up_proj"]}),
        ("Shadow", {"r": 16}),
        ("Supertuning", {"r": 16, "target_modules": ["q_proj", "up_proj"]}),
        ("PromptEncoder", {"num_virtual_tokens": 4, "encoder_hidden_size": 64}),
    ],
    ids=str,
)
def test_no_kind_of_adapter_runs_in_fp8(kind, options):
    if not hasattr(peft, f"{kind}Config"):
        pytest.skip(f"this PEFT has no {kind}")
    config = getattr(peft, f"{kind}Config")(task_type="CAUSAL_LM", **options)
    model = get_peft_model(LlamaForCausalLM(CONFIG), config)
    trained = {
        name.removesuffix(".weight") for name, p in model.named_parameters() if p.requires_grad
    }
    report = convert_to_float8(model, FP8Config(recipe="tensorwise"))
    assert len(report.converted) == 7
    assert trained.isdisjoint(report.converted)
    assert trained.intersection(report.adapters)
    reasons = reasons_to_stay(model, FP8Config())
    assert {reasons[p] for p in model.parameters() if p.requires_grad} == {"of adapters"}


@pytest.mark.parametrize("kind", KINDS)
def test_the_base_is_proven_frozen_and_the_adapters_train(kind):
    model, report = adapted(kind)
    assert len(report.frozen.frozen) == 7
    assert report.frozen.bytes_after <= 1.02 * report.frozen.num_params
    bases = [p for p in model.parameters() if isinstance(p, Float8FrozenWeight)]
    before = [p.qdata.clone() for p in bases]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    convert_optimizer(optimizer, model=model)
    losses = [step(model, optimizer) for _ in range(8)]
    assert losses[-1] < losses[0]
    for base, kept in zip(bases, before, strict=True):
        assert torch.equal(base.qdata.view(torch.uint8), kept.view(torch.uint8))
    assert all(p.dtype == torch.float32 for p in trained)
    assert memory_report(model).weights < 1.02 * sum(p.numel() for p in bases) + sum(
        4 * p.numel() for p in model.parameters() if not isinstance(p, Float8FrozenWeight)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_merged_weight_is_rounded_once(dtype):
    model, _ = adapted(dtype=dtype)
    layer = up_proj(model)
    base = layer.get_base_layer().weight.dequantize().float()
    delta = layer.get_delta_weight("default")
    for safe in (False, True):
        model.merge_adapter(safe_merge=safe)
        assert layer.get_base_layer().weight.dtype == dtype
        assert torch.equal(layer.get_base_layer().weight, (base + delta).to(dtype))
        model.unmerge_adapter()


@pytest.mark.parametrize("kind", ["lora", "dora", "loha", "ia3"])
def test_unmerging_gives_the_bytes_back(kind):
    model, _ = adapted(kind)
    before = logits(model)
    layer = (
        up_proj(model) if kind != "ia3" else model.base_model.model.model.layers[0].mlp.down_proj
    )
    weight = layer.get_base_layer().weight
    kept = weight.qdata.clone()
    for turn in range(20):
        model.merge_adapter(safe_merge=bool(turn % 2))
        assert type(layer.get_base_layer().weight) is torch.nn.Parameter
        if turn == 0:
            merged = logits(model)
        model.unmerge_adapter()
    assert (merged - before).norm() / before.norm() < 0.1
    assert layer.get_base_layer().weight is weight
    assert torch.equal(weight.qdata.view(torch.uint8), kept.view(torch.uint8))
    assert torch.equal(logits(model), before)


def test_a_broken_adapter_leaves_the_base_frozen():
    model, _ = adapted()
    layer = up_proj(model)
    torch.nn.init.constant_(layer.lora_B["default"].weight, float("nan"))
    kept = layer.get_base_layer().weight.qdata.clone()
    with pytest.raises(ValueError, match="NaNs detected"):
        layer.merge(safe_merge=True)
    weight = layer.get_base_layer().weight
    assert isinstance(weight, Float8FrozenWeight)
    assert torch.equal(weight.qdata.view(torch.uint8), kept.view(torch.uint8))


def test_peft_alone_warns_of_merges_into_fp8(monkeypatch):
    monkeypatch.delitem(sys.modules, "accelerate_fp8")
    with pytest.warns(UserWarning, match=r"PEFT would merge .*import accelerate_fp8.*thaw"):
        model, _ = adapted()
    layer = up_proj(model)
    stock = inspect.unwrap(type(layer).merge)  # as in a process that never had our extension
    torch.nn.init.normal_(layer.lora_B["default"].weight, std=1e-3)
    with pytest.warns(UserWarning, match=r"base_layer\.weight is stored in FP8 only, and add_"):
        stock(layer)


def test_a_base_that_holds_merged_adapters_is_not_frozen():
    model = get_peft_model(LlamaForCausalLM(CONFIG), copy.deepcopy(KINDS["rslora"]))
    layer = up_proj(model)
    torch.nn.init.normal_(layer.lora_B["default"].weight)
    base = layer.get_base_layer().weight.detach().clone()
    model.merge_adapter()
    kept = dict(freeze(model).kept)
    assert len(kept) == 7
    assert all("unmerge it before" in reason for reason in kept.values())
    model.unmerge_adapter()
    torch.testing.assert_close(layer.get_base_layer().weight.detach(), base)
    assert len(freeze(model).frozen) == 7
    model.merge_adapter()
    freeze(model)
    model.unmerge_adapter()
    torch.testing.assert_close(layer.get_base_layer().weight.float(), base, rtol=0.07, atol=1e-4)


@pytest.mark.parametrize("way", ["merge_and_unload", "unload"])
def test_merging_into_an_fp8_base_says_whose_rounding_stays(monkeypatch, way):
    lines = []
    monkeypatch.setattr("accelerate_fp8.adapters.warn_once", lines.append)
    model, _ = adapted()
    getattr(model, way)()
    told = [line for line in lines if "carry the rounding of the FP8 base" in line]
    assert len(told) == (way == "merge_and_unload")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_merge_and_unload_gives_the_dtype_of_the_base_and_lets_the_bytes_go(dtype):
    model, _ = adapted("rslora", dtype)
    expected = logits(model)
    merged = model.merge_and_unload()
    layer = merged.model.layers[0].mlp.up_proj
    assert {p.dtype for p in merged.state_dict().values()} == {dtype}
    assert layer.fp8.recipe.name == "tensorwise"
    gc.collect()
    assert not any(isinstance(p, Float8FrozenWeight) for p in merged.parameters())
    assert layer.fp8.frozen is None
    assert (logits(merged) - expected).norm() / expected.norm() < 0.1


def test_adapters_are_merged_exactly_into_a_base_that_is_not_prepared(tmp_path):
    """The call that docs/frozen.md names, in a process that runs FP8, equals float32's merge."""
    stock = LlamaForCausalLM(CONFIG)
    model = get_peft_model(copy.deepcopy(stock), copy.deepcopy(KINDS["lora"]))
    convert_to_float8(model, FP8Config(recipe="tensorwise"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    convert_optimizer(optimizer)
    for _ in range(2):
        step(model, optimizer)
    model.save_pretrained(tmp_path)
    expected = {}
    for name, module in model.named_modules():
        if hasattr(module, "get_delta_weight"):
            weight = stock.get_submodule(name.removeprefix("base_model.model.")).weight
            expected[name] = weight + module.get_delta_weight("default")
    merged = PeftModel.from_pretrained(stock, tmp_path).merge_and_unload()
    assert len(expected) == 7
    for name, weight in expected.items():
        got = merged.get_submodule(name.removeprefix("base_model.model.")).weight
        assert got.dtype == torch.float32
        assert torch.equal(got, weight)


def test_adapters_are_saved_and_loaded_over_a_stock_base_and_a_frozen_one(tmp_path):
    model, _ = adapted("rslora")
    base = {k.replace(".base_layer", ""): v for k, v in model.base_model.model.state_dict().items()}
    model.save_pretrained(tmp_path)
    for frozen in (False, True):
        stock = LlamaForCausalLM(CONFIG)
        missing = stock.load_state_dict(base, strict=False).missing_keys
        assert missing == []
        if frozen:
            freeze(stock, FP8Config(recipe="tensorwise"))
        loaded = peft.PeftModel.from_pretrained(stock, tmp_path)
        difference = (logits(loaded) - logits(model)).norm() / logits(model).norm()
        assert difference < (1e-6 if frozen else 0.1)


@pytest.mark.parametrize("way", ["save_pretrained", "state"])
def test_saving_adapters_does_not_read_the_base(tmp_path, way):
    model, _ = adapted("rslora")
    expected = {
        name.replace(".default", ""): value
        for name, value in model.state_dict().items()
        if "lora_" in name
    }
    base = sum(p.numel() for p in model.parameters() if isinstance(p, Float8FrozenWeight))
    with LiveStorages() as storages:
        _ = [p.detach() for p in model.parameters() if not isinstance(p, Float8FrozenWeight)]
        storages.peak = before = storages.alive
        if way == "state":
            saved = peft.get_peft_model_state_dict(model)
        else:
            model.save_pretrained(tmp_path)
    assert storages.peak - before < base / 8
    if way != "state":
        saved = load_file(tmp_path / "adapter_model.safetensors")
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], value) for name, value in expected.items())
    whole = {name: p for name, p in model.state_dict().items() if "base_layer" in name}
    assert {type(value) for value in whole.values()} == {torch.Tensor}
    assert {value.dtype for value in whole.values()} == {torch.bfloat16}
