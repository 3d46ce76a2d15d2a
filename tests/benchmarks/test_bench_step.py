"""What the step benchmark does with runs, failures and batch sizes."""

import argparse

import pytest
import torch

from benchmarks import bench_step
from benchmarks.bench_step import BF16, FP8, Bench, Case
from benchmarks.measurement import ENVIRONMENT, Budget, Table
from benchmarks.shapes import TOY_LLAMA
from benchmarks.training_run import (
    WARMUP_STEPS,
    Run,
    bigram_tokens,
    causal_lm,
    optimizer_of,
)
from tests.waits import Waits
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8

CPU = torch.device("cpu")


def run_of(step_ms, peak, loss):
    phases = {"forward": step_ms / 4, "backward": step_ms / 2, "optimizer": step_ms / 8}
    losses = [9.0] * WARMUP_STEPS + [loss] * 3
    return Run([phases | {"step": step_ms}] * 3, losses, peak, peak, 0, "")


@pytest.mark.long
def test_speed_loss_and_memory_are_against_bf16(monkeypatch, tmp_path):
    def run(variant, *_):
        bf16 = variant is bench_step.VARIANTS[BF16]
        return run_of(30.0, 100.0, 2.0) if bf16 else run_of(20.0, 40.0, 2.02)

    monkeypatch.setattr(bench_step, "HOSTS", {"lightning": run})
    bench = Bench("toy", TOY_LLAMA, argparse.Namespace(toy=True, steps=2), CPU)
    key = ("model", "host", "variant", "mode", "batch", "sequence")
    about = dict.fromkeys(ENVIRONMENT, "x")
    found = Table(tmp_path / "step.csv", bench_step.COLUMNS, key, about)
    cases = [Case("lightning", "compiled", v, 2) for v in (BF16, FP8)]
    for _ in range(2):
        bench.round(cases, Budget(100.0), found)
    bf16, fp8 = found.rows
    assert (bf16["speedup"], fp8["speedup"], fp8["speedup_over_compiled"]) == (1.0, 1.5, 1.5)
    assert fp8["loss_difference"] == "+0.010000"
    assert fp8["peak_share"] == 0.4
    assert fp8["steps"] == 6
    assert (fp8["forward_ms"], fp8["backward_ms"], fp8["optimizer_ms"]) == (5.0, 10.0, 2.5)
    assert fp8["tokens_per_s"] == round(2 * bench.sequence / 20.0 * 1e3)


@pytest.mark.parametrize(
    "name", [name for name, variant in bench_step.VARIANTS.items() if variant.precision == FP8]
)
def test_no_step_of_ours_waits_for_the_device(name, request):
    """transformers looks at the positions, once in a forward, to find packed sequences."""
    variant = bench_step.VARIANTS[name]
    if variant.config.get("backend") == "transformer-engine":
        request.getfixturevalue("te")
    config = FP8Config(**{"recipe": "tensorwise", **variant.config})
    model = causal_lm(TOY_LLAMA | {"num_hidden_layers": 1}, variant, CPU)
    optimizer = optimizer_of(variant, model.parameters(), CPU)
    convert_to_float8(model, config)
    convert_optimizer(optimizer, config, model=model)
    counted = []
    for tokens in bigram_tokens(2, 32, TOY_LLAMA["vocab_size"]).split(1):
        with Waits(lambda: [state["step"] for state in optimizer.state.values()]) as waits:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        counted.append(waits.count)
    assert counted == [1, 1]
