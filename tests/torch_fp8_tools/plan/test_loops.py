import dataclasses
import re

import pytest
from transformers import AutoConfig

from tests.internals import FollowedStep, kernel_functions, make_setup, step_bytes
from tests.internals import plan_steps as steps
from tests.models import SIZES
from torch_fp8 import plan

_SIZES = SIZES | {"vocab_size": 96, "intermediate_size": 144, "pad_token_id": 0}
_JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "mamba_dt_rank": 8}
_CHUNKS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "layer_types": ["linear_attention"] * 2,
}
_CHUNKS |= {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "moe_intermediate_size": 16}
_CHUNKS |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
_FOR_LAYERS = {"layer_types": [*["sliding_attention"] * 5, "full_attention"] * 2, "head_dim": 16}
_FOR_LAYERS |= {"num_hidden_layers": 12, "hidden_size_per_layer_input": 16, "vocab_size": 96}


def config_of(kind, **more):
    return AutoConfig.for_model(kind, **{**_SIZES, **more})


@pytest.mark.parametrize(
    ("level", "gpus", "sequence", "experts"),
    [("bf16-mixed", 1, 72, 4), ("O2", 4, 72, 4), ("bf16-mixed", 4, 136, 32)],
)
def test_extrapolated_bytes_are_those_of_whole_steps(level, gpus, sequence, experts, monkeypatch):
    """Jamba's loops over tokens at full length took more than nine minutes of processor time.

    With many experts the moment that is highest at 24 tokens is not that of 136.
    """
    options = {"gpus": gpus, "sequence": sequence, "recipe": "tensorwise"}
    config = config_of("jamba", **_JAMBA | {"num_experts": experts, "num_hidden_layers": 3})
    setups = [make_setup(config, **options) for _ in range(2)]
    monkeypatch.setattr(steps, "MOST_OPERATORS", 10**9)
    counted = step_bytes(setups[0], level)
    monkeypatch.setattr(steps, "MOST_OPERATORS", 200)
    extrapolated = step_bytes(setups[1], level)
    assert extrapolated.lengths == (24, 40, 56)
    assert dataclasses.replace(extrapolated, lengths=()) == counted


def test_loops_over_chunks_are_counted(monkeypatch):
    """A chunk is padded, so shorter sequences hold no less."""
    setups = [make_setup(config_of("qwen3_next", **_CHUNKS), sequence=130) for _ in range(2)]
    counted = step_bytes(setups[0], "bf16-mixed")
    monkeypatch.setattr(steps, "MOST_OPERATORS", 200)
    assert step_bytes(setups[1], "bf16-mixed") == counted
    assert counted.lengths == ()


@pytest.mark.parametrize(
    ("kind", "more", "options", "level"),
    [
        ("qwen3_next", _CHUNKS, {"gpus": 4}, "O2"),
        ("qwen3_next", _CHUNKS, {"checkpointing": True}, "bf16-mixed"),
        ("jamba", _JAMBA, {}, "bf16-mixed"),
    ],
)
def test_functions_with_kernels_are_followed_once(kind, more, options, level, monkeypatch):
    """Each layer ran its loops at each level, which took 29 to 33 s of processor time."""
    operators, steps_bytes = [], []
    created = FollowedStep.created

    def counted(*arguments):
        operators[-1] += 1
        created(*arguments)

    monkeypatch.setattr(FollowedStep, "created", counted)
    known = {}
    monkeypatch.setattr(kernel_functions, "_known", known)
    for fewest in (10**9, 100, 100):
        monkeypatch.setattr(kernel_functions, "FEWEST_OPERATORS", fewest)
        for key in [key for key, bytes_of_call in known.items() if bytes_of_call is None]:
            del known[key]
        operators.append(0)
        setup = make_setup(config_of(kind, **more), sequence=130, **options)
        steps_bytes.append(step_bytes(setup, level))
    whole, once, again = steps_bytes
    assert once == again
    assert (
        whole.backward <= once.backward < whole.backward * (1 if kind == "qwen3_next" else 1.01) + 1
    )
    saved = once.saved if options.get("checkpointing") else whole.saved
    assert dataclasses.replace(whole, backward=once.backward, saved=saved) == once
    assert operators[2] < min(1000, operators[1] * 0.8, operators[0] / 2)


def test_a_plan_says_that_it_extrapolates(monkeypatch):
    monkeypatch.setattr(steps, "MOST_OPERATORS", 200)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 96}
    planned = plan(AutoConfig.for_model("mamba", **sizes), sequence=64, levels=("bf16-mixed",))
    assert planned.lengths == planned.as_dict()["lengths"] == (16, 32, 48)
    assert "extrapolated from steps of\n16, 32, 48 tokens." in str(planned)
    assert max(map(len, str(planned).splitlines())) <= 80


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
    """HRM runs its layers in cycles; each run counted as part of its last layer, so steps of whole
    length ran five times."""
    monkeypatch.setattr(steps, "MOST_OPERATORS", 1000)
    operators = []
    run_step = steps.run_step

    def counted(*arguments, **options):
        step = run_step(*arguments, **options)
        operators.append(step.calls)
        return step

    monkeypatch.setattr(steps, "run_step", counted)
    setup = make_setup(config_of("hrm_text", head_dim=16), sequence=32)
    step_bytes(setup, "bf16-mixed")
    assert len(operators) == 1
    assert 2000 < operators[0] < 4000
