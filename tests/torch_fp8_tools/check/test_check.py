import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.internals import LayerFindings, LayerRows, cli, expert_weights, propose, text_of
from tests.moe_models import MODELS, moe_model
from torch_fp8 import FP8Config, convert_to_float8

SHORT = ("--sequence", "32", "--batches", "2")


def _llama(**options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}
    config = LlamaConfig(
        **{**sizes, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 128},
        **options,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config).bfloat16()


@torch.no_grad()
def _align(mlp, channels=(3, 7)):
    rows = list(channels)
    mlp.up_proj.weight[rows] = mlp.gate_proj.weight[rows]
    mlp.gate_proj.weight[rows] *= 200
    mlp.up_proj.weight[rows] *= 200
    mlp.down_proj.weight[:, rows] /= 40000


@torch.no_grad()
def _flush_down(module, expert, channel=5):
    """Give an expert's down projection a large channel whose activation is zero."""
    up, down = (w[expert] for n, w in module.named_parameters() if n.endswith("proj"))
    if getattr(module, "is_transposed", True):  # Llama-4's have no such flag
        up, down = up.t(), down.t()
    width = down.shape[1]
    up[[channel, (channel + width) % len(up), 2 * channel, 2 * channel + 1]] = 0
    down[:, channel] = 1e5


def _check(*arguments):
    return cli.main(["check", *map(str, arguments)])


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """A folder of a model with aligned channels in one layer and an outlier channel in another."""
    model = _llama()
    _align(model.model.layers[1].mlp)
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight[5] = 3e5
        for name in "qkv":
            layer = getattr(model.model.layers[0].self_attn, f"{name}_proj")
            layer.weight[:, 5] /= 3e5
    folder = tmp_path_factory.mktemp("faulty")
    model.save_pretrained(folder)
    return folder


def test_planted_faults_get_what_mends_them(faulty, tmp_path, capsys):
    file = tmp_path / "fp8.json"
    assert _check(faulty, *SHORT, "--output", file) == 0
    text = capsys.readouterr().out
    *lines, written = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert written == str(file)
    config = FP8Config.from_json(file)
    assert config.recipe == "tensorwise"
    assert config.overrides["model.layers.1.mlp.down_proj"] == {"smooth_swiglu": True}
    for name in "qkv":
        assert config.overrides[f"model.layers.0.self_attn.{name}_proj"] is None
    assert len(config.overrides) == 4
    flat = " ".join(text.split())
    assert "2 channels of gate and up are aligned" in flat
    assert "input channel 5 is" in flat
    assert "finer scales leave no more than" in flat
    assert "random tokens, because no DATA was given" in flat
    assert "the others (10)" in flat
    assert "not in FP8: lm_head: skip='lm_head'" in flat
    model = LlamaForCausalLM.from_pretrained(faulty)
    report = convert_to_float8(model, config)  # as the plugins do
    assert report.smooth == ("model.layers.1.mlp.down_proj",)
    assert report.unused_overrides == ()


def test_a_healthy_model_needs_nothing(tmp_path, capsys):
    _llama().save_pretrained(tmp_path / "model")
    assert _check(tmp_path / "model", *SHORT, "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert made["config"] == {"recipe": "tensorwise"}
    assert made["notes"] == []
    assert all(layer["options"] == {} for layer in made["layers"])
    assert min(layer["db"]["tensorwise"] for layer in made["layers"]) > 26


def test_all_down_projections_alike_are_one_option(tmp_path, capsys):
    model = _llama()
    for layer in model.model.layers:
        _align(layer.mlp, (3,))
    model.save_pretrained(tmp_path / "model")
    assert _check(tmp_path / "model", *SHORT) == 0
    text = capsys.readouterr().out
    assert json.loads(text[text.rindex("\n{") :]) == {"recipe": "tensorwise", "smooth_swiglu": True}


def test_a_text_awkward_shapes_and_odd_numbers_of_tokens(tmp_path, capsys):
    model = _llama(head_dim=18)
    model.save_pretrained(tmp_path / "model")
    words = {f"w{i}": i for i in range(128)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.save_pretrained(tmp_path / "model")
    text = tmp_path / "data.jsonl"
    text.write_text(json.dumps({"text": " ".join(f"w{i % 128}" for i in range(300))}) + "\n")
    arguments = "--sequence", "33", "--micro-batch", "1", "--batches", "2", "--json"
    assert _check(tmp_path / "model", text, *arguments) == 0
    made = json.loads(capsys.readouterr().out)
    assert "forwards of 33 tokens are not a multiple of 16" in made["notes"][0]
    q = next(layer for layer in made["layers"] if layer["name"].endswith("0.self_attn.q_proj"))
    assert q["options"] is None
    assert "64 x 36 is padded to multiples of 16, 33 % more work" in q["reasons"]
    assert made["config"]["overrides"]["q_proj"] is None
    text.write_text('{"txt": 1}\n')
    assert _check(tmp_path / "model", text) == 2
    assert "line 1, has no text field 'text' (it has 'txt')" in capsys.readouterr().err
    text.write_text('{"text": "w1"}\n')
    assert _check(tmp_path / "model", text) == 2
    assert "has 1 tokens, fewer than one sequence of" in capsys.readouterr().err


def test_a_finer_recipe_where_that_is_enough():
    found = LayerFindings(
        "a.o_proj", 64, 64, [32], 900.0, 5, {"tensorwise": 9.0, "blockwise": 27.0}
    )
    made = propose([found, LayerFindings("a.q_proj", 64, 64)], "tensorwise", {})
    assert made.config.overrides == {"a.o_proj": {"recipe": "blockwise"}}
    assert made.layers[0].reasons == (
        "input channel 5 is 900 times as large as the median one, and tensorwise leaves 9.0 dB",
        "blockwise leaves 27.0 dB",
    )
    assert "no token came by" in text_of(made, "model")


@pytest.mark.parametrize("name", sorted(MODELS))
def test_experts_are_counted_and_a_broken_one_is_found(name, tmp_path, capsys):
    torch.manual_seed(0)
    model = moe_model(name).bfloat16()
    experts = {n: m for n, m in model.named_modules() if any(True for _ in expert_weights(n, m))}
    fault, module = list(experts.items())[-1]
    for parameter in model.parameters():
        if parameter.ndim == 3:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path / "model")
    assert _check(tmp_path / "model", *SHORT, "--json") == 0
    layers = json.loads(capsys.readouterr().out)["layers"]
    found = {layer["name"]: layer for layer in layers if layer["experts"]}
    assert set(found) == set(experts)
    for layer in found.values():
        assert layer["options"] == {}
        assert 26 < layer["db"]["rowwise"] < 31
    _flush_down(module, 1)
    model.save_pretrained(tmp_path / "broken")
    file = tmp_path / "fp8.json"
    assert _check(tmp_path / "broken", *SHORT, "--output", file) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "dB of down_proj of expert 1" in text
    if len(experts) > 1:
        assert f"the others ({len(experts) - 1}), modules of experts" in text
    config = FP8Config.from_json(file)
    assert fault in config.overrides or config.overrides["experts"] is None
    report = convert_to_float8(model, config)  # as the plugins do
    left = {s.name for s in report.skipped if s.reason.startswith("overrides=")}
    assert left == set(expert_weights(fault, module))
    assert report.unused_overrides == ()


def test_mistakes_are_named(faulty, tmp_path, capsys):
    (tmp_path / "text").write_text("a b c")
    for arguments, says in (
        ((tmp_path / "none",), "config.json' cannot be read"),
        ((faulty, tmp_path / "none"), "none' is not a file"),
        ((faulty, tmp_path / "text"), "has no tokenizer for DATA"),
        ((faulty, "--sequence", 100), "longer than the model's 64 positions"),
        ((faulty, "--output", tmp_path), "this file cannot be written"),
    ):
        assert _check(*arguments) == 2, says
        assert says in capsys.readouterr().err
    with pytest.raises(SystemExit):
        _check(faulty, "--batches", "0")


def test_a_layer_is_measured_from_256_rows_of_its_input():
    layer = nn.Linear(8, 8)
    rows = LayerRows("layer", layer)
    for tokens in (100, 400, 400, 400, 400, 400):
        rows(layer, (torch.ones(tokens, 8),))
    assert sum(map(len, rows.rows)) == 256
