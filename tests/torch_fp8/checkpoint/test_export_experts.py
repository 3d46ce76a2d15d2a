import json

import pytest
import torch
from safetensors.torch import load_file

from tests.fp8_checkpoints import adapted
from tests.internals import export_checkpoint, grouped_linear_function, make_recipe
from tests.moe_models import MODELS, moe_model
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8, export, weights_for_engine
from torch_fp8.ops.quantize import dequantize, quantize

WIDE = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 256, "head_dim": 32}
WIDE["num_key_value_heads"] = 4
"""Sizes whose matrices consist of blocks of 128 x 128."""
SPLIT = [name for name in MODELS if name not in ("GptOss", "Llama4Text")]
"""Models whose checkpoints have the matrices of each expert."""
FUSED = "model.layers.1.mlp.experts.gate_up_proj"
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*that run in FP8 are written in BF16"),
    pytest.mark.filterwarnings("ignore:experts are trained with one scale per row"),
]


def converted(name="Qwen3Moe", recipe="rowwise", steps=0, **sizes):
    torch.manual_seed(0)
    model = moe_model(name, **sizes)
    convert_to_float8(model, FP8Config(recipe=recipe))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if steps:
        convert_optimizer(optimizer, model=model)
    for _ in range(steps):
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def loss(model):
    tokens = torch.arange(64).view(2, 32) * 7 % 64
    with torch.autocast("cpu", torch.bfloat16):
        return model(input_ids=tokens, labels=tokens).loss


def multiplied(monkeypatch, model):
    """The values of the fused weights (E, R, C) in the next forward, by module and R."""
    seen, original = {}, grouped_linear_function.cast_weight

    def spy(weight, options, *after, flip):
        payload = original(weight, options, *after, flip=flip)
        seen[options.name, weight.shape[1]] = payload.qdata.float() * payload.scale
        return payload

    monkeypatch.setattr(grouped_linear_function, "cast_weight", spy)
    with torch.no_grad():
        loss(model)
    monkeypatch.undo()
    return seen


def read(folder):
    return {k: t for file in folder.glob("*.safetensors") for k, t in load_file(file).items()}


def joined(stored, prefix, projections=("gate_proj", "up_proj"), experts=4):
    """The fused weight (E, R, C) of the matrices of a checkpoint, in float32."""

    def values(name):
        weight = stored[f"{name}.weight"].float()
        return (
            weight * stored[f"{name}.weight_scale"] if f"{name}.weight_scale" in stored else weight
        )

    rows = [[values(f"{prefix}.{e}.{p}") for p in projections] for e in range(experts)]
    return torch.stack([torch.cat(parts) for parts in rows])


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_the_file_holds_what_training_multiplies_by(tmp_path, monkeypatch, recipe):
    model = converted(recipe=recipe, steps=2)
    report = export(model, tmp_path / "out", "compressed-tensors")
    stored, seen = read(tmp_path / "out"), multiplied(monkeypatch, model)
    assert len(seen) == 4
    for layer in (0, 1):
        prefix = f"model.layers.{layer}.mlp.experts"
        assert (prefix in report.fp8) == (recipe == "rowwise")
        for names, rows in ((("gate_proj", "up_proj"), 96), (("down_proj",), 64)):
            assert torch.equal(joined(stored, prefix, names), seen[prefix, rows]), names
    in_fp8 = stored["model.layers.0.mlp.experts.3.up_proj.weight"].dtype == torch.float8_e4m3fn
    assert in_fp8 == (recipe == "rowwise")
    ignored = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"][
        "ignore"
    ]
    assert "model.layers.0.mlp.gate" in ignored  # engines have a linear layer there
    assert ("re:model\\.layers\\.0\\.mlp\\.experts[.].*" in ignored) == (recipe == "tensorwise")
    assert not report.recast


def test_blocks_are_cast_anew_and_stock_transformers_opens_them(tmp_path):
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    model = converted(recipe="blockwise", **WIDE)
    with pytest.warns(UserWarning, match="experts are trained with one scale per row"):
        report = export(model, tmp_path / "out")
    assert report.recast == ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
    assert "2 of them are experts, cast again" in str(report)
    weight = model.get_parameter(FUSED)
    spec = make_recipe("blockwise").weight
    want = torch.stack([dequantize(quantize(w, spec), torch.bfloat16) for w in weight.detach()])
    quantization = FineGrainedFP8Config(dequantize=True)
    folder = tmp_path / "out"
    loaded = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization)
    assert torch.equal(loaded.get_parameter(FUSED), want)
    error = (want.float() - weight).norm() / weight.norm()
    assert error < 10 ** (-(31.0 - 0.5) / 20)  # the SQNR of E4M3


def test_sides_that_are_no_multiples_of_128_are_written_in_bf16(tmp_path):
    report = export(
        converted(recipe="blockwise", **WIDE | {"moe_intermediate_size": 48}), tmp_path / "out"
    )
    reasons = dict(report.kept)
    assert "48 x 128, are not multiples of 128" in reasons["model.layers.0.mlp.experts"]
    assert not report.recast
    stored = read(tmp_path / "out")
    assert stored["model.layers.0.mlp.experts.0.down_proj.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("name", SPLIT)
def test_names_are_those_of_stock_checkpoints(tmp_path, name):
    model = converted(name)
    moe_model(name).save_pretrained(tmp_path / "stock")
    stock = read(tmp_path / "stock")
    export(model, tmp_path / "out", "compressed-tensors")
    stored = read(tmp_path / "out")
    assert {key.removesuffix("_scale") for key in stored} == set(stock)
    assert all(stored[key].shape == value.shape for key, value in stock.items())
    handed = dict(weights_for_engine(model))
    model.save_pretrained(tmp_path / "own")
    own = read(tmp_path / "own")
    assert set(handed) == set(own)
    for key, value in own.items():
        assert torch.equal(handed[key], value.to(handed[key].dtype)), key


@pytest.mark.parametrize("name", ["GptOss", "Llama4Text"])
def test_experts_that_checkpoints_do_not_split(tmp_path, name):
    model = converted(name)
    with pytest.raises(
        ValueError, match=r"experts\.gate_up_proj' holds the experts of '.*experts' in one"
    ):
        export(model, tmp_path / "out", "compressed-tensors")
    assert set(dict(weights_for_engine(model))) >= {n for n, _ in model.named_parameters()} - {
        "lm_head.weight"
    }


def adapted_experts():
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    model = moe_model("Qwen3Moe", **WIDE)
    return adapted(model, FP8Config(recipe="blockwise"), target_parameters=targets)


@pytest.mark.parametrize("adapters", ["merge", "apart"])
def test_adapters_of_experts_are_folded_in_or_left_out(tmp_path, adapters):
    model = adapted_experts()
    handed = dict(weights_for_engine(model, adapters=adapters))
    export(model, tmp_path / "out", adapters=adapters)
    stored = read(tmp_path / "out")
    wrapper = model.get_base_model().model.layers[1].mlp.experts
    wrapper = next(
        m for m in wrapper.modules() if getattr(m, "parameter_name", "") == "gate_up_proj"
    )
    weight = wrapper.get_param().detach().float()
    if adapters == "merge":
        weight = weight + wrapper.get_delta_weight("default").float()
    weight = weight.bfloat16()
    got = torch.stack(
        [
            torch.cat(
                [handed[f"model.layers.1.mlp.experts.{e}.{p}_proj.weight"] for p in ("gate", "up")]
            )
            for e in range(4)
        ]
    )
    assert torch.equal(got, weight)
    block = weight[3, :128]  # gate of the last expert
    want = quantize(block, make_recipe("blockwise").weight)
    assert torch.equal(stored["model.layers.1.mlp.experts.3.gate_proj.weight"], want.qdata)
    assert torch.equal(
        stored["model.layers.1.mlp.experts.3.gate_proj.weight_scale_inv"], want.scale
    )


def test_a_nan_in_one_expert_is_named(tmp_path):
    model = converted()
    with torch.no_grad():
        model.get_parameter(FUSED)[2, 50, 3] = float("nan")
    with pytest.raises(
        ValueError, match=r"layers\.1\.mlp\.experts\.2\.up_proj\.weight' holds an Inf"
    ):
        export(model, tmp_path / "out", "compressed-tensors")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["Qwen3Moe", "Mixtral", "NemotronH"])
def test_a_checkpoint_on_disk_is_exported_as_its_model_is(tmp_path, name):
    from transformers import AutoModelForCausalLM

    model = converted(name, steps=1)
    model.save_pretrained(tmp_path / "saved")
    export(model, tmp_path / "live", "compressed-tensors")
    paths = tmp_path / "saved", tmp_path / "disk"
    export_checkpoint(AutoModelForCausalLM, *paths, "compressed-tensors", "rowwise")
    live, disk = read(tmp_path / "live"), read(tmp_path / "disk")
    assert live.keys() == disk.keys()
    for key, value in live.items():
        assert torch.equal(value.float(), disk[key].float()), key
