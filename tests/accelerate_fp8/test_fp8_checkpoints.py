import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, __version__

from accelerate_fp8 import FP8Config, FP8Kwargs
from tests.fp8_checkpoints import FINE_GRAINED, exact, tiny_llama, write, write_llama
from tests.moe_models import moe_model
from torch_fp8 import merged_state_dict

STOCK_BREAKS = tuple(map(int, __version__.split(".")[:2])) < (5, 24)
"""Whether transformers quantizes all matrices of a model that it has dequantized, to save it."""
SAVED_BY_STOCK = torch.float8_e4m3fn if STOCK_BREAKS else torch.bfloat16
TOKENS = torch.arange(32).view(2, 16) * 7 % 256


def _prepared(accelerate, model, config=None):
    accelerator = accelerate.Accelerator(
        mixed_precision="fp8", kwargs_handlers=[FP8Kwargs(config or FP8Config())], cpu=True
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    return accelerator, *accelerator.prepare(model, optimizer)


def _steps(accelerator, model, optimizer, count=3):
    for _ in range(count):
        accelerator.backward(model(TOKENS, labels=TOKENS).loss)
        optimizer.step()
        optimizer.zero_grad()


def _logits(model):
    with torch.no_grad():
        return model.eval()(TOKENS).logits


@pytest.mark.parametrize("dequantize", [True, False], ids=["dequantize=True", "no GPU"])
def test_full_fine_tuning_starts_from_the_hosts_values(accelerate, tmp_path, dequantize):
    """transformers rounds them to BF16."""
    from transformers import FineGrainedFP8Config

    fp8 = write_llama(tmp_path)
    given = {"quantization_config": FineGrainedFP8Config(dequantize=True)} if dequantize else {}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, **given)
    loaded = {key: value.detach().clone() for key, value in model.state_dict().items()}
    _, model, optimizer = _prepared(accelerate, model)
    merged = merged_state_dict(model, optimizer.optimizer)
    assert len(fp8) == 14
    assert all(torch.equal(merged[key], loaded[key].float()) for key in fp8)


def _stock_twin(state):
    """A model of stock layers with these weights, built without a checkpoint."""
    twin = tiny_llama()
    twin.load_state_dict(state)
    return twin


@pytest.mark.parametrize("quantized", [True, False], ids=["FP8 checkpoint", "BF16 checkpoint"])
def test_the_saved_model_is_the_trained_one(accelerate, tmp_path, caplog, quantized):
    """Red without ours: stock saves codes without their configuration, logits off by thousands."""
    source, out = tmp_path / "source", tmp_path / "out"
    if quantized:
        write_llama(source)
    else:
        tiny_llama().save_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source)
    accelerator, model, optimizer = _prepared(accelerate, model)
    before = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    _steps(accelerator, model, optimizer)
    unwrapped = accelerator.unwrap_model(model)
    trained = {k: v.detach().clone() for k, v in unwrapped.state_dict().items()}
    assert not torch.equal(trained["model.layers.0.mlp.up_proj.weight"], before)
    unwrapped.save_pretrained(out)

    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    stored = load_file(out / "model.safetensors")
    assert stored.keys() == trained.keys()
    assert all(torch.equal(stored[key], trained[key]) for key in stored)
    stock = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(_logits(stock), _logits(_stock_twin(trained)))
    assert caplog.text.count("will be saved in its current dtype") == (quantized and STOCK_BREAKS)


def test_under_the_flag_a_model_is_saved_right_if_not_prepared(accelerate, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    source, out = tmp_path / "source", tmp_path / "out"
    write_llama(source)
    model = AutoModelForCausalLM.from_pretrained(source)
    model.save_pretrained(out)
    assert torch.equal(_logits(AutoModelForCausalLM.from_pretrained(out)), _logits(model))


def test_another_backend_keeps_what_stock_does(accelerate, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "AO")
    source, out = tmp_path / "source", tmp_path / "out"
    write_llama(source)
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(out)
    assert load_file(out / "model.safetensors")["lm_head.weight"].dtype == SAVED_BY_STOCK


def _lora(model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))


def _bytes_held(model):
    return {
        name.removeprefix("base_model.model.").replace(".base_layer", "") + ".weight": held.payload
        for name, layer in model.named_modules()
        if (held := getattr(layer, "frozen_weight", None)) is not None
    }


def test_a_frozen_base_that_the_host_dequantized_is_quantized_again(accelerate, tmp_path):
    fp8 = write_llama(tmp_path)
    model = _lora(AutoModelForCausalLM.from_pretrained(tmp_path))
    accelerator, model, optimizer = _prepared(accelerate, model)
    _steps(accelerator, model, optimizer, 2)
    held = _bytes_held(model)
    assert held.keys() == fp8.keys()
    for key, (qdata, scale, block) in fp8.items():
        true = exact(qdata, scale, block)
        error = (held[key].dequantize().double() - true).norm() / true.norm()
        assert error < 10 ** (-(31.0 - 0.5) / 20)  # the SQNR of E4M3


@pytest.fixture
def as_with_a_gpu(monkeypatch):
    """transformers loads FP8 checkpoints into its own FP8Linear, as where there is a GPU."""
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)


@pytest.mark.usefixtures("as_with_a_gpu")
def test_transformers_own_fp8_layers_are_taken_over_with_their_bytes(accelerate, tmp_path, caplog):
    source, out = tmp_path / "source", tmp_path / "out"
    fp8 = write_llama(source)
    model = AutoModelForCausalLM.from_pretrained(source)
    assert type(model.model.layers[0].mlp.up_proj).__name__ == "FP8Linear"
    codes = model.model.layers[0].mlp.up_proj.weight.data_ptr()
    accelerator, model, optimizer = _prepared(accelerate, _lora(model))
    assert "14 keep the same bytes" in caplog.text
    _steps(accelerator, model, optimizer, 2)
    held = _bytes_held(model)
    assert held.keys() == fp8.keys()
    for key, (qdata, scale, _) in fp8.items():
        assert held[key].qdata.view(torch.uint8).equal(qdata.view(torch.uint8))
        assert torch.equal(held[key].scale, scale)
    assert held["model.layers.0.mlp.up_proj.weight"].qdata.data_ptr() == codes  # no copy was made

    merged = accelerator.unwrap_model(model).merge_and_unload()
    merged.save_pretrained(out)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    stored = load_file(out / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert not any("scale" in key for key in stored)
    AutoModelForCausalLM.from_pretrained(out)


@pytest.mark.usefixtures("as_with_a_gpu")
def test_transformers_fp8_layers_are_trained_from_their_exact_values(accelerate, tmp_path, caplog):
    source, out = tmp_path / "source", tmp_path / "out"
    fp8 = write_llama(source)
    model = AutoModelForCausalLM.from_pretrained(source)
    for layer in model.modules():
        if type(layer).__name__ == "FP8Linear":
            layer.weight.requires_grad_(True)
    accelerator, model, optimizer = _prepared(accelerate, model)
    merged = merged_state_dict(model, optimizer.optimizer)
    for key, (qdata, scale, block) in fp8.items():
        true = exact(qdata, scale, block)
        assert ((merged[key] - true).abs() <= 2.0**-16 * true.abs()).all()
    assert "14 are trained from their exact values" in caplog.text
    before = merged["model.layers.0.mlp.up_proj.weight"]
    _steps(accelerator, model, optimizer)
    unwrapped = accelerator.unwrap_model(model)
    assert (unwrapped.model.layers[0].mlp.up_proj.weight.float() - before).abs().max() > 1e-3
    unwrapped.save_pretrained(out)
    stock = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(_logits(stock), _logits(_stock_twin(unwrapped.state_dict())))


@pytest.mark.usefixtures("as_with_a_gpu")
@pytest.mark.parametrize("option", [{"opt_level": "O1"}, {"frozen_weights": "keep"}])
def test_transformers_fp8_layers_stay_where_weights_are_kept(accelerate, tmp_path, option, caplog):
    write_llama(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    accelerator = accelerate.Accelerator(
        mixed_precision="fp8", kwargs_handlers=[FP8Kwargs(FP8Config(**option))], cpu=True
    )
    accelerator.prepare_model(model, evaluation_mode=True)
    assert type(model.model.layers[0].mlp.up_proj).__name__ == "FP8Linear"
    assert "14 transformers' FP8Linear layers are left unchanged" in caplog.text


def _qwen_moe():
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 128, "moe_intermediate_size": 128, "head_dim": 64}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "dtype": "bfloat16"}
    model = moe_model("Qwen3Moe", **sizes, tie_word_embeddings=False)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


@pytest.fixture
def fp8_moe(tmp_path):
    """An FP8 checkpoint of a mixture of experts, and its codes, scales and blocks."""
    plain, source = tmp_path / "plain", tmp_path / "source"
    _qwen_moe().save_pretrained(plain)
    config = json.loads((plain / "config.json").read_text())
    state = load_file(plain / "model.safetensors")
    return source, write(source, state, config | {"quantization_config": FINE_GRAINED})


def test_fused_experts_are_saved_as_they_were_loaded(accelerate, fp8_moe, tmp_path):
    """Their conversion merges experts besides; only the quantization is dropped from it."""
    source, fp8 = fp8_moe
    state = load_file(tmp_path / "plain" / "model.safetensors")  # one tensor for each expert
    experts = {key for key in state if ".experts." in key}
    assert len(experts) == 12
    assert fp8.keys() > experts
    model = AutoModelForCausalLM.from_pretrained(source)
    expected = _logits(model)
    _, model, _ = _prepared(accelerate, model)
    model.save_pretrained(tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert stored.keys() == state.keys()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(_logits(saved), expected)


def _fused(fp8, projections):
    names = [
        f"model.layers.0.mlp.experts.{e}.{p}_proj.weight" for e in range(4) for p in projections
    ]
    whole = torch.cat([exact(*fp8[name]) for name in names])
    return whole.view(4, -1, whole.shape[-1])


@pytest.mark.usefixtures("as_with_a_gpu")
def test_transformers_own_fp8_experts_are_trained_from_their_exact_values(
    accelerate, fp8_moe, tmp_path, caplog
):
    source, fp8 = fp8_moe
    model = AutoModelForCausalLM.from_pretrained(source)
    assert type(model.model.layers[0].mlp.experts).__name__ == "FP8Experts"
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("scale_inv" not in name)
    accelerator, model, optimizer = _prepared(accelerate, model)
    assert (
        "transformers' FP8Experts were replaced by the model's own experts: 2 are trained"
        in caplog.text
    )
    merged = merged_state_dict(model, optimizer.optimizer)
    for key, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
        true = _fused(fp8, parts)
        error = (merged[f"model.layers.0.mlp.experts.{key}"] - true).abs()
        assert (error <= 2.0**-16 * true.abs()).all()
    _steps(accelerator, model, optimizer)
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == fp8.keys() | {
        key for key in unwrapped.state_dict() if ".experts." not in key
    }


@pytest.mark.usefixtures("as_with_a_gpu")
def test_transformers_own_fp8_experts_are_frozen_below_adapters(accelerate, fp8_moe, caplog):
    peft = pytest.importorskip("peft")
    source, fp8 = fp8_moe
    model = AutoModelForCausalLM.from_pretrained(source)
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    model = peft.get_peft_model(model, peft.LoraConfig(target_parameters=targets, r=4))
    accelerator, model, optimizer = _prepared(accelerate, model)
    assert "2 are cast again when frozen" in caplog.text
    experts = model.get_base_model().model.layers[0].mlp.experts.base_layer.base_layer
    assert len(experts.frozen_weights) == 2
    true = _fused(fp8, ("gate", "up"))
    error = (experts.gate_up_proj.dequantize() - true).norm() / true.norm()
    assert error < 10 ** (-(31.0 - 0.5) / 20)  # the SQNR of E4M3
    _steps(accelerator, model, optimizer, 2)
