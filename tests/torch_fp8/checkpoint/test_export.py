import json
import math
import shutil

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import torch_fp8
from tests.fp8_checkpoints import EXPORTS, LiveStorages, exact, tiny_llama, write_llama
from tests.internals import input_group, linear_function, pause
from tests.internals import whole_folder_module as whole_folder
from tests.models import SIZES
from torch_fp8 import FP8Config, convert_to_float8, export


def _trained(recipe, steps=2, config=None, **changes):
    model = tiny_llama(**changes).train()
    convert_to_float8(model, config or FP8Config(recipe=recipe))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        _loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def _loss(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(256, (2, 32), generator=generator)
    with torch.autocast("cpu", torch.bfloat16):
        return model(input_ids=tokens, labels=tokens).loss


def _multiplied(monkeypatch, model, training=True):
    """The values of weights and the scales of inputs of the next forward, by layer."""
    seen, original = {}, linear_function.fprop

    def spy(x, weight, bias, shape, options, *others, **needs):
        y, operands = original(x, weight, bias, shape, options, *others, **needs)
        assert options.name not in seen
        w, a = operands.weight, operands.input.rowwise
        seen[options.name] = _values(w.qdata, w.scale), a.scale.clone()
        return y, operands

    def member(tokens, i, exchange, operands, options, *others):
        def multiply(a, w, *args, **kwargs):
            assert options.name not in seen
            seen[options.name] = _values(w.qdata, w.scale), a.scale.clone()
            return product(a, w, *args, **kwargs)

        input_group.scaled_matmul = multiply
        return output(tokens, i, exchange, operands, options, *others)

    product, output = input_group.scaled_matmul, input_group._output
    monkeypatch.setattr(linear_function, "fprop", spy)
    monkeypatch.setattr(input_group, "scaled_matmul", product)
    monkeypatch.setattr(input_group, "_output", member)
    model.train(training)
    with torch.set_grad_enabled(training):
        _loss(model, seed=7)
    monkeypatch.undo()
    return seen


def _values(qdata, scale):
    """What codes and scales stand for, in float64; the block is told by the shape of the scales."""
    rows, cols = qdata.shape
    grid = scale.reshape(1, 1) if scale.numel() == 1 else scale
    if grid.dtype == torch.uint8:
        grid = (grid.double() - 127).exp2()
    return exact(qdata, grid, (-(-rows // grid.shape[0]), -(-cols // grid.shape[1])))


def _read(folder):
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


@pytest.mark.parametrize(("format", "recipe"), EXPORTS)
def test_the_file_holds_what_training_multiplies_by(tmp_path, monkeypatch, format, recipe):
    model = _trained(recipe)
    report = export(model, tmp_path / "out", format)
    stored = _read(tmp_path / "out")
    multiplied = _multiplied(monkeypatch, model)
    assert sorted(report.fp8) == sorted(multiplied)
    suffix = "weight_scale_inv" if format == "fine-grained" else "weight_scale"
    for name, (values, input_scale) in multiplied.items():
        qdata, scale = stored.pop(f"{name}.weight"), stored.pop(f"{name}.{suffix}")
        assert qdata.dtype == torch.float8_e4m3fn
        assert scale.dtype == (torch.uint8 if recipe == "mxfp8" else torch.float32)
        assert torch.equal(_values(qdata, scale), values), name
        if format == "modelopt":
            assert torch.equal(stored.pop(f"{name}.input_scale"), input_scale), name
    state = model.state_dict()
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= stored.keys()
    for name, value in stored.items():
        assert torch.equal(value, state[name]), name
        assert value.dtype == torch.bfloat16
    assert report.bytes_per_bf16_byte <= 0.52
    assert report.ignored == ("lm_head",)


@pytest.mark.parametrize(("format", "recipe"), [case for case in EXPORTS if case[0] != "modelopt"])
def test_stock_transformers_opens_it_with_the_same_values(tmp_path, monkeypatch, format, recipe):
    """What compressed-tensors wrote is loaded by that library; float32 keeps tensorwise scales."""
    from transformers import AutoModelForCausalLM

    if format == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
    model = _trained(recipe)
    export(model, tmp_path / "out", format)
    dtype = torch.float32 if recipe == "tensorwise" else torch.bfloat16
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=dtype, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.arange(32).reshape(1, -1)
    with torch.no_grad():
        logits = loaded(tokens).logits  # compressed-tensors dequantizes in the first forward
    state = loaded.state_dict()
    for name, (values, _) in _multiplied(monkeypatch, model, training=False).items():
        weight = state[f"{name}.weight"]
        expected = values.float() if recipe == "tensorwise" else values.bfloat16()
        assert torch.equal(expected.double(), values) or recipe == "tensorwise"
        assert torch.equal(weight, expected), name
    served = torch.nn.functional.cross_entropy(logits[0, :-1].float(), tokens[0, 1:])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        own = model.eval()(tokens, labels=tokens).loss
    assert abs(float(served - own)) < 0.02


def test_a_frozen_model_keeps_its_very_bytes(tmp_path):
    """Those of an FP8 checkpoint, whose scales are no powers of two, come out as they went in."""
    from transformers import AutoModelForCausalLM

    expected = write_llama(tmp_path / "in")
    model = torch_fp8.load_frozen(AutoModelForCausalLM, tmp_path / "in", "blockwise")
    report = export(model, tmp_path / "out")
    stored = _read(tmp_path / "out")
    assert len(report.fp8) == len(expected) == 14
    for key, (qdata, scale, _) in expected.items():
        assert torch.equal(stored[key].view(torch.uint8), qdata.view(torch.uint8))
        assert torch.equal(stored[f"{key}_scale_inv"], scale)


@pytest.mark.parametrize(
    ("format", "recipe", "other"),
    [
        ("fine-grained", "rowwise", "compressed-tensors"),
        ("fine-grained", "delayed", "modelopt"),
        ("compressed-tensors", "delayed", "modelopt"),
        ("modelopt", "blockwise", "fine-grained"),
        ("modelopt", "mxfp8", "compressed-tensors"),
    ],
)
def test_a_recipe_that_a_format_cannot_say_is_refused_for_another(tmp_path, format, recipe, other):
    model = _trained(recipe, steps=0)
    with pytest.raises(ValueError, match=rf"cannot express recipe '{recipe}'.*format='{other}'"):
        export(model, tmp_path / "out", format)
    assert not list(tmp_path.iterdir())


def test_bad_calls_are_refused_and_leave_what_was_there(tmp_path):
    model = _trained("blockwise", steps=0)
    cases = {
        "format='gguf' is unknown": (model, tmp_path / "out", "gguf"),
        "is not a folder": (model, tmp_path / "no" / "out", "fine-grained"),
        "has no FP8 layer": (tiny_llama(), tmp_path / "out", "fine-grained"),
    }
    for message, call in cases.items():
        with pytest.raises(ValueError, match=message):
            export(*call)
    with pytest.raises(TypeError, match=r"export\(format=...\) takes a str, got list"):
        export(model, tmp_path / "out", ["fine-grained"])
    with pytest.raises(TypeError, match=r"tokenizer='gpt2' has no save_pretrained"):
        export(model, tmp_path / "out", tokenizer="gpt2")
    with pytest.raises(TypeError, match=r"Sequential has no such config"):
        export(nn.Sequential(nn.Linear(128, 128)), tmp_path / "out")
    with pytest.raises(ValueError, match="max_shard_size='many' is not a size"):
        export(model, tmp_path / "out", max_shard_size="many")
    assert not list(tmp_path.iterdir())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with pytest.raises(ValueError, match=r"out' already exists"):
        export(model, tmp_path / "out")
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")] == ["out", "out/mine"]


def _set(name, value):
    @torch.no_grad()
    def change(model):
        owner, _, attribute = name.rpartition(".")
        getattr(model.get_submodule(owner), attribute).view(-1)[3] = value

    return change


def _add_phases(model):
    model.model.register_buffer("phases", torch.ones(2, dtype=torch.complex64))


DOWN, NORM, HISTORY = (
    "model.layers.1.mlp.down_proj.weight",
    "model.norm.weight",
    "model.layers.1.mlp.down_proj.fp8_amax_history",
)
NOT_FINITE = [(name, value) for name in (DOWN, NORM) for value in (math.nan, math.inf)]
REFUSED = [
    *(
        ("blockwise", _set(name, value), f"'{name}' holds an Inf or NaN")
        for name, value in NOT_FINITE
    ),
    # NaN would be served with a scale of 1, and Inf with one of Inf.
    *(
        ("delayed", _set(HISTORY, value), "of the input of 'model.layers.1.mlp.down_proj' holds an")
        for value in (math.nan, math.inf)
    ),
    ("delayed", None, "'model.layers.0.self_attn.q_proj' has recorded no amax"),
    ("blockwise", _add_phases, "'model.phases' is torch.complex64, and engines"),
    ("blockwise", lambda model: model.to("meta"), "'model.embed_tokens.weight' has no values in"),
]


@pytest.mark.parametrize(("recipe", "change", "message"), REFUSED)
def test_what_cannot_be_written_is_refused_by_name(tmp_path, recipe, change, message):
    model = _trained(recipe, steps=2 if recipe == "delayed" and change else 0)
    if change is not None:
        change(model)
    with pytest.raises(ValueError, match=message):
        export(model, tmp_path / "out", "modelopt" if recipe == "delayed" else "fine-grained")
    assert not list(tmp_path.iterdir())


def test_gpt2s_transposed_layers_are_refused(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=128, n_layer=1, n_head=2, vocab_size=256))
    convert_to_float8(model, "blockwise")
    with pytest.raises(ValueError, match=r"any of the model's FP8 layers.*Conv1D"):
        export(model, tmp_path / "out")


def test_a_config_that_cannot_be_saved_is_found_before_a_weight_is_cast(tmp_path, monkeypatch):
    """As transformers' ``save_pretrained`` finds it."""
    model = _trained("blockwise", steps=0)
    model.generation_config.temperature = 0.5  # and nothing is sampled
    cast = []
    monkeypatch.setattr(safetensors.torch, "save_file", lambda *_, **__: cast.append(1))
    with pytest.raises(ValueError, match="GenerationConfig is invalid"):
        export(model, tmp_path / "out")
    assert cast == []
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_too_small_is_refused_before_anything_is_cast(tmp_path, monkeypatch):
    model = _trained("blockwise", steps=0)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(whole_folder.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match="1000 are free") as raised:
        export(model, tmp_path / "out")
    assert str(tmp_path / "out") in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_an_interrupt_leaves_nothing(tmp_path, monkeypatch):
    model = _trained("blockwise", steps=0)
    written = []

    def interrupted(tensors, file, metadata):
        written.append(file.write_bytes(b"a part"))
        if len(written) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(safetensors.torch, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export(model, tmp_path / "out", max_shard_size="100KB")
    assert len(written) == 2
    assert not list(tmp_path.iterdir())


def test_files_are_sharded_as_save_pretrained_does_it(tmp_path):
    model = _trained("blockwise", steps=0)
    export(model, tmp_path / "one")
    export(model, tmp_path / "many", max_shard_size="100KB")
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    for name in files:
        assert (tmp_path / "many" / name).stat().st_size < 104_000
        with safe_open(tmp_path / "many" / name, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert {*opened.keys()} == {
                k for k, file in index["weight_map"].items() if file == name
            }
    one, many = _read(tmp_path / "one"), _read(tmp_path / "many")
    assert index["weight_map"].keys() == one.keys() == many.keys()
    assert all(torch.equal(_bytes(one[key]), _bytes(many[key])) for key in one)
    assert index["metadata"]["total_size"] == sum(_bytes(t).numel() for t in one.values())


def test_a_weight_of_two_norms_is_written_under_both_names(tmp_path):
    """The safetensors library refuses tensors that share memory."""
    model = _trained("blockwise", steps=0)
    layers = model.model.layers
    layers[1].input_layernorm.weight = layers[0].input_layernorm.weight
    export(model, tmp_path / "out")
    written = _read(tmp_path / "out")
    for i in (0, 1):
        key = f"model.layers.{i}.input_layernorm.weight"
        assert torch.equal(written[key], layers[0].input_layernorm.weight.bfloat16())


def _bytes(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def test_tensors_are_made_file_by_file(tmp_path):
    """Beside the model there is never more than a file, and what one layer takes to be cast."""
    model = _trained("blockwise", steps=0, num_hidden_layers=8, intermediate_size=512)
    largest = max(p.numel() for p in model.parameters())
    total = sum(p.numel() for p in model.parameters())
    held = {p.untyped_storage()._cdata for p in (*model.parameters(), *model.buffers())}
    with LiveStorages() as live:
        live._known |= held
        export(model, tmp_path / "out", max_shard_size=largest)
    assert live.peak < 20 * largest < total


def test_the_model_stays_as_it_is(tmp_path, monkeypatch):
    model = _trained("delayed")
    state = {key: value.clone() for key, value in model.state_dict().items()}
    history = torch_fp8.scaling_state_dict(model)
    config = model.config.to_json_string()
    export(model, tmp_path / "out", "modelopt")
    assert model.training
    assert model.config.to_json_string() == config
    assert all(torch.equal(model.state_dict()[key], value) for key, value in state.items())
    after = torch_fp8.scaling_state_dict(model)
    assert all(torch.equal(after[key], value) for key, value in history.items())


def test_modelopt_describes_itself_twice(tmp_path):
    export(_trained("delayed"), tmp_path / "out", "modelopt")
    own = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
    assert own["producer"] == {
        "name": "modelopt",  # what engines ask for
        "version": f"torch-fp8 {torch_fp8.__version__}",  # who has written it
    }
    assert own["quantization"] == {
        "quant_algo": "FP8",
        "kv_cache_quant_algo": None,
        "exclude_modules": ["lm_head"],
    }
    of_config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (of_config["quant_method"], of_config["quant_algo"]) == ("modelopt", "FP8")
    assert of_config["producer"] == own["producer"]
    assert of_config["ignore"] == ["lm_head"]


def test_parts_of_a_fused_weight_are_in_fp8_together_or_not_at_all(tmp_path, monkeypatch):
    """64 rows of keys and values make no block: q, which would fit, is in BF16 with them."""
    model = _trained("blockwise", num_key_value_heads=1)
    with pytest.warns(UserWarning, match=r"6 layers that run in FP8 are written in BF16"):
        report = export(model, tmp_path / "out")
    kept = dict(report.kept)
    assert kept["model.layers.0.self_attn.k_proj"].startswith("its sides, 64 x 128")
    together = "engines multiply it together with 'model.layers.0.self_attn.k_proj'"
    assert kept["model.layers.0.self_attn.q_proj"].startswith(together)
    assert sorted(report.ignored) == sorted([*kept, "lm_head"])
    stored = _read(tmp_path / "out")
    for name, (values, _) in _multiplied(monkeypatch, model).items():
        if name in kept:
            assert stored[f"{name}.weight"].dtype == torch.bfloat16
            assert torch.equal(stored[f"{name}.weight"].double(), values)
        else:
            assert stored[f"{name}.weight"].dtype == torch.float8_e4m3fn


def test_a_skipped_part_of_a_fused_weight_keeps_its_neighbours_in_bf16(tmp_path):
    config = FP8Config(recipe="rowwise", skip=("lm_head", "layers.0.mlp.gate_proj"))
    model = _trained("rowwise", config=config)
    with pytest.warns(UserWarning, match="written in BF16"):
        report = export(model, tmp_path / "out", "compressed-tensors")
    assert [name for name, _ in report.kept] == ["model.layers.0.mlp.up_proj"]
    model = _trained("", config=FP8Config(recipe="tensorwise", skip=config.skip))
    with pytest.raises(ValueError, match=r"'model.layers.0.mlp.up_proj.weight' cannot be written"):
        export(model, tmp_path / "again", "compressed-tensors")


def test_a_layer_that_is_paused_is_written_as_it_multiplies_now(tmp_path):
    """In high precision, as the monitor's way back leaves it, and its neighbours with it."""
    model = _trained("blockwise")
    layer = model.model.layers[0]
    for paused in (layer.self_attn.o_proj, layer.mlp.up_proj):
        pause(paused)
    with pytest.warns(UserWarning, match=r"together with 'model.layers.0.mlp.up_proj', which is"):
        report = export(model, tmp_path / "out")
    assert [name for name, _ in report.kept] == ["model.layers.0.mlp.gate_proj"]
    stored = _read(tmp_path / "out")
    for name in ("model.layers.0.self_attn.o_proj", "model.layers.0.mlp.up_proj"):
        assert torch.equal(stored[f"{name}.weight"], model.get_submodule(name).weight)
        assert f"{name}.weight_scale_inv" not in stored
        assert name in report.ignored
    assert len(report.fp8) == 11


def test_a_paused_layer_whose_weight_is_fp8_alone_is_written_with_its_values(tmp_path):
    model = _trained("blockwise", steps=0)
    torch_fp8.freeze(model)
    layer = model.model.layers[0].self_attn.o_proj
    pause(layer)
    export(model, tmp_path / "out")
    stored = _read(tmp_path / "out")["model.layers.0.self_attn.o_proj.weight"]
    assert torch.equal(stored, layer.weight.dequantize().bfloat16())


def test_stacked_weights_are_cut_at_multiples_of_128(tmp_path):
    from transformers import Phi3Config, Phi3ForCausalLM

    def phi(**changes):
        sizes = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 256}
        sizes |= {"num_hidden_layers": 1, "num_key_value_heads": 4, "pad_token_id": 0}
        model = Phi3ForCausalLM(Phi3Config(**SIZES | sizes | changes)).bfloat16()
        convert_to_float8(model, "blockwise")
        return model

    report = export(phi(), tmp_path / "whole")
    assert not report.kept
    assert len(report.fp8) == 4
    with pytest.warns(UserWarning, match="in BF16"):
        report = export(phi(num_key_value_heads=1, intermediate_size=192), tmp_path / "part")
    assert dict(report.kept)["model.layers.0.self_attn.qkv_proj"].startswith("its parts have")
    assert "model.layers.0.mlp.gate_up_proj" in dict(report.kept)


def test_the_small_tied_model_is_written_once_and_opened_tied(tmp_path):
    from transformers import AutoModelForCausalLM

    model = _trained("blockwise", tie_word_embeddings=True)
    export(model, tmp_path / "out")
    assert "lm_head.weight" not in _read(tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_an_output_layer_in_fp8_is_refused_tied_and_written_in_bf16_else(tmp_path):
    config = FP8Config(recipe="blockwise", skip=())
    tied = _trained("", config=config, tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"'lm_head' runs in FP8 and shares its weight"):
        export(tied, tmp_path / "out")
    assert not list(tmp_path.iterdir())
    with pytest.warns(UserWarning, match="engines keep the output layer in 16 bits"):
        report = export(_trained("", config=config), tmp_path / "out")
    assert report.ignored == ("lm_head",)
    assert "; output layer 'lm_head' in BF16; 1 that run in FP8 are written in BF16" in str(report)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_frozen_output_layer_in_fp8_is_written_in_bf16(tied, tmp_path):
    """Under LoRA it is stored with one scale, among layers with scales of blocks."""
    import peft

    options = peft.LoraConfig(r=4, target_modules=["q_proj"])
    model = peft.get_peft_model(tiny_llama(vocab_size=4096, tie_word_embeddings=tied), options)
    report = convert_to_float8(model, "blockwise")
    assert list(report.loss_heads.values()) == ["fp8"]
    with pytest.warns(UserWarning, match="engines keep the output layer in 16 bits"):
        report = export(model, tmp_path / "out", adapters="merge")
    assert report.head == "lm_head"
    assert report.head not in report.fp8
    written, head = _read(tmp_path / "out"), model.get_output_embeddings().weight
    key = "model.embed_tokens.weight" if tied else "lm_head.weight"
    assert tied == ("lm_head.weight" not in written)
    torch.testing.assert_close(written[key], head.detach().bfloat16(), rtol=0, atol=0)


def test_sharded_weights_are_refused_by_name(tmp_path, rank_of_two):
    model = _trained("blockwise", steps=0)
    sharded = distribute_tensor(torch.ones(128), init_device_mesh("cpu", (2,)))
    model.model.layers[1].input_layernorm.weight = nn.Parameter(sharded)
    with pytest.raises(ValueError, match=r"'model.layers.1.input_layernorm.weight' is sharded"):
        export(model, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_payloads_that_the_optimizer_writes_are_those_of_the_file(tmp_path, monkeypatch, recipe):
    model = tiny_llama().float().train()
    config = FP8Config(recipe=recipe, cache_weights=True)
    convert_to_float8(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch_fp8.convert_optimizer(optimizer, config, model=model)
    for step in range(2):
        _loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    multiplied = _multiplied(monkeypatch, model)  # of what the step has kept
    export(model, tmp_path / "out", "compressed-tensors")
    stored = _read(tmp_path / "out")
    for name, (values, _) in multiplied.items():
        qdata, scale = stored[f"{name}.weight"], stored[f"{name}.weight_scale"]
        assert torch.equal(_values(qdata, scale), values), name


@pytest.mark.parametrize("given", [True, False])
def test_the_tokenizer_comes_along(tmp_path, given):
    class Tokenizer:
        def save_pretrained(self, folder):
            (folder / "tokenizer.json").write_text("mine")

    model = _trained("blockwise", steps=0)
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("of the folder")
    (source / "tokenizer_config.json").write_text("{}")
    (source / "optimizer.pt").write_text("no")
    model.config.name_or_path = str(source)
    export(model, tmp_path / "out", tokenizer=Tokenizer() if given else None)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    text = (tmp_path / "out" / "tokenizer.json").read_text()
    assert text == ("mine" if given else "of the folder")
    assert ("tokenizer_config.json" in names) is not given
    assert "optimizer.pt" not in names


@pytest.mark.parametrize(("format", "recipe"), EXPORTS)
def test_it_is_read_back_exactly(tmp_path, monkeypatch, format, recipe):
    """The residual of 8 bits adds nothing to values that BF16 holds, and half a unit to others."""
    from transformers import AutoModelForCausalLM

    model = _trained(recipe)
    export(model, tmp_path / "out", format)
    read = torch_fp8.load_trainable(AutoModelForCausalLM, tmp_path / "out")
    optimizer = torch.optim.AdamW(read.parameters())
    convert_to_float8(read, recipe)
    torch_fp8.convert_optimizer(optimizer, model=read)
    merged = torch_fp8.merged_state_dict(read, optimizer)
    for name, (values, _) in _multiplied(monkeypatch, model).items():
        error = (merged[f"{name}.weight"].double() - values).abs()
        bound = 2.0**-16 if recipe in ("tensorwise", "delayed") else 0.0
        assert bool((error <= bound * values.abs()).all()), name


@pytest.mark.parametrize(("format", "recipe"), [EXPORTS[0], EXPORTS[-1]])
@pytest.mark.parametrize("how", ["no file", "nothing in it"])
@pytest.mark.parametrize("load", [torch_fp8.load_frozen, torch_fp8.load_trainable])
def test_a_folder_without_its_config_is_refused_by_name(tmp_path, format, recipe, how, load):
    model = _trained(recipe)
    export(model, tmp_path / "out", format)
    if how == "no file":
        (tmp_path / "out" / "config.json").unlink()
    else:
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        del config["quantization_config"]
        (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"proj.weight' in .* holds FP8 codes"):
        load(lambda: tiny_llama(), tmp_path / "out")
