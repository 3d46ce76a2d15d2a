"""A CUDA graph would repeat numbers that the host has chosen, so it gets none of them."""

import pytest
import torch
from torch import nn

from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8

OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "SGD": torch.optim.SGD,
    "Muon": torch.optim.Muon,
    "RAdam, capturable": lambda parameters, lr: torch.optim.RAdam(parameters, lr, capturable=True),
}


def _converted(make, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    config = FP8Config(recipe="tensorwise", **options)
    convert_to_float8(model, config)
    optimizer = make(model.parameters(), lr=1e-2)
    convert_optimizer(optimizer, config, model=model)
    return model, optimizer


def _backward(model):
    model(torch.randn(8, 64)).square().mean().backward()


@pytest.fixture
def capture(monkeypatch):
    def begin():
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    return begin


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_refused_by_name_and_nothing_has_moved(name, capture):
    model, optimizer = _converted(OPTIMIZERS[name])
    _backward(model)
    before = [p.detach() + 0 for p in model.parameters()]
    capture()
    with pytest.raises(
        RuntimeError, match=rf"the step of {name[:3]}\w* in FP8 .*after each replay"
    ):
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_forward_and_backward_are_captured_at_o2(capture):
    model, _optimizer = _converted(torch.optim.AdamW)
    capture()
    _backward(model)
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"opt_level": "O3"}, r"gradient in 8 bits .*opt_level='O2'"),
        ({"gradient_release": True}, r"gradient release .*gradient_release=False"),
    ],
    ids=["O3", "release"],
)
def test_what_backward_rounds_is_refused(options, message, capture):
    model, _optimizer = _converted(torch.optim.AdamW, **options)
    capture()
    with pytest.raises(RuntimeError, match=message):
        _backward(model)
