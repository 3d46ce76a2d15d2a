import re

import pytest
from transformers import AutoConfig

from tests.internals import followed_step, make_setup, step_bytes
from torch_fp8 import plan

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 144,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
_CHUNKS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "layer_types": ["linear_attention"] * 2,
}
_CHUNKS |= {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "moe_intermediate_size": 16}
_CHUNKS |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
_FOR_LAYERS = {"layer_types": [*["sliding_attention"] * 5, "full_attention"], "head_dim": 16}
_FOR_LAYERS |= {"num_hidden_layers": 6, "hidden_size_per_layer_input": 16, "vocab_size": 96}


def config_of(kind, **more):
    return AutoConfig.for_model(kind, **{**_SIZES, **more})


def test_layers_that_loop_over_tokens_are_refused(monkeypatch):
    """Mamba calls 20 operators for each token."""
    monkeypatch.setattr(followed_step, "MOST_OPERATORS", 400)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 96}
    config = AutoConfig.for_model("mamba", **sizes)
    with pytest.raises(ValueError, match=r"MambaConfig loop over tokens in Python.* a step of 32 "):
        plan(config, sequence=32, levels=("bf16-mixed",))
    assert plan(config, sequence=4, levels=("bf16-mixed",)).levels["bf16-mixed"].peak > 0


def test_chunks_are_counted_in_full():
    """A chunk has 64 tokens, so two tokens more than two chunks hold a third one."""
    steps = [
        step_bytes(make_setup(config_of("qwen3_next", **_CHUNKS), sequence=n), "bf16-mixed").saved
        for n in (65, 128, 130)
    ]
    assert steps[0] < steps[1] < steps[2]
    assert steps[2] - steps[1] > 0.4 * (steps[1] - steps[0])


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("gpt2", {}),  # no nn.Linear in its layers
        ("gemma4_text", _FOR_LAYERS),  # an embedding holds a part for each layer
    ],
)
def test_layouts_that_are_planned(kind, more):
    planned = plan(config_of(kind, **more), gpus=2, sequence=32, levels=("O2",))
    assert planned.levels["O2"].peak > 0


def test_a_list_of_all_numbers_of_layers_makes_no_kinds():
    """Llama 4 lists its layers with experts, so each of 48 was of its own kind."""
    config = config_of("llama4_text", num_hidden_layers=8, num_local_experts=2, head_dim=16)
    layers = make_setup(config, sequence=32).layers
    assert len({*layers.kinds}) == 2


@pytest.mark.parametrize(
    ("kind", "gpus", "message"),
    [
        ("zamba", 2, "ZambaConfig share parameters, which FSDP2 cannot shard layer by layer: use"),
        ("jetmoe", 1, "JetMoeConfig can be counted, because its model fails on tensors without"),
    ],
)
def test_a_model_that_cannot_run_is_named(kind, gpus, message):
    more = {"kv_channels": 16, "num_key_value_heads": 4} if kind == "jetmoe" else {}
    more |= {"num_hidden_layers": 12, "attention_head_dim": 32} if kind == "zamba" else {}
    with pytest.raises(ValueError, match=re.escape(message)):
        plan(config_of(kind, **more), gpus=gpus, sequence=32, levels=("bf16-mixed",))


def test_layers_that_a_model_runs_again_are_no_loop_over_tokens(monkeypatch):
    """HRM runs its layers in cycles: each run counted as part of its last layer."""
    monkeypatch.setattr(followed_step, "MOST_OPERATORS", 1000)
    setup = make_setup(config_of("hrm_text", head_dim=16), sequence=32)
    assert step_bytes(setup, "bf16-mixed").forward > 0
