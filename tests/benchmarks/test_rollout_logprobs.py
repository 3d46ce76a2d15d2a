"""In FP8 on both sides rollouts are nearer to training than FP8 rollouts are to a BF16 trainer."""

import csv
import math

import pytest
import torch

from accelerate_fp8.logprob_difference import BATCH_BOUND, BOUND
from benchmarks.comparison import tiny_llama
from benchmarks.comparison.code_tokenizer import train_tokenizer
from benchmarks.evidence import merge_aware, rollout_grpo, rollout_logprobs
from benchmarks.evidence.rollout_logprobs import PER_TOKEN
from torch_fp8.quantization.recipe import RECIPES


def test_recorded_differences():
    with rollout_logprobs.RESULTS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = {(r["trainer"], r["rollout"], r["recipe"]): float(r["difference"]) for r in rows}
    assert len(found) == len(rows) == 1 + 2 * len(RECIPES)
    for row in rows:
        error = math.exp(float(row["difference"]))
        assert abs(float(row["multiplicative_error"]) - error) < 1e-4
    for recipe in PER_TOKEN:
        same, mixed = found["fp8", "fp8", recipe], found["bf16", "fp8", recipe]
        assert same < mixed / 4
        assert math.exp(same) <= 1.03


def test_recorded_runs_of_grpo():
    with rollout_grpo.RESULTS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = {(r["trainer"], r["rollout"], r["recipe"]): float(r["difference"]) for r in rows}
    assert len(found) == len(rows) == 1 + 2 * len(RECIPES)
    for row in rows:
        bound = BATCH_BOUND if row["recipe"] == "tensorwise" else BOUND
        assert (row["warned"] == "True") == (float(row["largest"]) > bound)
        assert float(row["largest"]) >= float(row["multiplicative_error"])
        error = math.exp(float(row["difference"]))
        assert abs(float(row["multiplicative_error"]) - error) < 1e-4
    assert {r["recipe"] for r in rows if r["warned"] == "True"} == {"tensorwise"}
    for recipe in PER_TOKEN:
        assert found["fp8", "fp8", recipe] < found["bf16", "fp8", recipe] / 4
        assert math.exp(found["fp8", "fp8", recipe]) <= 1.03


def test_recorded_merges():
    with merge_aware.RESULTS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["way"] for row in rows] == ["plain", "aware"] * len(merge_aware.RATES)
    for plain, aware in zip(rows[::2], rows[1::2], strict=True):
        assert float(aware["kept"]) >= merge_aware.LEAST
        assert aware["equal_logits"] == "True"
        assert plain["equal_logits"] == "False"
        assert float(aware["trained"]) < float(aware["base"])
        for row in (plain, aware):
            base, trained, merged = (float(row[k]) for k in ("base", "trained", "merged"))
            assert abs((base - merged) / (base - trained) - float(row["kept"])) < 0.02


def test_short_runs_give_such_rows(monkeypatch):
    monkeypatch.setattr(rollout_logprobs, "RECIPES", {"rowwise": None})
    monkeypatch.setattr(rollout_logprobs, "NEW", 4)
    tokens = torch.arange(4096) % 250
    torch.manual_seed(0)
    base = tiny_llama.build(256, 128, 1, pad_token_id=0, eos_token_id=1)
    rollout_logprobs.train(base, tokens, 1)
    rows = rollout_logprobs.measure(base, tokens, seeds=1)
    assert [row["trainer"] for row in rows] == ["bf16", "fp8", "bf16"]
    assert all(row["tokens"] == str(4 * rollout_logprobs.PROMPTS) for row in rows)
    plain, aware = merge_aware.measure(base, tokens, 1e-3, steps=1)
    assert (plain["casts"], aware["casts"]) == (0, 7)
    assert aware["equal_logits"]
    assert aware["trained"] == aware["merged"]


@pytest.mark.long
def test_a_short_run_of_grpo_gives_such_rows(tmp_path, monkeypatch):
    pytest.importorskip("trl")
    monkeypatch.setattr(rollout_grpo, "NEW", 8)
    tokenizer = train_tokenizer(["def f(x):\n    return x\n"], 300)
    torch.manual_seed(0)
    base = tiny_llama.build(len(tokenizer), 128, 1, pad_token_id=0, eos_token_id=1)
    base.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    rows = rollout_grpo.measure(str(tmp_path), ["def f(x):"] * 4, ["rowwise"], steps=1)
    assert [(row["trainer"], row["rollout"]) for row in rows] == list(rollout_grpo.PAIRS)
    assert rows[0]["recipe"] == ""
    neither, both, mixed = (float(row["difference"]) for row in rows)
    assert both < mixed
    assert neither < mixed
