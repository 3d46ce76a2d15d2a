"""What a comparison computes from the records: differences, shares of the time, and the advice."""

import argparse
import json
import math

import pytest
import torch

from tests.internals import (
    Event,
    StepProfile,
    Trial,
    TrialRecord,
    advise,
    as_text,
    compare,
    difference,
    fingerprint,
    held_bytes,
    outcome,
    shares,
    steps_to_equal_loss,
    variants,
)

MIB = 2**20


def _falling(factor=1.0, noise=0.0):
    generator = torch.Generator().manual_seed(0)
    wobble = torch.randn(40, generator=generator, dtype=torch.float64).tolist()
    return {s: factor * (4 - 0.05 * s) + noise * wobble[s - 1] for s in range(1, 41)}


def test_a_difference_is_paired_and_its_error_is_that_of_block_means():
    base = _falling(noise=0.2)
    worse = {step: 1.01 * loss for step, loss in base.items()}
    apart = difference([base, base], [worse, worse])
    assert apart.mean == pytest.approx(0.01)
    assert apart.error < 0.001
    assert apart.is_certain
    assert apart.steps == 40
    assert str(apart).startswith("+1.00 ± 0.0")
    unpaired = difference([_falling()], [_falling(noise=0.2)])
    assert not unpaired.is_certain
    assert difference([base], [base]).mean == 0
    assert difference([base], [{}]) is None
    assert difference([{1: math.nan}], [{1: 1.0}]) is None


def test_steps_to_equal_loss_follow_from_the_slope():
    base = _falling()
    later = {step: loss + 0.1 for step, loss in base.items()}
    assert steps_to_equal_loss([base], [base]) == pytest.approx(40)
    assert steps_to_equal_loss([base], [later]) == pytest.approx(42)
    flat = dict.fromkeys(range(1, 41), 1.0)
    assert steps_to_equal_loss([flat], [flat]) is None


def test_the_host_time_between_marks_belongs_to_a_part():
    events = [
        Event("enumerate(DataLoader)#_Iter.__next__", 0, 50),
        Event("aten::linear", 55, 60),
        Event("torch_fp8_tools.compare: backward", 70, 90),
        Event("Optimizer.step#AdamW.step", 90, 100),
    ]
    parts = shares(events, on_card=False)
    assert parts == pytest.approx(
        {
            "data loading": 0.5,
            "between steps": 0.05,
            "forward": 0.15,
            "backward": 0.2,
            "optimizer": 0.1,
        }
    )


def test_a_closure_of_lightnings_optimizer_is_forward_and_backward():
    events = [
        Event("Optimizer.step#AdamW.step", 0, 100),
        Event("aten::linear", 10, 20),
        Event("torch_fp8_tools.compare: backward", 40, 80),
    ]
    assert shares(events, on_card=False) == pytest.approx(
        {"between steps": 0.1, "forward": 0.3, "backward": 0.4, "optimizer": 0.2}
    )


def test_on_a_card_kernels_count_and_the_rest_is_waiting_for_the_host():
    events = [
        Event("aten::linear", 0, 2, (("gemm", 30.0),)),
        Event("torch_fp8_tools.compare: backward", 10, 20),
        Event("aten::mm", 11, 12, (("gemm", 20.0), ("ncclDevKernel_AllReduce", 10.0))),
        Event("Optimizer.step#AdamW.step", 20, 110),
        Event("torch_fp8::adamw", 30, 31, (("adamw", 10.0),)),
    ]
    events.insert(0, Event("enumerate(DataLoader)#_Iter.__next__", -10, 0))
    parts = shares(events, on_card=True)
    assert parts["communication"] == pytest.approx(10 / 120)
    assert parts["backward"] == pytest.approx(20 / 120)
    assert parts["data loading"] == pytest.approx(10 / 120)
    assert parts["waiting for the host"] == pytest.approx(40 / 120)


def test_the_profiled_peak_is_that_of_the_tensors_that_live_together():
    weight = torch.nn.Parameter(torch.zeros(MIB, dtype=torch.float32))
    assert held_bytes({weight.data_ptr()}) <= held_bytes(set()) - 4 * MIB
    before = held_bytes(set())
    profile = StepProfile([weight])
    for _ in range(2):
        torch.zeros(2 * MIB, dtype=torch.float32).add(1)
    peak = profile.stop()["peak"]
    assert 16 * MIB <= peak - before < 17 * MIB


def test_batches_are_told_apart_by_their_content():
    ids = torch.arange(10)
    same = {"input_ids": ids, "name": "a"}
    assert fingerprint(same) == fingerprint({"input_ids": ids.clone(), "name": "a"})
    assert fingerprint(same) != fingerprint({"input_ids": ids.flip(0), "name": "a"})
    assert fingerprint([ids]) != fingerprint([ids + 1])


def _record(folder, name, seconds, peak, losses, options=None, *, card="H200", **more):
    """A trial's record on a card, as its only rank writes it."""
    trial = Trial(name, str(folder / name), len(losses), more.get("seed", 0), options)
    (folder / name).mkdir(parents=True)
    layers = {
        "converted": 9,
        "layers": 10,
        "fp8_flops": 9.0,
        "flops": 10.0,
        "skipped": [["head", "skip"]],
    }
    layers |= {"config": "{}"}
    start = {"weights": more.get("weights", 10.0), "device": "cuda" if card else "cpu"}
    start |= {"card": card, "world": 1, "layers": [layers] if options is not None else []}
    rows = [
        {"step": s, "seconds": seconds, "data": more.get("data", 0.0), "tokens": 100}
        | {"graphs": int(s >= 7), "loss": loss, "profiled": False}
        for s, loss in losses.items()
    ]
    profile = {"profile": {"shares": more.get("shares", {"forward": 0.5, "backward": 0.5})}}
    end = {"end": "steps", "fingerprints": more.get("batches", [1]), "peak": peak}
    lines = [start, *rows, profile, end]
    (folder / name / "rank0.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return TrialRecord(trial, {"status": "done", "error": more.get("error"), "tail": []})


@pytest.mark.parametrize(
    ("seconds", "peak", "factor", "more", "sentence", "is_advised"),
    [
        (0.8, 59, 1.0, {}, "saves 41 % of memory and is 1.25 times as fast", True),
        (0.8, 59, 1.01, {}, "FP8 costs loss here: the loss differs by +1.00", False),
        (1.0, 100, 1.0, {"data": 0.61}, "(1.00 times): 61 % of the time is the data loader", False),
        (1.0, 60, 1.0, {}, "saves 40 % of memory; the loss differs by +0.00", True),
        (
            1.0,
            100,
            1.0,
            {"shares": {"waiting for the host": 0.7, "forward": 0.3}},
            "70 % of the time is waiting for the host: leave it off",
            False,
        ),
        (0.8, 59, 1.0, {"card": None}, "there is no advice on speed", True),
        (0.8, 59, 1.0, {"error": "no"}, "No FP8 variant ran to its end", False),
    ],
)
def test_the_advice_says_what_was_measured(
    seconds, peak, factor, more, sentence, is_advised, tmp_path
):
    base = _record(tmp_path, "bf16", 1.0, 100, _falling(), card=more.get("card", "H200"))
    losses = {step: factor * loss for step, loss in _falling().items()}
    other = _record(tmp_path, "O2", seconds, peak, losses, {}, **more)
    advice = advise(outcome([base, other]))
    assert sentence in advice.sentence
    assert (advice.variant is not None) == is_advised
    assert ("times as fast" in advice.sentence) == ("times as fast" in sentence)


def test_other_weights_other_batches_and_compiled_steps_are_told(tmp_path):
    base = _record(tmp_path, "bf16", 1.0, 100, _falling())
    other = _record(tmp_path, "O2", 1.0, 100, _falling(), {}, weights=10.1, batches=[2])
    result = outcome([base, other])
    assert "starts from different weights than BF16 (+1.00 %" in result.notes[0]
    assert "reads different batches than BF16" in result.notes[1]
    assert {row["step"] for row in base.steady_rows} == set(range(4, 41)) - {7}
    assert base.recompilations == 1
    alarm = {"step": 4, "event": "alarm", "what": "head/weight: too many zeros"}
    (tmp_path / "O2/outputs").mkdir()
    (tmp_path / "O2/outputs/fp8_monitor.jsonl").write_text(json.dumps(alarm) + "\n")
    text = as_text(outcome([base, other]), advise(result), fast_cpu=True)
    assert "1 alarm of the monitor: head/weight: too many zeros" in text
    assert "BF16 products were computed in float32" in text


def test_seeds_that_change_nothing_are_named(tmp_path):
    for weights, batches, note in ((10.0, [1], True), (10.1, [1], False), (10.0, [2], False)):
        folder = tmp_path / f"{weights}-{batches}"
        first = _record(folder, "bf16", 1.0, 100, _falling())
        (folder / "bf16").rename(folder / "first")
        second = _record(
            folder, "bf16", 1.0, 100, _falling(), seed=1, weights=weights, batches=batches
        )
        second.losses[40] = math.nan
        result = outcome([first, second])
        assert result.variants[0].diverged
        notes = str(result.notes)
        assert ("weights and batches of --seeds 1 are those of 0" in notes) == note


def test_variants_are_levels_recipes_and_fields():
    parsed = variants(["O3, rowwise", "bf16", '{"wgrad": "bf16"}', "O2, wgrad=bf16", "fp8"])
    assert [v.options for v in parsed] == [
        None,
        {"opt_level": "O3", "recipe": "rowwise"},
        {"wgrad": "bf16"},
        {"opt_level": "O2", "wgrad": "bf16"},
        {},
    ]
    assert variants(["O2"])[0].options is None
    for texts, message in [
        (["O2", "rowwize"], "'rowwize' is no level, recipe or field=value"),
        (["O2", "O2"], "names 'O2' twice"),
        (["bf16"], "names only BF16"),
        (["recipe=fast"], "recipe"),
    ]:
        with pytest.raises(ValueError, match=message):
            variants(texts)


def test_a_call_that_cannot_work_is_refused(tmp_path, monkeypatch):
    options = argparse.Namespace(
        program=["no-such-command"], variants=["O2"], output=tmp_path / "out", steps=4, seeds=1
    )
    with pytest.raises(FileNotFoundError, match="no-such-command: there is no such command"):
        compare(options)
    (tmp_path / "out/mine.txt").parent.mkdir()
    (tmp_path / "out/mine.txt").touch()
    options.program = ["python"]
    with pytest.raises(ValueError, match="has other files; choose a new folder"):
        compare(options)
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    with pytest.raises(ValueError, match="switches torch-fp8 off in the trials; unset it"):
        compare(options)
