"""Experts on paper: their arithmetic, and when a plan leaves them in BF16."""

import dataclasses
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from tests.moe_models import moe_model
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8
from torch_fp8.conversion.memory import expected_memory
from torch_fp8_tools.plan.counts import StepBytes
from torch_fp8_tools.plan.experts import (
    SKIP,
    ExpertWeight,
    expert_seconds,
    expert_weights_of,
    rows_per_expert,
    speedup,
)
from torch_fp8_tools.plan.layouts import EXPERTS, build, read_config
from torch_fp8_tools.plan.plan import plan, plan_beside
from torch_fp8_tools.plan.setup import make_setup

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
ONE = {"num_hidden_layers": 1}
CONFIG = AutoConfig.for_model("qwen3_moe", **SIZES)
COUNTED = {("policy", "O2", 1): StepBytes(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)}
"""For plans in which the bytes of a step have no part: nobody counts them."""
WIDE = ExpertWeight(8, 8192, 8192, 2, gathers=False, frozen=False, in_fp8=True)


def setup(tokens=4096, **options):
    return make_setup(CONFIG, sequence=tokens, **options)


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [("Qwen3Moe", 96, 48), ("GptOss", 256, 128), ("NemotronH", 48, 48)],
)
def test_weights_have_outputs_inputs_and_experts_of_a_token(name, first, second):
    model = moe_model(name)
    convert_to_float8(model)
    weights = expert_weights_of(model, model.config)
    assert dataclasses.astuple(weights[0]) == (4, first, 64, 2, True, False, True)
    assert dataclasses.astuple(weights[1]) == (4, 64, second, 2, False, False, True)


def test_few_rows_take_as_long_as_a_tile():
    assert rows_per_expert(setup(512), WIDE) == 128
    weight = dataclasses.replace(WIDE, num_experts=1, top_k=1)
    full, more, next_tile = (
        expert_seconds(setup(tokens), [weight], in_fp8=False, trained=False)[0]
        for tokens in (2048, 2049, 2048 + 128)
    )
    assert next_tile == more > full


def test_large_gemms_take_their_arithmetic_and_fp8_half_of_it():
    weight = dataclasses.replace(WIDE, num_experts=1, top_k=1)
    plain, _ = expert_seconds(setup(8192), [weight], in_fp8=False, trained=True)
    fp8, _ = expert_seconds(setup(8192), [weight], in_fp8=True, trained=True)
    card = setup().card
    assert plain == pytest.approx(3 * 2 * 8192**3 / (0.78 * card.bf16))
    assert plain / fp8 == pytest.approx(card.fp8 / card.bf16)


def test_a_frozen_weight_has_two_gemms_and_no_cast():
    weight = dataclasses.replace(WIDE, num_experts=1, top_k=1)
    frozen = dataclasses.replace(weight, frozen=True)
    (trained, casts), (of_frozen, turned) = (
        expert_seconds(setup(8192), [w], in_fp8=True, trained=True) for w in (weight, frozen)
    )
    assert of_frozen == pytest.approx(trained * 2 / 3)
    elements, rows = 8192**2, 8192 * 8192
    saved = (6 - 2) * elements + 2 * 3 * rows
    assert casts - turned == pytest.approx(saved / (0.92 * setup().card.bandwidth))


def test_more_rows_an_expert_pay():
    weights = [dataclasses.replace(WIDE, rows=1536, cols=2048)]
    speeds = [speedup(setup(n), weights, trained=True) for n in (128, 1024, 8192)]
    assert speeds == sorted(speeds)
    assert speeds[0] < 0.7 < 1.0 < speeds[2]


@pytest.mark.long
def test_experts_that_do_not_pay_are_planned_in_bf16():
    slow = plan(AutoConfig.for_model("qwen3_moe", **SIZES | ONE), sequence=64, levels=("O2",))
    assert "16 rows each of 8 experts; in FP8 their GEMMs and casts are 0." in str(slow)
    assert slow.experts.endswith("so they stay in BF16")
    assert json.loads(slow.levels["O2"].config)["skip"] == ["lm_head", SKIP]
    assert slow.as_dict()["experts"] == slow.experts
    wide = SIZES | ONE | {"hidden_size": 2048, "moe_intermediate_size": 8192}
    config = AutoConfig.for_model("qwen3_moe", **wide)
    fast = plan_beside(COUNTED, config, sequence=8192, levels=("O2",))
    assert "2048 rows each of 8 experts; in FP8 their GEMMs and casts are 1." in fast.experts
    assert "skip" not in json.loads(fast.levels["O2"].config)


@pytest.mark.parametrize(
    ("fits", "seconds", "left"),
    [
        ({"FP8", "BF16"}, (2.0, 1.0), True),
        ({"FP8", "BF16"}, (1.0, 2.0), False),
        ({"FP8", "BF16"}, (1.0, 1.0), False),
        ({"FP8"}, (2.0, 1.0), False),
        ({"BF16"}, (1.0, 2.0), True),
        (set(), (2.0, 1.0), True),
    ],
)
def test_the_step_that_fits_and_is_faster_decides(monkeypatch, fits, seconds, left):
    module = sys.modules["torch_fp8_tools.plan.plan"]

    def plan_level(setup, level, *counted):
        kind = "BF16" if setup.skip else "FP8"
        of_kind = {"fits": kind in fits, "seconds": seconds[kind == "BF16"], "config": kind}
        return SimpleNamespace(**of_kind)

    monkeypatch.setattr(module, "_plan_level", plan_level)
    planned = plan(CONFIG, sequence=64, levels=("O2",))
    assert planned.setup.skip == ((SKIP,) if left else ())
    assert planned.experts.endswith("stay in BF16") == left


def test_a_dense_model_has_no_line_of_experts():
    config = AutoConfig.for_model("llama", **{k: v for k, v in SIZES.items() if "expert" not in k})
    planned = plan_beside(COUNTED, config, sequence=64, levels=("O2",))
    assert planned.experts == ""
    assert "experts" not in str(planned)


@pytest.mark.parametrize(
    ("level", "released", "most"), [("O2", False, 7.2), ("O3", False, 6.2), ("O3", True, 5.2)]
)
@pytest.mark.parametrize("name", EXPERTS)
def test_bytes_of_whole_models(name, level, released, most):
    model = build(read_config(name))
    config = FP8Config(recipe="rowwise", opt_level=level, gradient_release=released)
    convert_to_float8(model, config, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    convert_optimizer(optimizer, config, model=model)
    held = expected_memory(model, [optimizer]).total / sum(p.numel() for p in model.parameters())
    assert most - 0.15 < held <= most
