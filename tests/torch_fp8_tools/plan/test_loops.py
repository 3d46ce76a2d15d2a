import re

import pytest
from transformers import AutoConfig

from tests.internals import followed_step, make_setup
from tests.models import SIZES
from torch_fp8 import plan

_SIZES = SIZES | {"vocab_size": 96, "intermediate_size": 144, "pad_token_id": 0}
_JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "mamba_dt_rank": 8}
_CHUNKS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}
_CHUNKS |= {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16}
_CHUNKS |= {"linear_value_head_dim": 16, "layer_types": ["linear_attention"] * 2}
_FOR_LAYERS = {"layer_types": [*["sliding_attention"] * 5, "full_attention"] * 2, "head_dim": 16}
_FOR_LAYERS |= {"num_hidden_layers": 12, "hidden_size_per_layer_input": 16, "vocab_size": 96}


def config_of(kind, **more):
    return AutoConfig.for_model(kind, **{**_SIZES, **more})


def test_a_layer_that_loops_over_a_long_sequence_is_refused(monkeypatch):
    """Jamba's loops over 4,096 tokens took more than nine minutes of processor time."""
    monkeypatch.setattr(followed_step, "MOST_OPERATORS", 2000)
    config = config_of("jamba", **_JAMBA)
    assert plan(config, sequence=8, levels=("bf16-mixed",)).levels["bf16-mixed"].peak > 0
    with pytest.raises(ValueError, match="more than 2,000 operators, because layers loop over the"):
        plan(config, sequence=64, levels=("bf16-mixed",))


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("gpt2", {}),  # no nn.Linear in its layers
        ("hrm_text", {"head_dim": 16}),  # runs its layers several times
        ("qwen3_next", _CHUNKS),  # loops over chunks
        # An embedding holds a part for each layer.
        pytest.param("gemma4_text", _FOR_LAYERS, marks=pytest.mark.long),
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
