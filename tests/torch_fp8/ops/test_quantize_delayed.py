"""Casts that find their scale in a history and write it; the kernel is compared elsewhere."""

import copy
import math

import pytest
import torch
from torch import nn

from torch_fp8 import (
    FP8Config,
    convert_to_float8,
    load_scaling_state_dict,
    scaling_state_dict,
)
from torch_fp8.kernels.arguments import CastOptions
from torch_fp8.ops.quantize import quantize_layouts
from torch_fp8.ops.quantize_delayed import History
from torch_fp8.quantization.formats import E4M3
from torch_fp8.quantization.recipe import make_recipe
from torch_fp8.quantization.scaling import delayed_scale, push_amax

SPEC = make_recipe("delayed").input
AMAXES = [3.0, 0.0, 5.0, math.inf, 2.0, math.nan, 7.0, 1.0, 1e6, 1.0, 1e6, math.nan, 1e6, 1e6]


def _history(length=3):
    return History(torch.zeros(length), torch.zeros(2), torch.ones(()))


def _same(a, b):
    """Bit for bit; NaN equals NaN."""
    return torch.equal(torch.nan_to_num(a.float(), 1e9), torch.nan_to_num(b.float(), 1e9))


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 2])
@pytest.mark.parametrize("way", ["cast", "advance"])
def test_scales_and_histories_are_those_of_the_rules(algorithm, margin, way):
    config = FP8Config(recipe="delayed", amax_compute_algo=algorithm, margin=margin)
    history, expected = _history(), torch.zeros(3)
    for amax in AMAXES:
        x = torch.rand(20, 40) - 0.5
        x[3, 4] = -amax
        true_amax = x.abs().max()
        scale = delayed_scale(expected, true_amax, E4M3, algorithm, margin)
        push_amax(expected, true_amax, algorithm)
        if way == "cast":
            row, col, sums = history.cast(x, SPEC, config, rowwise=True, columnwise=True)
            want_row, want_col = quantize_layouts(
                x, CastOptions.of(SPEC, scale, rowwise=True, columnwise=True)
            )
            for got, want in ((row, want_row), (col, want_col)):
                assert _same(got.qdata, want.qdata)
                assert _same(got.scale, scale)
            assert sums is None
        else:
            assert _same(history.advance(true_amax, SPEC, config), scale)
        assert torch.equal(history.amaxes, expected)
        assert _same(history.last, scale)
        assert not history.progress.any()


def test_layouts_and_sums_that_are_asked_for():
    config, x = FP8Config(recipe="delayed"), torch.randn(20, 40)
    assert [
        v is None for v in _history().cast(x, SPEC, config, rowwise=True, columnwise=False)
    ] == [
        False,
        True,
        True,
    ]
    row, col, sums = _history().cast(
        x, SPEC, config, rowwise=False, columnwise=False, sum_dtype=torch.bfloat16
    )
    assert row is None
    assert col is None
    assert torch.equal(sums, x.sum(0).bfloat16())


def test_an_empty_matrix_records_nothing_but_zero():
    history = _history()
    history.amaxes[:] = torch.tensor([4.0, 3.0, 2.0])
    config = FP8Config(recipe="delayed")
    history.cast(torch.zeros(0, 8), SPEC, config, rowwise=True, columnwise=True)
    assert history.amaxes.tolist() == [0.0, 4.0, 3.0]


def test_operators_are_well_formed():
    ops = torch.ops.torch_fp8
    x, history = torch.randn(20, 40), _history()
    for sum_dtype in (None, torch.float32):
        for row, col in ((True, True), (True, False), (False, False)):
            how = (torch.float8_e4m3fn, "max", 0, row, col)
            arguments = (x, history.amaxes, history.progress, *how, history.last, sum_dtype)
            torch.library.opcheck(ops.quantize_2d_delayed, arguments)
    arguments = (history.amaxes, None, torch.ones(()), torch.float8_e5m2, "max", 1)
    torch.library.opcheck(ops.advance_history, arguments)
    for granularity in ("tensorwise", "rowwise", "block_1x128"):
        how = CastOptions(torch.float8_e4m3fn, granularity, True, True, True)
        torch.library.opcheck(ops.quantize_2d_sum, (x, *how, torch.float32))
        torch.library.opcheck(ops.quantize_2d, (x, *how))
    given = CastOptions(torch.float8_e4m3fn, "tensorwise", True, True, True, amax=torch.ones(()))
    torch.library.opcheck(ops.quantize_2d, (x, *given))


def test_one_cast_for_each_operand_and_no_other_read(monkeypatch):
    """An amax that is taken on its own is a read that delayed scaling is there to save."""
    from torch_fp8.quantization import scaling

    model = nn.Sequential(nn.Linear(32, 48))
    convert_to_float8(model, FP8Config(recipe="delayed"))
    reads, casts = [], []
    monkeypatch.setattr(scaling, "tensor_amax", reads.append)
    real = History.cast

    def cast(self, x, *args, **options):
        casts.append((tuple(x.shape), options["rowwise"], options["columnwise"]))
        return real(self, x, *args, **options)

    monkeypatch.setattr(History, "cast", cast)
    model(torch.randn(16, 32, requires_grad=True)).sum().backward()
    assert casts == [((48, 32), True, False), ((16, 32), True, True), ((16, 48), True, True)]
    assert reads == []


def test_a_forward_without_gradients_in_training_moves_the_history():
    model = nn.Sequential(nn.Linear(32, 48))
    convert_to_float8(model, FP8Config(recipe="delayed", amax_history_len=4))
    twin = copy.deepcopy(model)
    x = torch.randn(16, 32)
    with torch.no_grad():
        model(x)
    twin(x)
    assert torch.equal(model[0].fp8_amax_history, twin[0].fp8_amax_history)
    assert (model[0].fp8_amax_history[:2, 0] > 0).all()
    assert torch.equal(model[0].fp8_last_scale, twin[0].fp8_last_scale)


def test_memory_that_was_never_written_is_made_usable_by_loading():
    """``to_empty`` leaves what was there; a count that starts elsewhere would never be full."""
    saved, model = (nn.Sequential(nn.Linear(32, 48)) for _ in range(2))
    for m in (saved, model):
        convert_to_float8(m, FP8Config(recipe="delayed", amax_history_len=4))
    model[0].fp8_scaling[:, -2:].fill_(7)
    load_scaling_state_dict(model, scaling_state_dict(saved))
    assert not model[0].fp8_scaling[:, -2:].any()
    model[0].fp8_scaling[:, -2:].fill_(7)
    model[0].reset_parameters()
    assert not model[0].fp8_scaling[:, -2:].any()


def test_training_goes_on_after_one_finite_bad_batch():
    """Compared with a run that has not seen it: its step is skipped, as a loop does that looks."""
    runs = []
    for bad in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        convert_to_float8(model, FP8Config(recipe="delayed"))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        target = torch.randn(64, 32)
        x = torch.randn(64, 32)
        for step in range(40):
            if bad and step == 5:
                model(x * 1e38).float().mean().backward()
                optimizer.zero_grad()
            loss = (model(x) - target).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append(loss.item())
    assert runs[1] == pytest.approx(runs[0], rel=0.02)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_history_that_is_not_finite_is_refused(value):
    """It would make every scale non-finite for as long as the history lasts."""
    model = nn.Sequential(nn.Linear(32, 64))
    convert_to_float8(model, FP8Config(recipe="delayed"))
    state = scaling_state_dict(model)
    state["0.amax_history"][1, 3] = value
    with pytest.raises(ValueError, match=r"'0.amax_history' holds an Inf or NaN"):
        load_scaling_state_dict(model, state)
