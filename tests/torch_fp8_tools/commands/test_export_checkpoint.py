import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.fp8_checkpoints import LiveStorages, tiny_llama, write_llama
from tests.internals import export_checkpoint
from tests.steps import adamw
from torch_fp8 import FP8Config, export, merged_state_dict, scaling_state_dict


def _trained(recipe="blockwise", opt_level="O2", **changes):
    """A model whose weights were float32, and its optimizer."""
    model = tiny_llama(**changes).float().train()
    config = FP8Config(recipe=recipe, opt_level=opt_level)
    optimizer, _ = adamw(model, config, lr=1e-3)
    for seed in range(2):
        tokens = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(seed))
        with torch.autocast("cpu", torch.bfloat16):
            model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _saved(model, optimizer, folder):
    folder.mkdir()
    state = merged_state_dict(model, optimizer)
    state = {key: value.contiguous() for key, value in state.items()}
    if model.config.tie_word_embeddings:
        del state["model.embed_tokens.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    history = {f"0.{key}": value for key, value in scaling_state_dict(model).items()}
    if history:
        save_file(history, folder / "fp8_scaling_0.safetensors")


def _export(folder, format, config, out="out", source="in", **options):
    paths = folder / source, folder / out
    return export_checkpoint(AutoModelForCausalLM, *paths, format, config, **options)


def _assert_same(folder, out="out"):
    """The model that was trained was exported to ``live``."""
    a, b = (load_file(folder / name / "model.safetensors") for name in ("live", out))
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].dtype == b[key].dtype, key
        assert torch.equal(_bytes(a[key]), _bytes(b[key])), key


def _bytes(tensor):
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize(
    ("recipe", "opt_level", "tied"),
    [
        *(("blockwise", level, tied) for level in ("O1", "O2") for tied in (False, True)),
        *((recipe, "O2", False) for recipe in ("tensorwise", "rowwise", "mxfp8")),
    ],
)
def test_whole_weights_give_the_bytes_of_the_trained_model(tmp_path, recipe, opt_level, tied):
    """BF16 of a whole weight by rounding to even differs in one weight of some hundred."""
    model, optimizer = _trained(recipe, opt_level, tie_word_embeddings=tied)
    _saved(model, optimizer, tmp_path / "in")
    format = "fine-grained" if recipe == "blockwise" else "compressed-tensors"
    export(model, tmp_path / "live", format)
    report = _export(tmp_path, format, FP8Config(recipe=recipe, opt_level=opt_level))
    assert len(report.fp8) == 14
    _assert_same(tmp_path)
    live, out = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("live", "out")
    )
    assert live == out
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert (tmp_path / "out" / "generation_config.json").is_file() is False


def test_delayed_scaling_goes_on_from_the_history_beside_the_checkpoint(tmp_path):
    model, optimizer = _trained("delayed")
    _saved(model, optimizer, tmp_path / "in")
    export(model, tmp_path / "live", "modelopt")
    _export(tmp_path, "modelopt", "delayed")
    _assert_same(tmp_path)
    history = tmp_path / "in" / "fp8_scaling_0.safetensors"
    behind = {f"10{key.removeprefix('0')}": value for key, value in load_file(history).items()}
    save_file(behind, history)  # the model was prepared after others that have none
    _export(tmp_path, "modelopt", "delayed", "of_10")
    _assert_same(tmp_path, "of_10")
    history.unlink()
    with pytest.raises(ValueError, match=r"has no fp8_scaling_0.safetensors"):
        _export(tmp_path, "modelopt", "delayed", "no")
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("recipe", ["blockwise", "rowwise"])
def test_an_fp8_checkpoint_keeps_its_bytes_where_the_blocks_are_the_recipes(tmp_path, recipe):
    expected = write_llama(tmp_path / "in")
    format = "fine-grained" if recipe == "blockwise" else "compressed-tensors"
    _export(tmp_path, format, recipe)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for key, (qdata, scale, _) in expected.items():
        if recipe == "blockwise":
            assert torch.equal(_bytes(stored[key]), _bytes(qdata))
            assert torch.equal(stored[f"{key}_scale_inv"], scale)
        else:
            assert stored[f"{key}_scale"].shape == (qdata.shape[0], 1)


def test_what_is_wrong_is_refused_and_leaves_nothing(tmp_path):
    model, optimizer = _trained()
    _saved(model, optimizer, tmp_path / "in")
    before = sorted(tmp_path.rglob("*"))

    def refused(message, format="fine-grained", config="blockwise", out="out", source="in"):
        with pytest.raises(ValueError, match=message):
            _export(tmp_path, format, config, out, source)
        assert sorted(tmp_path.rglob("*")) == before

    refused("recipe 'auto' chooses on the training card", config="auto")
    refused("cannot express recipe 'mxfp8'", config="mxfp8")
    refused("exists", out="in")
    refused("has no .*safetensors file", source="nowhere")
    state = load_file(tmp_path / "in" / "model.safetensors")
    state["model.layers.1.mlp.up_proj.weight"][3, 3] = float("nan")
    save_file(state, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    refused(r"'model.layers.1.mlp.up_proj.weight' holds an Inf or NaN")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    refused(r"it is missing 'model.layers.1.mlp.up_proj.weight'")
    (tmp_path / "in" / "config.json").unlink()
    before = sorted(tmp_path.rglob("*"))
    refused("has no config.json")
    (tmp_path / "in" / "adapter_config.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    refused("is an adapter without its base")


@pytest.mark.long
def test_the_checkpoint_is_never_in_memory_as_a_whole(tmp_path):
    model, optimizer = _trained(num_hidden_layers=8, intermediate_size=512)
    _saved(model, optimizer, tmp_path / "in")
    largest = max(p.numel() for p in model.parameters())
    total = sum(p.numel() for p in model.parameters())
    with LiveStorages() as live:
        _export(tmp_path, "fine-grained", "blockwise", max_shard_size=largest)
    assert live.peak < 28 * largest < total
