import copy
import math

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.fp8_checkpoints import tiny_llama
from tests.internals import SmoothFold, sqnr_db
from torch_fp8 import FP8Config, convert_to_float8, export, weights_for_engine

CASES = [
    ("tensorwise", "compressed-tensors"),
    ("delayed", "modelopt"),
    ("blockwise", "fine-grained"),
]
MLP = "model.layers.0.mlp."


def _model(recipe, smooth=True):
    stock = tiny_llama()
    mlp = stock.model.layers[0].mlp
    with torch.no_grad():
        mlp.up_proj.weight[3] = mlp.gate_proj.weight[3]
        mlp.gate_proj.weight[3] *= 200
        mlp.up_proj.weight[3] *= 200
    model = copy.deepcopy(stock)
    convert_to_float8(model, FP8Config(recipe=recipe, smooth_swiglu=smooth, opt_level="O1"))
    return stock, model


def _values(files, name):
    codes = files[f"{name}.weight"].float()
    scale = next(
        files[f"{name}.{key}"].float()
        for key in ("weight_scale", "weight_scale_inv")
        if f"{name}.{key}" in files
    )
    if scale.ndim == 2 and scale.shape != (1, 1):
        scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return codes * scale


@pytest.mark.parametrize(("recipe", "format"), CASES)
def test_the_factors_of_the_last_forward_are_in_the_weights(recipe, format, tmp_path):
    stock, model = _model(recipe)
    tokens = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(0))
    before = copy.deepcopy(model.state_dict())
    model(input_ids=tokens)
    fold = SmoothFold(model)
    assert sum(layer in fold for layer in model.modules()) == 4
    report = export(model, tmp_path / "out", format)
    assert len(report.fp8) == 14
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    files = load_file(tmp_path / "out" / "model.safetensors")
    assert not [key for key in files if "smooth" in key or "channel" in key]
    down, up = (_values(files, f"{MLP}{name}_proj") for name in ("down", "up"))
    mlp = stock.model.layers[0].mlp
    ratio = float(mlp.up_proj.weight[3].detach().float().norm() / up[3].norm())
    assert ratio > 8  # a power of two, but for FP8's rounding
    assert math.log2(ratio) == pytest.approx(round(math.log2(ratio)), abs=0.05)
    column = float(mlp.down_proj.weight[:, 3].detach().float().norm() / down[:, 3].norm())
    assert column * ratio == pytest.approx(1, abs=0.05)
    # The function is the same: with these weights, stock code computes what it did.
    folded = copy.deepcopy(stock)
    with torch.no_grad():
        folded.model.layers[0].mlp.up_proj.weight.copy_(up)
        folded.model.layers[0].mlp.down_proj.weight.copy_(down)
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    got, want = folded.model.layers[0].mlp(x), mlp(x)
    assert sqnr_db(want, got) > 22


def test_a_static_scale_holds_what_is_smooth(tmp_path):
    tokens = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(0))
    scales = {}
    for smooth in (False, True):
        _, model = _model("delayed", smooth)
        model.train()
        model(input_ids=tokens)
        export(model, tmp_path / str(smooth), "modelopt")
        files = load_file(tmp_path / str(smooth) / "model.safetensors")
        scales[smooth] = files[f"{MLP}down_proj.input_scale"]
        assert scales[smooth] > 0
    assert 8 < scales[False] / scales[True] < 10000


def test_engines_are_handed_what_is_exported(tmp_path):
    """An engine does not look for factors: its activations would have the outliers."""
    stock, model = _model("blockwise")
    model(input_ids=torch.arange(32)[None])
    export(model, tmp_path / "out")
    files = load_file(tmp_path / "out" / "model.safetensors")
    handed = dict(weights_for_engine(model, "fine-grained"))
    for key, value in handed.items():
        assert torch.equal(value.float(), files[key].float()), key
    online = dict(weights_for_engine(model, "fp8_per_block"))
    for name in ("up_proj", "down_proj"):
        assert torch.equal(online[f"{MLP}{name}.weight"].float(), _values(files, f"{MLP}{name}"))
    plain = dict(weights_for_engine(model))
    assert torch.equal(plain[f"{MLP}up_proj.weight"], stock.state_dict()[f"{MLP}up_proj.weight"])


def test_without_a_forward_nothing_is_folded(tmp_path):
    _, smooth = _model("tensorwise")
    _, plain = _model("tensorwise", smooth=False)
    for name, model in (("smooth", smooth), ("plain", plain)):
        export(model, tmp_path / name, "compressed-tensors")
    files = [load_file(tmp_path / n / "model.safetensors") for n in ("smooth", "plain")]
    assert all(torch.equal(value.float(), files[1][key].float()) for key, value in files[0].items())


@pytest.mark.parametrize("name", ["Phi3", "Gemma"])
def test_gate_and_up_in_one_layer_and_other_activations_are_folded(name, tmp_path):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 32}
    sizes |= {"vocab_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes, **tokens)
    stock = transformers.AutoModelForCausalLM.from_config(config).bfloat16()
    mlp = stock.model.layers[0].mlp
    if name == "Phi3":
        gate, up = (mlp.gate_up_proj.weight.detach()[row] for row in (3, 256 + 3))
    else:
        gate, up = mlp.gate_proj.weight.detach()[3], mlp.up_proj.weight.detach()[3]
    up.copy_(gate)
    for row in (gate, up):
        row *= 200
    model = copy.deepcopy(stock)
    convert_to_float8(model, FP8Config(recipe="tensorwise", smooth_swiglu=True, opt_level="O1"))
    model(input_ids=torch.arange(3, 67)[None])
    export(model, tmp_path / "out", "compressed-tensors")
    files = load_file(tmp_path / "out" / "model.safetensors")
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    want = mlp(x)
    before = up.float().norm()
    with torch.no_grad():
        for key, layer in mlp.named_children():
            if isinstance(layer, torch.nn.Linear):
                layer.weight.copy_(_values(files, f"{MLP}{key}"))
    assert before / up.float().norm() > 8
    assert sqnr_db(want, mlp(x)) > 25
