import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from tests.fp8_checkpoints import adapted, tiny_llama
from torch_fp8 import FP8Config, convert_to_float8, export, weights_for_engine


def _adapted(**options):
    options = {"target_modules": ["q_proj", "down_proj"], **options}
    return adapted(tiny_llama(), FP8Config(recipe="blockwise"), **options)


def _stored(folder):
    return load_file(folder / "model.safetensors")


def _merged(model, adapters):
    """Return a model without adapters whose weights have the adapters' deltas, in FP8."""
    merged = tiny_llama()
    with torch.no_grad():
        for name, layer in model.base_model.model.named_modules():
            deltas = [
                layer.get_delta_weight(adapter).float()
                for adapter in adapters
                if adapter in getattr(layer, "lora_A", ())
            ]
            if deltas:
                total = sum(deltas, layer.base_layer.weight.dequantize().float())
                merged.get_submodule(name).weight.copy_(total)  # rounded to BF16 once
    convert_to_float8(merged, FP8Config(recipe="blockwise"))
    return merged


def _same(a, b):
    return a.keys() == b.keys() and all(
        torch.equal(a[key].view(torch.uint8), b[key].view(torch.uint8)) for key in a
    )


def test_what_becomes_of_adapters_has_to_be_said(tmp_path):
    with pytest.raises(ValueError, match=r"'model.layers.0.self_attn.q_proj' has an adapter"):
        export(_adapted(), tmp_path / "out")
    with pytest.raises(ValueError, match="adapters='keep' is unknown"):
        export(_adapted(), tmp_path / "out", adapters="keep")
    assert not list(tmp_path.iterdir())


def test_without_its_adapters_the_base_keeps_its_bytes_and_names(tmp_path):
    plain = tiny_llama()
    convert_to_float8(plain, FP8Config(recipe="blockwise"))
    export(plain, tmp_path / "plain")
    report = export(_adapted(), tmp_path / "apart", adapters="apart")
    assert len(report.fp8) == 14
    assert _same(_stored(tmp_path / "plain"), _stored(tmp_path / "apart"))


@pytest.mark.parametrize("use_rslora", [False, True])
def test_folded_in_they_give_the_bytes_of_the_merged_model(tmp_path, use_rslora):
    model = _adapted(use_rslora=use_rslora)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    export(model, tmp_path / "folded", adapters="merge")
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    merged = _merged(model, ["default"])
    export(merged, tmp_path / "merged")
    assert _same(_stored(tmp_path / "folded"), _stored(tmp_path / "merged"))
    export(model, tmp_path / "apart", adapters="apart")
    assert not _same(_stored(tmp_path / "folded"), _stored(tmp_path / "apart"))


def test_all_active_adapters_are_folded_in_and_no_other(tmp_path):
    model = _adapted()
    for name in ("second", "third"):
        model.add_adapter(name, LoraConfig(r=4, target_modules=["q_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B.second" in name or "lora_B.third" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    for active in (["default"], ["second"], ["default", "second"]):
        model.base_model.set_adapter(active)
        export(model, tmp_path / "-".join(active), adapters="merge")
        export(_merged(model, active), tmp_path / "-".join(["merged", *active]))
        folders = tmp_path / "-".join(active), tmp_path / "-".join(["merged", *active])
        assert _same(*map(_stored, folders))


def test_trained_copies_of_modules_are_taken_or_left(tmp_path):
    model = _adapted(modules_to_save=["lm_head"])
    head = model.base_model.model.lm_head
    with torch.no_grad():
        head.modules_to_save["default"].weight.zero_()
    export(model, tmp_path / "folded", adapters="merge")
    export(model, tmp_path / "apart", adapters="apart")
    assert not _stored(tmp_path / "folded")["lm_head.weight"].any()
    assert _stored(tmp_path / "apart")["lm_head.weight"].any()


def test_an_adapter_that_is_merged_already_is_refused(tmp_path):
    model = _adapted()
    model.merge_adapter()
    with pytest.raises(
        ValueError, match=r"adapter of 'model.layers.0.self_attn.q_proj' is already"
    ):
        export(model, tmp_path / "out", adapters="merge")


def test_an_adapter_that_does_more_than_add_is_refused(tmp_path):
    model = _adapted(use_dora=True)
    with pytest.raises(ValueError, match=r"'model.layers.0.self_attn.q_proj' does more than add"):
        export(model, tmp_path / "out", adapters="merge")
    assert not list(tmp_path.iterdir())


def test_adapters_that_are_disabled_are_not_folded_in(tmp_path):
    model = _adapted()
    export(model, tmp_path / "apart", adapters="apart")
    with model.disable_adapter():
        export(model, tmp_path / "disabled", adapters="merge")
    assert _same(_stored(tmp_path / "apart"), _stored(tmp_path / "disabled"))


@pytest.mark.parametrize("kind", ["lm_head", "embed_tokens", "skipped"])
def test_adapters_of_layers_that_are_not_in_fp8_are_folded_in(tmp_path, kind):
    name = "layers.0.mlp.down_proj" if kind == "skipped" else kind
    key = {"lm_head": "lm_head.weight"}.get(kind, f"model.{name}.weight")
    torch.manual_seed(0)
    plain = tiny_llama()
    before = plain.state_dict()[key].clone()
    model = get_peft_model(plain, LoraConfig(r=4, target_modules=["q_proj", name]))
    for parameter_name, parameter in model.named_parameters():
        if "lora_" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.1)
    skip = ("lm_head", "layers.0.mlp") if kind == "skipped" else ("lm_head",)
    convert_to_float8(model, FP8Config(recipe="blockwise", skip=skip))
    (owner,) = [m for n, m in model.named_modules() if n.endswith(name) and hasattr(m, "merged")]
    expected = (before.float() + owner.get_delta_weight("default").float()).bfloat16()
    assert not torch.equal(expected, before)
    export(model, tmp_path / "out", adapters="merge")
    handed = [dict(weights_for_engine(model, engine))[key] for engine in ("bf16", "fine-grained")]
    for found in (_stored(tmp_path / "out")[key], *handed):
        assert torch.equal(found, expected)
    export(model, tmp_path / "apart", adapters="apart")
    assert torch.equal(_stored(tmp_path / "apart")[key], before)


@pytest.mark.parametrize(
    "options", [{"target_modules": ["lm_head"]}, {"modules_to_save": ["embed_tokens"]}]
)
def test_one_of_two_tied_layers_that_is_trained_is_refused_by_name(tmp_path, options):
    """Engines tie them again, and serve one for the other."""
    options = {"r": 4, "target_modules": ["q_proj"], **options}
    model = get_peft_model(tiny_llama(tie_word_embeddings=True), LoraConfig(**options))
    convert_to_float8(model, "blockwise")
    for call in (
        lambda: export(model, tmp_path / "out", adapters="merge"),
        lambda: weights_for_engine(model),
    ):
        with pytest.raises(ValueError, match=r"'lm_head' has an adapter, .* 'model.embed_tokens'"):
            call()
    assert not list(tmp_path.iterdir())


def test_a_learned_prompt_is_refused(tmp_path):
    from peft import PromptTuningConfig

    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = get_peft_model(tiny_llama(), config)
    convert_to_float8(model, "blockwise")
    for adapters in (None, "merge"):
        with pytest.raises(ValueError, match="PeftModelForCausalLM learns a prompt"):
            export(model, tmp_path / "out", adapters=adapters)
    with pytest.raises(ValueError, match="learns a prompt"):
        weights_for_engine(model)
    assert len(export(model, tmp_path / "apart", adapters="apart").fp8) == 14
