"""Timing, tables and budgets of the benchmarks."""

import pytest
import torch

from benchmarks import measurement
from benchmarks.measurement import (
    ENVIRONMENT,
    Budget,
    interleaved,
)

CPU = torch.device("cpu")
ABOUT = dict.fromkeys(ENVIRONMENT, "x")


def test_variants_take_turns_and_another_goes_first_each_time():
    calls = []
    variants = {name: lambda name=name: calls.append(name) for name in "abc"}
    interleaved(variants, CPU, repetitions=3, warmup=1)
    rounds = ["".join(calls[i : i + 3]) for i in range(0, 12, 3)]
    assert all(sorted(found) == ["a", "b", "c"] for found in rounds)
    assert len(set(rounds[1:])) == 3


def test_a_failing_variant_leaves_a_note_and_the_others_go_on():
    calls = {"good": 0, "bad": 0}

    def good():
        calls["good"] += 1

    def bad():
        calls["bad"] += 1
        if calls["bad"] == 3:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    failures = {}
    variants = {"good": good, "bad": bad}
    timings = interleaved(variants, CPU, repetitions=4, warmup=1, failures=failures)
    assert set(timings) == {"good"}
    assert failures["bad"].startswith("out of memory: CUDA out of memory")
    assert calls == {"good": 5, "bad": 3}
    calls["bad"] = 0
    with pytest.raises(torch.cuda.OutOfMemoryError):
        interleaved(variants, CPU, repetitions=4)


def test_a_budget_lets_the_first_piece_begin_and_no_other_that_would_not_fit(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(measurement.time, "monotonic", lambda: now[0])
    budget = Budget(10.0)
    assert budget.fits()
    with budget.piece():
        now[0] = 4.0
    assert budget.fits()  # 4 + 4 <= 10
    with budget.piece():
        now[0] = 7.0
    assert not budget.fits()  # 7 + 4 > 10
    assert Budget(-1.0).fits()
