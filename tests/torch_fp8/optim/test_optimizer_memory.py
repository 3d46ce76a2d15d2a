import gc

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tests.fp8_checkpoints import LiveStorages
from tests.internals import expected_bytes_per_param, stored_grad
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8, memory_report

CONFIGS = {
    "O2": (FP8Config(), 7.2),
    "O3": (FP8Config(opt_level="O3"), 6.2),
    "O3, released": (FP8Config(opt_level="O3", gradient_release=True), 5.2),
}


def _layers(count=2, width=256):
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))
    convert_to_float8(model)
    return model


def _backward(model, width=256):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(8, width)).float().square().mean()
    loss.backward()


@pytest.mark.parametrize(("config", "most"), CONFIGS.values(), ids=CONFIGS)
def test_bytes_of_converted_weights(config, most):
    model = _layers()
    optimizer = torch.optim.AdamW(model.parameters())
    convert_optimizer(optimizer, config, model=model)
    expected = expected_bytes_per_param(model, [optimizer])
    assert memory_report(model, optimizer).master == 2 * 256 * 256  # before any step
    _backward(model)
    optimizer.step()
    report = memory_report(model, optimizer)
    assert report.bytes_per_param <= most
    assert report.bytes_per_param == pytest.approx(float(expected.split()[0]), abs=0.006)
    assert "16.00 before" in expected


def test_bytes_of_a_written_weight_until_the_next_step():
    model = _layers()
    optimizer = torch.optim.AdamW(model.parameters())
    convert_optimizer(optimizer, FP8Config(), model=model)

    def held():
        report = memory_report(model, optimizer)
        assert sum(t.nbytes for p in model.parameters() for t in p.halves.tensors) == (
            report.weights + report.master
        )
        return (report.weights + report.master) / report.num_params

    assert held() == 3
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.99)
    assert held() == 4
    for parameter in model.parameters():
        parameter.detach().norm()
        parameter.data.numpy()
    gc.collect()
    assert held() == 4
    _backward(model)
    optimizer.step()
    assert held() == 3


def _parts(tensor):
    encoded = is_traceable_wrapper_subclass(tensor)
    return (
        [getattr(tensor, part) for part in tensor.__tensor_flatten__()[0]] if encoded else [tensor]
    )


@pytest.mark.long
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_peak_within_a_step(level):
    config, _ = CONFIGS[level]
    model = _layers(count=64, width=384)  # the largest weight: 1.6 % of the parameters
    optimizer = torch.optim.AdamW(model.parameters())
    convert_optimizer(optimizer, config, model=model)
    _backward(model, 384)
    optimizer.step()
    report = memory_report(model, optimizer)
    optimizer.zero_grad()
    _backward(model, 384)
    gc.collect()
    states = [value for state in optimizer.state.values() for value in state.values()]
    with LiveStorages() as live:
        for tensor in [*model.parameters(), *map(stored_grad, model.parameters()), *states]:
            for part in _parts(tensor):
                part.detach()
        before = live.alive
        optimizer.step()
    assert 0 < live.peak - before <= 0.05 * report.total
