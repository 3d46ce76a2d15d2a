import json

import pytest
import torch
from safetensors.torch import load_file

import torch_fp8
from tests.fp8_checkpoints import EXPORTS, tiny_llama
from tests.internals import export_checkpoint
from torch_fp8 import FP8Config, convert_optimizer, export, load_frozen, weights_for_engine

ORIGINS = ["bfloat16", "float16", "O1", "O2", "O3"]
"""The dtype of a model, or the level at which a float32 model is trained."""
TOKENS = torch.arange(1, 9)[None]


def _llama(origin, recipe, **changes):
    """A model whose k_proj and v_proj have 64 rows, no multiple of a block's."""
    options = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    options |= {"intermediate_size": 128, "vocab_size": 64}
    is_level = origin in ("O1", "O2", "O3")
    model = tiny_llama(**(options | changes)).train()
    dtype = torch.float32 if is_level else getattr(torch, origin)
    for parameter in model.parameters():  # the rotary frequencies stay float32
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    config = FP8Config(recipe=recipe, opt_level=origin if is_level else "O1")
    torch_fp8.convert_to_float8(model, config)
    if is_level:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        convert_optimizer(optimizer, config, model=model)
    with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(is_level):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss  # delayed scaling records amaxes
    if is_level:
        loss.backward()
        optimizer.step()
    return model


def _dtypes(folder):
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    scaled = {key for key in tensors if f"{key}_scale" in tensors or f"{key}_scale_inv" in tensors}
    return {v.dtype for k, v in tensors.items() if k not in scaled and "_scale" not in k}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*written in BF16")
@pytest.mark.parametrize(("format", "recipe"), EXPORTS)
def test_every_export_is_opened_and_generates(tmp_path, format, recipe):
    """transformers opens all but ModelOpt's, which `load_frozen` opens."""
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    for origin in ORIGINS:
        folder = tmp_path / origin
        export(_llama(origin, recipe), folder, format)
        assert _dtypes(folder) == {torch.bfloat16}, origin
        assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
        if format == "modelopt":
            served = load_frozen(LlamaForCausalLM, folder, "delayed", device="cpu")
        else:
            served = AutoModelForCausalLM.from_pretrained(folder)
        options = {"max_new_tokens": 1, "min_new_tokens": 1, "do_sample": False}
        assert served.generate(TOKENS, **options).shape == (1, 9), origin


def test_another_dtype_than_the_files_is_transformers_own_limit(tmp_path):
    """On a CPU it dequantizes to the dtype that is asked for; older ones leave plain weights."""
    from transformers import AutoModelForCausalLM, __version__

    export(_llama("O1", "blockwise", num_key_value_heads=4), tmp_path / "out")
    leaves = tuple(map(int, __version__.split(".")[:2])) < (5, 24)
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert served.lm_head.weight.dtype == (torch.bfloat16 if leaves else torch.float32)
    assert served.model.layers[0].mlp.up_proj.weight.dtype == torch.float32


@pytest.mark.filterwarnings("ignore:.*written in BF16")
def test_what_a_class_keeps_in_float32_and_buffers_stay(tmp_path):
    model = _llama("O1", "blockwise", num_key_value_heads=4)
    model._keep_in_fp32_modules_strict = {"input_layernorm", "q_norm.bias"}
    model._keep_in_fp32_modules = {"down_proj"}  # which quantizers leave alone
    norm = model.model.norm
    norm.register_buffer("correction", torch.tensor([1 + 2**-20]))
    report = export(model, tmp_path / "out")
    assert [name for name, _ in report.kept] == ["model.layers.0.mlp.down_proj"]
    handed = dict(weights_for_engine(model, "bf16"))
    for tensors in load_file(tmp_path / "out" / "model.safetensors"), handed:
        assert tensors["model.layers.0.input_layernorm.weight"].dtype == torch.float32
        assert torch.equal(tensors["model.norm.correction"], norm.correction)
        assert tensors["model.layers.0.post_attention_layernorm.weight"].dtype == torch.bfloat16
        assert tensors["model.layers.0.mlp.down_proj.weight"].dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:.*written in BF16")
def test_every_way_to_write_a_checkpoint_has_one_plain_dtype(tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    plain = tiny_llama(num_hidden_layers=1, tie_word_embeddings=True).float()
    plain.save_pretrained(tmp_path / "in")
    config = FP8Config(recipe="blockwise", opt_level="O1", skip=("lm_head", "o_proj"))
    paths = tmp_path / "in", tmp_path / "disk"
    export_checkpoint(AutoModelForCausalLM, *paths, "fine-grained", config)
    torch_fp8.convert_to_float8(plain, config)
    export(plain, tmp_path / "shards", max_shard_size="100KB")
    adapted = tiny_llama(num_hidden_layers=1).float()
    options = {"target_modules": ["q_proj", "o_proj"], "modules_to_save": ["lm_head"]}
    adapted = get_peft_model(adapted, LoraConfig(r=4, **options))
    torch_fp8.convert_to_float8(adapted, config)
    export(adapted, tmp_path / "merged", adapters="merge")
    export(adapted, tmp_path / "apart", adapters="apart")
    for name in ("disk", "shards", "merged", "apart"):
        assert _dtypes(tmp_path / name) == {torch.bfloat16}, name
        served = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert served(TOKENS).logits.isfinite().all(), name


def test_the_parts_of_a_configuration_say_the_dtype_too(tmp_path):
    model = _llama("O1", "blockwise", num_key_value_heads=4)
    model.config.text_config = {"torch_dtype": "float32", "vision": {"dtype": "float32"}}
    export(model, tmp_path / "out")
    parts = json.loads((tmp_path / "out" / "config.json").read_text())["text_config"]
    assert parts == {"dtype": "bfloat16", "vision": {"dtype": "bfloat16"}}
