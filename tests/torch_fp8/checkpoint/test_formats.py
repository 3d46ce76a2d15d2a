"""What the table of formats writes, it reads: descriptions, tensors, and folders of models."""

import json

import pytest
import torch

from tests.fp8_checkpoints import EXPORTS, tiny_llama
from tests.internals import FileFormat, QuantizedFiles, export_format, make_recipe, parse_format
from tests.moe_models import moe_model
from torch_fp8 import convert_to_float8, export, weights_for_engine
from torch_fp8.ops.quantize import dequantize, quantize

BLOCKS = [(0, 0), (1, 0), (1, 32), (128, 128), (64, 256)]
DESCRIBED = [
    *(FileFormat("fine-grained", (b,), e) for b in BLOCKS if b != (1, 0) for e in (False, True)),
    *(FileFormat("compressed-tensors", (b,), e) for b in BLOCKS for e in (False, True)),
    FileFormat("compressed-tensors", tuple(BLOCKS)),
    FileFormat("modelopt", ((0, 0),)),
]


@pytest.mark.parametrize("format", DESCRIBED, ids=str)
def test_a_description_is_read_as_the_format_that_wrote_it(format):
    written = json.loads(json.dumps(format.quantization_config(["lm_head"])))
    assert parse_format(written, "the file") == format
    assert written.get("ignore", written.get("modules_to_not_convert")) == ["lm_head"]


def test_activations_of_engines_have_the_strategy_of_the_weights_rows():
    strategies = {
        "tensorwise": {"strategy": "tensor"},
        "rowwise": {"strategy": "token"},
        "blockwise": {"strategy": "group", "group_size": 128},
        "mxfp8": {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
    }
    numbers = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True}
    for recipe, strategy in strategies.items():
        written = export_format("compressed-tensors", recipe).quantization_config([])
        assert written["config_groups"]["group_0"]["input_activations"] == numbers | strategy


@pytest.mark.parametrize("shape", [(256, 128), (200, 136)], ids=str)
@pytest.mark.parametrize(("name", "recipe"), EXPORTS)
def test_tensors_are_read_as_the_weight_that_wrote_them(name, recipe, shape):
    format, key = export_format(name, recipe), "up_proj.weight"
    payload = quantize(torch.randn(shape), make_recipe(recipe).weight)
    scale = torch.tensor(0.5) if format.is_static else None
    written = dict(format.tensors("up_proj", payload, scale))
    assert ("up_proj.input_scale" in written) == format.is_static
    codes, scales = written[key], written[format.scale_key(key)]
    read = format.weight(codes, scales, format.block_of(key, codes, scales))
    assert torch.equal(read.dequantize(), dequantize(payload))
    meta = quantize(torch.empty(shape, device="meta"), make_recipe(recipe).weight)
    planned = dict(format.tensors("up_proj", meta, scale))
    assert [(k, t.shape, t.dtype) for k, t in planned.items()] == [
        (k, t.shape, t.dtype) for k, t in written.items()
    ]


WIDE = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 256, "head_dim": 32}
RANKS = {"q_lora_rank": 128, "kv_lora_rank": 128}
HEADS = {"qk_rope_head_dim": 16, "head_dim": 16, "v_head_dim": 32}
MODELS = {
    "dense": tiny_llama,
    "tied": lambda: tiny_llama(tie_word_embeddings=True),
    "experts": lambda: moe_model("Qwen3Moe", **WIDE, num_key_value_heads=4).bfloat16(),
    "latent attention": lambda: moe_model("DeepseekV3", **WIDE | RANKS | HEADS).bfloat16(),
}


@pytest.mark.filterwarnings("ignore:.*that run in FP8 are written in BF16")
@pytest.mark.filterwarnings("ignore:experts are trained with one scale per row")
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("name", "recipe"), EXPORTS)
def test_a_model_is_read_back_bit_for_bit(tmp_path, name, recipe, kind):
    torch.manual_seed(0)
    model = MODELS[kind]().train()
    convert_to_float8(model, recipe)
    if name == "modelopt":
        model(torch.arange(64).view(2, 32))  # records the amaxes of inputs
    report = export(model, tmp_path / "out", name)
    files, weights = QuantizedFiles(tmp_path / "out"), dict(weights_for_engine(model))
    assert {*files} == {*weights}
    assert len(files.fp8) >= len(report.fp8) > 0
    cast = make_recipe(recipe).weight
    for key, weight in weights.items():
        read = files.read(key)
        if key in files.fp8:
            assert torch.equal(read.dequantize(), dequantize(quantize(weight, cast))), key
            continue
        if any(key.startswith(f"{layer}.") for layer, _ in report.kept):
            of_experts = make_recipe("rowwise").weight if ".experts." in key else cast
            weight = dequantize(quantize(weight, of_experts), torch.bfloat16)
        assert torch.equal(read, weight), key
