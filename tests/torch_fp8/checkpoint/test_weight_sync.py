import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.fp8_checkpoints import LiveStorages, adapted, tiny_llama, write_llama
from tests.internals import linear_function, make_recipe, pause
from torch_fp8 import FP8Config, convert_to_float8, export, load_frozen, weights_for_engine
from torch_fp8.ops.quantize import dequantize, quantize

UP = "model.layers.0.mlp.up_proj.weight"


def _model(recipe="blockwise", **changes):
    model = tiny_llama(**changes)
    convert_to_float8(model, FP8Config(recipe=recipe))
    return model


def _adapted(**changes):
    config = FP8Config(recipe="blockwise")
    return adapted(tiny_llama(**changes), config, target_modules=["q_proj", "up_proj"])


def _multiplied(monkeypatch, model):
    seen, original = {}, linear_function.fprop

    def spy(x, weight, bias, shape, options, *others, **needs):
        y, operands = original(x, weight, bias, shape, options, *others, **needs)
        seen[f"{options.name}.weight"] = dequantize(operands.weight)
        return y, operands

    monkeypatch.setattr(linear_function, "fprop", spy)
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.arange(32).reshape(1, -1))
    monkeypatch.undo()
    return seen


def test_a_bf16_engine_gets_the_checkpoint(tmp_path):
    model = _model("rowwise")
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    handed = dict(weights_for_engine(model))
    assert list(handed) == [name for name, _ in model.named_parameters()]
    assert handed.keys() == saved.keys()
    assert all(torch.equal(handed[key], saved[key]) for key in saved)


def test_tied_weights_come_once():
    handed = [name for name, _ in weights_for_engine(_model(tie_word_embeddings=True))]
    assert "model.embed_tokens.weight" in handed
    assert "lm_head.weight" not in handed


def test_an_engine_that_quantizes_online_makes_the_weights_of_training(monkeypatch):
    """Its rule: a power-of-two scale for each 128 x 128, of what it is handed."""
    model = _model()
    spec = make_recipe("blockwise").weight
    handed = dict(weights_for_engine(model, "fp8_per_block"))
    multiplied = _multiplied(monkeypatch, model)
    assert len(multiplied) == 14
    for key, values in multiplied.items():
        assert handed[key].dtype == torch.bfloat16
        assert torch.equal(dequantize(quantize(handed[key], spec)), values)
        assert torch.equal(handed[key].float(), values)


@pytest.mark.parametrize("adapted", [False, True])
def test_a_fine_grained_engine_gets_the_tensors_of_the_file(tmp_path, adapted):
    model = _adapted() if adapted else _model()
    export(model, tmp_path / "out", adapters="merge" if adapted else None)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    handed = dict(weights_for_engine(model, "fine-grained"))
    assert handed.keys() == stored.keys()
    for key, value in handed.items():
        assert value.dtype == stored[key].dtype
        assert torch.equal(value.view(torch.uint8), stored[key].view(torch.uint8))


@pytest.mark.parametrize("engine", ["bf16", "fp8_per_block"])
def test_adapters_are_folded_into_what_is_handed_over(engine):
    model = _adapted()
    plain = model.base_model.model.model.layers[0].mlp.up_proj
    base = plain.base_layer.weight.dequantize().float()
    folded = (base + plain.get_delta_weight("default").float()).bfloat16()
    spec = make_recipe("blockwise").weight
    expected = folded if engine == "bf16" else dequantize(quantize(folded, spec)).bfloat16()
    handed = dict(weights_for_engine(model, engine))
    assert torch.equal(handed[UP], expected)
    assert not any("lora" in name or "base_layer" in name for name in handed)
    apart = dict(weights_for_engine(model, engine, adapters="apart"))
    assert torch.equal(apart[UP].float(), base)
    assert apart.keys() == handed.keys()


def test_one_layer_is_folded_at_a_time():
    model = _adapted(num_hidden_layers=8, intermediate_size=512)
    largest = max(p.numel() for p in model.parameters())
    total = sum(p.numel() for p in model.parameters())
    with LiveStorages() as live:
        live._known |= {
            part.untyped_storage()._cdata
            for p in (*model.parameters(), *model.buffers())
            for part in ((p,) if not hasattr(p, "qdata") else (p.qdata, p.scale))
        }
        for _ in weights_for_engine(model):
            pass
    assert live.peak <= 16 * largest < total


def test_what_an_engine_would_do_otherwise_is_refused_by_name(tmp_path):
    from transformers import AutoModelForCausalLM

    with pytest.raises(ValueError, match="engine='int8' is unknown"):
        weights_for_engine(_model(), "int8")
    with pytest.raises(ValueError, match="adapters='keep' is unknown"):
        weights_for_engine(_model(), adapters="keep")
    rowwise = r"q_proj' runs recipe 'rowwise'; convert the model with recipe='blockwise', or"
    with pytest.raises(ValueError, match=rf"'model.layers.0.self_attn.{rowwise}"):
        weights_for_engine(_model("rowwise"), "fp8_per_block")
    with pytest.raises(ValueError, match=r"'model.layers.0.self_attn.q_proj' runs in FP8, but"):
        weights_for_engine(_model(num_key_value_heads=1), "fp8_per_block")
    with pytest.raises(TypeError, match="Linear has no such config"):
        weights_for_engine(nn.Linear(128, 128))
    write_llama(tmp_path)
    frozen = load_frozen(AutoModelForCausalLM, tmp_path, "blockwise")
    with pytest.raises(
        ValueError,
        match=r"q_proj.weight' has scales from its original checkpoint that are not powers of two",
    ):
        list(weights_for_engine(frozen, "fp8_per_block"))
    assert len(dict(weights_for_engine(frozen, "fine-grained"))) == 21 + 14


@pytest.mark.parametrize("engine", ["bf16", "fp8_per_block", "fine-grained"])
def test_a_weight_that_is_not_finite_is_refused_by_name(engine):
    model = _model()
    with torch.no_grad():
        model.get_parameter(UP)[3, 3] = float("inf")
    with pytest.raises(ValueError, match=rf"'{UP}' holds an Inf or NaN"):
        list(weights_for_engine(model, engine))


@pytest.mark.parametrize("engine", ["fp8_per_block", "fine-grained"])
def test_an_engine_runs_on_in_fp8_while_a_layer_is_paused(engine):
    model = _model()
    before = dict(weights_for_engine(model, engine))
    pause(model.model.layers[0].mlp.up_proj)
    after = dict(weights_for_engine(model, engine))
    assert after.keys() == before.keys()
    for key, value in after.items():
        assert value.dtype == before[key].dtype
        assert torch.equal(value.float(), before[key].float())
