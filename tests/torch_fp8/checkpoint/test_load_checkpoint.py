import copy
import gc

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.fp8_checkpoints import (
    FINE_GRAINED,
    LiveStorages,
    bytes_of,
    compressed,
    exact,
    tiny_llama,
    write,
    write_llama,
)
from tests.internals import block_scaled, convert_producers, residual_of
from torch_fp8 import (
    FP8Config,
    convert_optimizer,
    convert_to_float8,
    freeze,
    load_frozen,
    load_trainable,
    merged_state_dict,
)


class _Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up_proj = nn.Linear(width, 2 * width, bias=False)
        self.down_proj = nn.Linear(2 * width, width, bias=True)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("frequencies", torch.arange(4.0), persistent=False)

    def forward(self, x):
        return x + self.down_proj(self.up_proj(self.norm(x)).relu())


class _Model(nn.Sequential):
    def __init__(self, width=128, layers=2):
        super().__init__(*(_Layer(width) for _ in range(layers)))


def _written(folder, quantization=FINE_GRAINED, suffix="_scale_inv", blocks=None, **sizes):
    state = {k: v.bfloat16() for k, v in _Model(**sizes).state_dict().items()}
    config = {"quantization_config": quantization}
    return write(folder, state, config, suffix, blocks=blocks)


def _optimizer(model, config=None, lr=0.0):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    convert_optimizer(optimizer, config, model=model)
    return optimizer


def _worst(model, optimizer, expected):
    merged = merged_state_dict(model, optimizer)
    worst = 0.0
    for key, (qdata, scale, block) in expected.items():
        true = exact(qdata, scale, block)
        error = (merged[key].double() - true).abs() / true.abs().clamp(min=1e-300)
        worst = max(worst, float(error.max()))
    return worst


@pytest.mark.parametrize(
    ("config", "least", "most"),
    [
        (FP8Config(), 2.0**-18, 2.0**-16),
        (FP8Config(opt_level="O3"), 2.0**-18, 2.0**-16),
        (FP8Config(opt_level="O1"), 2.0**-10, 2.0**-8),
    ],
    ids=["O2", "O3", "O1"],
)
def test_trained_weights_are_within_the_residual_of_the_files_values(tmp_path, config, least, most):
    """The bound is half a unit in the last of 8 + k significant bits; the errors are near it."""
    expected = _written(tmp_path)
    model = load_trainable(_Model, tmp_path, config)
    convert_to_float8(model, config)
    assert least < _worst(model, _optimizer(model, config), expected) <= most


def test_residuals_are_dropped_where_no_optimizer_keeps_them(tmp_path):
    _written(tmp_path)
    model = load_trainable(_Model, tmp_path)
    weight = model[0].up_proj.weight
    assert residual_of(weight) is not None
    convert_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    assert not vars(weight)


@pytest.mark.parametrize("write_weight", ["copy_", "data"])
def test_a_written_weight_keeps_half_a_spacing_at_most_of_the_files(tmp_path, write_weight):
    _written(tmp_path)
    model = load_trainable(_Model, tmp_path)
    weight, other = model[0].up_proj.weight, torch.randn(256, 128).bfloat16()
    if write_weight == "data":
        weight.data = other.clone()
    else:
        with torch.no_grad():
            weight.copy_(other)
    optimizer = _optimizer(model)
    merged = merged_state_dict(model, optimizer)
    distance = (merged["0.up_proj.weight"] - other.float()).abs()
    assert (distance <= other.abs().float() * 2**-8).all()
    weight.data = torch.randn(8, 8).bfloat16()
    assert residual_of(weight) is None


def test_a_copy_of_a_model_has_no_residuals_that_wait(tmp_path):
    _written(tmp_path)
    model = load_trainable(_Model, tmp_path)
    twin = copy.deepcopy(model)
    assert not vars(twin[0].up_proj.weight)
    assert torch.equal(twin[0].up_proj.weight, model[0].up_proj.weight)


LAYOUTS = {
    "fine-grained": (FINE_GRAINED, "_scale_inv", None),
    "channel": (compressed("channel"), "_scale", lambda shape: (1, shape[1])),
    "group": (compressed("group", group_size=64), "_scale", lambda shape: (1, 64)),
    "tensor": (compressed("tensor"), "_scale", tuple),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_loaded_for_training(tmp_path, layout):
    expected = _written(tmp_path, *LAYOUTS[layout])
    model = load_trainable(_Model, tmp_path)
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert torch.equal(model[1].frequencies, torch.arange(4.0))
    assert _worst(model, _optimizer(model), expected) <= 2.0**-16


@pytest.mark.long
def test_loading_for_training_never_holds_a_second_copy(tmp_path, monkeypatch):
    """The temporaries have a fixed size of about a million elements; here the model is small."""
    monkeypatch.setattr(block_scaled, "_ENCODE_ROWS", 1 << 13)
    expected = _written(tmp_path, width=256, layers=24)
    with LiveStorages() as storages:
        model = load_trainable(lambda: _Model(256, 24), tmp_path)
    gc.collect()
    residuals = [residual_of(layer.up_proj.weight) for layer in model]
    residuals += [residual_of(layer.down_proj.weight) for layer in model]
    result = bytes_of(model, *residuals)
    file = (tmp_path / "model.safetensors").stat().st_size
    numel = sum(qdata.numel() for qdata, _, _ in expected.values())
    assert 3.0 * numel < result < 3.05 * numel
    assert result <= storages.peak <= 1.1 * max(result, file)


@pytest.mark.parametrize("by_class", [True, False])
def test_a_class_of_transformers_builds_the_model_it_would(tmp_path, by_class):
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    write_llama(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    model = load_trainable(LlamaForCausalLM if by_class else AutoModelForCausalLM, tmp_path)
    tokens = torch.arange(12).view(1, 12)
    assert torch.equal(model(tokens).logits, stock(tokens).logits)
    assert not hasattr(model.config, "quantization_config")
    assert not model.training
    assert model.name_or_path == str(tmp_path)


def test_a_checkpoint_may_be_named_by_its_file(tmp_path):
    from transformers import AutoModelForCausalLM

    write_llama(tmp_path)
    model = load_frozen(AutoModelForCausalLM, tmp_path / "model.safetensors")
    assert model.name_or_path == str(tmp_path)


def test_tied_weights_stay_tied(tmp_path):
    from transformers import LlamaForCausalLM

    model = tiny_llama(tie_word_embeddings=True)
    state = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    config = model.config.to_dict() | {"quantization_config": FINE_GRAINED}
    write(tmp_path, state, config)
    loaded = load_trainable(LlamaForCausalLM, tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def _rename(tensors):
    tensors["0.gate_proj.weight"] = tensors.pop("0.norm.weight")


def _reshape(tensors):
    tensors["0.norm.weight"] = torch.ones(64)


@pytest.mark.parametrize(
    ("breaks", "message"),
    [
        (_rename, "missing '0.norm.weight' and 0 more and it has unexpected '0.gate_proj.weight'"),
        (_reshape, r"'0.norm.weight' has shape \(64,\), not \(128,\)"),
    ],
    ids=["renamed", "reshaped"],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path, breaks, message):
    _written(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    breaks(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_trainable(_Model, tmp_path)


def test_what_builds_no_model_is_a_type_error(tmp_path):
    _written(tmp_path)
    with pytest.raises(TypeError, match="does not build a model"):
        load_trainable(dict, tmp_path)


def _held(model):
    layers = model.named_modules()
    held = {f"{name}.weight": getattr(layer, "frozen_weight", None) for name, layer in layers}
    return {key: weight.payload for key, weight in held.items() if weight is not None}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_frozen_model_holds_the_very_bytes_where_their_blocks_allow(tmp_path, layout):
    expected = _written(tmp_path, *LAYOUTS[layout])
    model = load_frozen(_Model, tmp_path)
    held = _held(model)
    assert held.keys() == expected.keys()
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert not any(p.requires_grad for p in model.parameters())
    for key, (qdata, scale, block) in expected.items():
        same = held[key].qdata.view(torch.uint8).equal(qdata.view(torch.uint8))
        assert same == (layout in ("fine-grained", "tensor"))
        true = exact(qdata, scale, block)
        value = held[key].qdata.double() * held[key].scale.double().repeat_interleave(
            128, 0
        ).repeat_interleave(128, 1)
        error = (value - true).norm() / true.norm()
        assert error <= (2.0**-24 if same else 2.0**-4)


@pytest.mark.parametrize("quantized", [True, False], ids=["FP8", "BF16"])
def test_loading_frozen_never_holds_a_second_copy(tmp_path, quantized):
    if quantized:
        _written(tmp_path, width=256, layers=24)
    else:
        state = {k: v.bfloat16() for k, v in _Model(256, 24).state_dict().items()}
        save_file(state, tmp_path / "model.safetensors")
    with LiveStorages() as storages:
        model = load_frozen(lambda: _Model(256, 24), tmp_path)
    gc.collect()
    numel = 24 * 2 * 256 * 512
    held = sum(payload.num_bytes for payload in _held(model).values())
    assert numel < held <= 1.02 * numel
    rest = (p for p in model.parameters() if getattr(p, "qdata", None) is None)
    result = held + sum(p.numel() * p.element_size() for p in rest)
    file = (tmp_path / "model.safetensors").stat().st_size
    assert held < storages.peak <= 1.1 * max(result, file)


def test_a_bf16_checkpoint_is_frozen_as_its_model_would_be(tmp_path):
    state = {k: v.bfloat16() for k, v in _Model().state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    model, later = load_frozen(_Model, tmp_path), _Model().bfloat16()
    later.load_state_dict(state)
    freeze(later)
    for key, payload in _held(later).items():
        assert _held(model)[key].qdata.view(torch.uint8).equal(payload.qdata.view(torch.uint8))
        assert torch.equal(_held(model)[key].scale, payload.scale)
    x = torch.randn(4, 128).bfloat16()
    assert torch.equal(model(x), later.eval()(x))


def test_norms_and_mlps_are_connected_once_to_layers_that_are_frozen(tmp_path, monkeypatch):
    expected, connected = _written(tmp_path), []

    def connect(model, config):
        connected.append(_held(model).keys())
        return convert_producers(model, config)

    for module in ("convert", "freeze"):
        monkeypatch.setattr(f"torch_fp8.conversion.{module}.convert_producers", connect)
    load_frozen(_Model, tmp_path)
    assert connected == [expected.keys()]


@pytest.mark.parametrize("config", [FP8Config(opt_level="O1"), FP8Config(frozen_weights="keep")])
def test_a_configuration_that_keeps_weights_is_refused(tmp_path, config):
    _written(tmp_path)
    with pytest.raises(ValueError, match=r"but load_frozen\(\) was called"):
        load_frozen(_Model, tmp_path, config)


@pytest.mark.parametrize("function", [load_trainable, load_frozen])
def test_broken_scales_are_refused_before_a_model_is_built(tmp_path, function):
    _written(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["1.up_proj.weight_scale_inv"][0, 0] = float("inf")
    save_file(tensors, tmp_path / "model.safetensors")
    built = []
    with pytest.raises(ValueError, match=r"'1\.up_proj\.weight_scale_inv' holds an Inf or NaN"):
        function(lambda: built.append(1), tmp_path)
    assert not built
