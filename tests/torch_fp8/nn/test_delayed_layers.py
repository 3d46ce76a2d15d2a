import copy
import math

import pytest
import torch
from torch import nn

from tests.internals import BUFFERS, quantizer, renew_scales, scaling_buffers
from tests.steps import adamw
from torch_fp8 import FP8Config, convert_to_float8, load_scaling_state_dict, scaling_state_dict
from torch_fp8.ops import quantize


def _layer(**options):
    model = nn.Sequential(nn.Linear(32, 48))
    convert_to_float8(model, FP8Config(recipe="delayed", **options))
    return model


def test_one_cast_for_each_operand_and_no_other_read(monkeypatch):
    """An amax that is taken on its own is a read that delayed scaling is there to save."""
    model, x = _layer(), torch.randn(16, 32)
    model(x.requires_grad_()).sum().backward()
    renew_scales(model.children())
    casts, reads = [], []

    def seen(real):
        def call(x, options, *rest):
            how = options.rowwise, options.columnwise, options.raises_amax
            casts.append((tuple(x.shape), *how))
            return real(x, options, *rest)

        call.reference = real.reference
        return call

    for name in ("quantize_2d", "quantize_2d_sum"):
        monkeypatch.setattr(quantize, name, seen(getattr(quantize, name)))
    monkeypatch.setattr(quantizer, "tensor_amax", reads.append)
    model(x).sum().backward()
    assert sorted(casts) == [
        ((16, 32), True, True, True),
        ((16, 48), True, True, True),
        ((48, 32), False, True, False),  # for dgrad
        ((48, 32), True, False, True),
    ]
    assert not reads


def test_a_forward_without_gradients_in_training_moves_the_history():
    model = _layer(amax_history_len=4)
    twin, x = copy.deepcopy(model), torch.randn(16, 32)
    with torch.no_grad():
        model(x)
    twin(x)
    torch.optim.SGD([torch.zeros(1, requires_grad=True)]).step()
    assert torch.equal(model[0].fp8_amax_history, twin[0].fp8_amax_history)
    assert (model[0].fp8_amax_history[:2, 0] > 0).all()


def test_an_evaluation_changes_no_history():
    model = _layer(amax_history_len=4)
    x = torch.randn(16, 32, requires_grad=True)
    model(x).sum().backward()
    renew_scales([model[0]])
    before = scaling_state_dict(model)
    model.eval()
    for scale in (100, 0.01):
        model(scale * x).sum()
        with torch.no_grad():
            model(scale * x)
    renew_scales([model[0]])
    after = scaling_state_dict(model)
    assert all(torch.equal(after[key], value) for key, value in before.items())


@pytest.mark.parametrize("move", [lambda m: m.bfloat16(), lambda m: m.to("cpu", torch.float16)])
def test_a_model_of_another_dtype_keeps_its_histories_in_float32(move):
    model = _layer(amax_history_len=4)
    model(torch.randn(16, 32, requires_grad=True)).sum().backward()
    renew_scales([model[0]])
    before = scaling_state_dict(model)
    move(model)
    after = scaling_state_dict(model)
    assert {value.dtype for value in after.values()} == {torch.float32}
    assert all(torch.equal(after[key], value) for key, value in before.items())


def test_memory_that_was_never_written_is_made_usable():
    """``to_empty`` leaves what was there; a slot that starts elsewhere would never be lower."""
    saved, model = _layer(amax_history_len=4), _layer(amax_history_len=4)
    for again in (
        lambda: load_scaling_state_dict(model, scaling_state_dict(saved)),
        model[0].reset_parameters,
        lambda: model.to("meta")._apply(lambda x: torch.full(x.shape, 7, dtype=x.dtype)),
    ):
        slots = [model[0].get_buffer(name) for name in BUFFERS[2:]]
        for slot in slots:
            slot.fill_(7)
        again()
        assert not torch.stack([model[0].get_buffer(name) for name in BUFFERS[2:]]).any()


def test_each_layer_is_scaled_for_its_own_formats_and_zeros_as_the_operand_of_others():
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    convert_to_float8(model, FP8Config(recipe="delayed", overrides={"1": {"grad_format": "e4m3"}}))
    for layer, factor in zip(model, (3, 3, 0), strict=True):
        layer(factor * torch.ones(16, 32)).mul(1000).sum().backward()
    renew_scales(model.children())
    for _ in range(2):
        scales = [scaling_buffers(layer)[1][:, 0].tolist() for layer in model]
        assert [of[0] for of in scales] == pytest.approx([3 / 448] * 3)
        assert [of[2] for of in scales] == pytest.approx([1000 / 57344, 1000 / 448, 1000 / 57344])
        load_scaling_state_dict(model, scaling_state_dict(model))


def test_training_goes_on_after_one_finite_bad_batch():
    runs = []
    for bad in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        convert_to_float8(model, FP8Config(recipe="delayed"))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        target, x = torch.randn(64, 32), torch.randn(64, 32)
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
    model = _layer()
    state = scaling_state_dict(model)
    state["0.amax_history"][1, 3] = value
    with pytest.raises(ValueError, match=r"'0.amax_history' holds an Inf or NaN"):
        load_scaling_state_dict(model, state)


@pytest.mark.parametrize("cached", [False, True])
def test_a_weight_in_two_halves_is_scaled_by_its_current_amax(cached):
    """The optimizer's step brings it, so that no cast records it and no history makes it wait."""
    model = nn.Sequential(nn.Linear(128, 192))
    config = FP8Config(recipe="delayed", amax_history_len=4, cache_weights=cached)
    optimizer, _ = adamw(model, config, lr=0.1)
    layer, amaxes = model[0], []
    for _ in range(3):
        layer(torch.randn(16, 128)).sum().backward()
        assert not layer.fp8_weight_amax
        optimizer.step()
        amaxes.insert(0, layer.weight.halves.high.abs().max().float())
        payload = layer.fp8.quantizers(layer).weight.for_fprop(layer.weight)
        assert payload.scale == amaxes[0] / 448
    assert torch.equal(layer.fp8_amax_history[1, :3], torch.stack(amaxes))
    assert torch.equal(layer.scaling_state[0][1, :3], torch.stack(amaxes))
