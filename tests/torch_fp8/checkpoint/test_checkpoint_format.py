import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fp8_checkpoints import FINE_GRAINED, compressed, exact, quantized, write
from tests.internals import (
    E4M3,
    CastSpec,
    FP8Weight,
    QuantizedFiles,
    SafetensorsFiles,
    freeze_tensor,
    read_format,
)

LAYOUTS = {
    "fine-grained": (FINE_GRAINED, "_scale_inv", lambda shape: (128, 128)),
    "fine-grained, one scale": (FINE_GRAINED | {"weight_block_size": None}, "_scale_inv", tuple),
    "tensor": (compressed("tensor"), "_scale", tuple),
    "channel": (compressed("channel"), "_scale", lambda shape: (1, shape[1])),
    "block": (compressed("block", block_structure=[128, 128]), "_scale", lambda shape: (128, 128)),
    "group": (compressed("group", group_size=32), "_scale", lambda shape: (1, 32)),
}


def _state():
    shapes = {"up_proj": (256, 128), "odd_proj": (200, 136), "down_proj": (128, 256)}
    state = {f"{name}.weight": torch.randn(shape) * 0.02 for name, shape in shapes.items()}
    state["up_proj.weight"][3, 5] = 4.0  # an outlier: others of its block become subnormal codes
    return state | {"norm.weight": torch.ones(128)}


def _written(folder, layout="fine-grained", **options):
    quantization, suffix, blocks = LAYOUTS[layout]
    config = {"quantization_config": quantization}
    return write(folder, _state(), config, suffix, blocks=blocks, **options)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_published_layout_is_read_exactly(tmp_path, layout, shards):
    expected = _written(tmp_path, layout, shards=shards)
    files = QuantizedFiles(tmp_path)
    assert files.fp8.keys() == expected.keys()
    for key, (qdata, scale, block) in expected.items():
        weight = files.read(key)
        assert weight.qdata.view(torch.uint8).equal(qdata.view(torch.uint8))
        true = exact(qdata, scale, block)
        # The product of 4 and 24 bits, rounded to 24.
        assert ((weight.dequantize().double() - true).abs() <= 2.0**-24 * true.abs()).all()
    assert torch.equal(files["norm.weight"], torch.ones(128))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_scale_may_have_any_shape_of_one_element(tmp_path, dtype):
    expected = _written(tmp_path, "tensor")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for shape, key in zip([(), (1,), (1, 1)], expected, strict=True):
        tensors[f"{key}_scale"] = torch.full(shape, 0.5, dtype=dtype)
    save_file(tensors, file)
    files = QuantizedFiles(file)
    for key, (qdata, _, _) in expected.items():
        assert torch.equal(files.read(key).dequantize(), qdata.float() / 2)


def test_one_scale_for_a_weight_of_several_blocks_is_refused(tmp_path):
    expected = _written(tmp_path)
    file = tmp_path / "model.safetensors"
    key = next(key for key, (_, scale, _) in expected.items() if scale.numel() > 1)
    save_file({**load_file(file), f"{key}_scale_inv": torch.ones(1, 1)}, file)
    with pytest.raises(ValueError, match=r"shape \(1, 1\), which does not match a weight"):
        QuantizedFiles(file)


def test_exponents_that_are_stored_as_bytes_are_powers_of_two(tmp_path):
    expected = _written(tmp_path)
    config = {"quantization_config": FINE_GRAINED | {"scale_fmt": "ue8m0"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    for key, (_, scale, _) in expected.items():
        tensors[f"{key}_scale_inv"] = torch.full(scale.shape, 120, dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    files = QuantizedFiles(tmp_path)
    for key, (qdata, _, _) in expected.items():
        weight = files.read(key)
        assert torch.equal(weight.dequantize(), qdata.float() * 2.0**-7)


@pytest.mark.parametrize(
    ("block", "granularity", "shape"),
    [
        ((128, 128), "block_128x128", (2, 2)),
        ((256, 136), "block_128x128", (2, 2)),  # one scale is also that of each block
        ((256, 136), "tensorwise", ()),
        ((1, 136), "block_128x128", None),
        ((64, 64), "block_128x128", None),
        ((128, 128), "tensorwise", None),
    ],
)
def test_frozen_weights_hold_bytes_whose_blocks_are_theirs(block, granularity, shape):
    """A card without GEMMs for blocks has one scale for a weight."""
    qdata, scale = quantized(torch.randn(256, 136), block)
    spec = CastSpec(E4M3, granularity)
    payload = freeze_tensor(FP8Weight(qdata, scale, block), spec, "name")
    if shape is None:
        assert payload.qdata.data_ptr() != qdata.data_ptr()
        return
    assert payload.qdata.data_ptr() == qdata.data_ptr()
    assert payload.scale.shape == shape
    spread = payload.scale.expand(2, 2) if granularity == "tensorwise" else payload.scale
    assert torch.equal(exact(payload.qdata, spread, (128, 128)), exact(qdata, scale, block))


def _without(key):
    return lambda tensors: tensors.pop(key)


def _with(key, function):
    return lambda tensors: tensors.update({key: function(tensors[key])})


KEY = "up_proj.weight_scale_inv"
BROKEN = {
    "missing": (_without(KEY), rf"'{KEY}', the scales of 'up_proj.weight', is missing"),
    "transposed": (_with(KEY, lambda s: s.t().contiguous()), rf"'{KEY}' has shape \(1, 2\)"),
    "flat": (_with(KEY, lambda s: s.flatten()), rf"'{KEY}' has shape \(2,\)"),
    "Inf": (_with(KEY, lambda s: s / 0), rf"'{KEY}' holds an Inf or NaN"),
    "NaN": (_with(KEY, lambda s: s * float("nan")), rf"'{KEY}' holds an Inf or NaN"),
    "zero": (_with(KEY, lambda s: s * 0), rf"'{KEY}' holds a scale of zero or below"),
    "negative": (_with(KEY, lambda s: -s), rf"'{KEY}' holds a scale of zero or below"),
    "integer": (_with(KEY, lambda s: s.int()), rf"'{KEY}' has dtype torch.int32"),
    "no weight": (_without("up_proj.weight"), rf"'{KEY}' has no E4M3 weight to scale"),
    "BF16 weight": (
        _with("up_proj.weight", lambda w: w.bfloat16()),
        rf"'{KEY}' has no E4M3 weight to scale",
    ),
    "no matrix": (
        _with("up_proj.weight", lambda w: w.view(2, -1, w.shape[1])),
        r"'up_proj.weight' has shape \(2, .*; FP8 weights must be matrices",
    ),
    "E5M2": (
        _with("up_proj.weight", lambda w: w.float().to(torch.float8_e5m2)),
        "'up_proj.weight' is E5M2",
    ),
}


@pytest.mark.parametrize(("breaks", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_scales_are_an_error_that_names_the_key(tmp_path, breaks, message):
    _written(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    breaks(tensors)
    save_file(tensors, file)
    with pytest.raises(ValueError, match=message) as error:
        QuantizedFiles(tmp_path)
    assert "nothing was loaded" in str(error.value)


OTHERS = {
    "NF4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
    "NF4, unnamed": ({"load_in_4bit": True}, "bitsandbytes"),
    "bitsandbytes_8bit": ({"quant_method": "bitsandbytes_8bit"}, "bitsandbytes_8bit|bitsandbytes"),
    "AWQ": ({"quant_method": "awq", "bits": 4}, "by awq"),
    "GPTQ": ({"quant_method": "gptq", "bits": 4}, "by gptq"),
    "MXFP4": ({"quant_method": "mxfp4"}, "by mxfp4"),
    "torchao": ({"quant_method": "torchao", "quant_type": {}}, "by torchao"),
    "unknown": ({"quant_method": "quip"}, "by quip"),
    "INT4 packed": (
        compressed("group", group_size=32) | {"format": "pack-quantized"},
        "'pack-quantized'",
    ),
    "INT8": (compressed("channel", type="int"), "compressed-tensors checkpoint"),
}


@pytest.mark.parametrize(("config", "named"), OTHERS.values(), ids=OTHERS)
def test_another_quantization_is_named_with_the_way_out(tmp_path, config, named):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(ValueError, match=named) as error:
        read_format(tmp_path)
    assert "from_pretrained" in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_a_checkpoint_that_is_not_quantized_has_no_format(tmp_path):
    assert read_format(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": None}))
    assert read_format(tmp_path) is None


def _cut(file):
    file.write_bytes(file.read_bytes()[:-40])


def _empty(file):
    file.write_bytes(b"")


def _lfs_pointer(file):
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


@pytest.mark.parametrize("breaks", [_cut, _empty, _lfs_pointer])
def test_a_file_that_is_not_whole_is_named(tmp_path, breaks):
    _written(tmp_path)
    file = tmp_path / "model.safetensors"
    breaks(file)
    with pytest.raises(ValueError, match=re.escape(f"{file} is not a safetensors file")):
        SafetensorsFiles(tmp_path)


def test_a_shard_that_is_missing_is_named(tmp_path):
    _written(tmp_path, shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"model-00002-of-00002.safetensors', which does not exist"
    ):
        SafetensorsFiles(tmp_path)


def test_a_folder_without_a_checkpoint_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"has no \*.safetensors file"):
        SafetensorsFiles(tmp_path)


def _groups(groups):
    return compressed("tensor") | {"config_groups": groups}


MALFORMED = {
    "a list": ([1], "a malformed quantization_config"),
    "a text": ("fp8", "a malformed quantization_config"),
    "groups that are a list": (_groups([]), "a malformed quantization_config"),
    "no groups": (_groups(None), "a malformed quantization_config"),
    "a group that is a text": (_groups({"0": "float"}), "a malformed quantization_config"),
    "weights that are a text": (
        _groups({"0": {"weights": "x"}}),
        "a malformed quantization_config",
    ),
    "another strategy": (compressed("spiral"), "weights of strategy 'spiral'; supported: tensor"),
    "another format": (compressed("tensor") | {"format": "naive"}, "checkpoint of 'naive'"),
    "groups of words": (compressed("group", group_size="x"), r"blocks of \(1, 'x'\); two sizes"),
    "a block of words": (FINE_GRAINED | {"weight_block_size": "x"}, r"blocks of \[0, 0\]"),
    "E5M2": (FINE_GRAINED | {"fmt": "e5m2"}, "fmt 'e5m2'; supported: E4M3"),
}


@pytest.mark.parametrize("quantization", MALFORMED)
def test_a_malformed_description_is_named(tmp_path, quantization):
    """Lists and texts in place of objects raised an AttributeError."""
    value, message = MALFORMED[quantization]
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": value}))
    with pytest.raises(ValueError, match=message) as error:
        read_format(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_files_that_are_no_json_are_named(tmp_path):
    for name in ("config.json", "model.safetensors.index.json"):
        (tmp_path / name).write_bytes(b"\xff\x00")
    with pytest.raises(ValueError, match=r"config.json is not valid JSON"):
        read_format(tmp_path)
    with pytest.raises(ValueError, match=r"index.json is not an index of safetensors files"):
        SafetensorsFiles(tmp_path)
