"""Muon for fused experts (E, N, K), as third-party classes step them: a batch of matrices.

`torch.optim.Muon` takes matrices alone, and says so when it is made.
"""

import pytest
import torch
from torch import nn

from tests.batched_muon import SingleDeviceMuon
from tests.moe_experts import E, batch, experts
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8, memory_report
from torch_fp8.optim.muon import BUFFER
from torch_fp8.tensor.int8_momentum import Int8Momentum
from torch_fp8.tensor.split_weight import SplitWeight


def _module():
    torch.manual_seed(0)
    return experts()


def _gradients(module, step):
    """Gradients of Gaussian noise and a signal that stays, by parameter."""
    for i, parameter in enumerate(module.parameters()):
        noise, signal = (torch.Generator().manual_seed(seed) for seed in (100 * step + i + 1, i))
        grad = torch.randn(parameter.shape, generator=noise)
        parameter.grad = grad + torch.randn(parameter.shape, generator=signal)


def test_torchs_own_refuses_experts():
    """If this fails, `docs/memory.md` may say that `torch.optim.Muon` takes them."""
    with pytest.raises(ValueError, match="2D"):
        torch.optim.Muon(_module().parameters())


def test_experts_are_stepped_as_matrices_of_their_own():
    module, apart = _module(), []
    before = [p.detach().clone() for p in module.parameters()]
    for parameter in module.parameters():
        apart.append([nn.Parameter(matrix.clone()) for matrix in parameter.detach()])
    convert_to_float8(module, FP8Config())
    optimizer = SingleDeviceMuon(module.parameters(), lr=0.02)
    stock = SingleDeviceMuon([p for of_one in apart for p in of_one], lr=0.02)
    report = convert_optimizer(optimizer, FP8Config(), model=module)
    assert "with an int8 momentum" in str(report)
    assert all(isinstance(p, SplitWeight) for p in module.parameters())
    for step in range(6):
        _gradients(module, step)
        for parameter, matrices in zip(module.parameters(), apart, strict=True):
            for matrix, grad in zip(matrices, parameter.grad.float(), strict=True):
                matrix.grad = grad.clone()
        optimizer.step()
        stock.step()
    for parameter, matrices, first in zip(module.parameters(), apart, before, strict=True):
        momentum = optimizer.state[parameter][BUFFER]
        assert isinstance(momentum, Int8Momentum)
        assert momentum.shape == parameter.shape == (E, *matrices[0].shape)
        moved = (parameter - first).flatten(1), torch.stack(list(matrices)).sub(first).flatten(1)
        assert torch.cosine_similarity(*moved).min() > 0.999
        assert (moved[0].norm(dim=1) / moved[1].norm(dim=1) - 1).abs().max() < 5e-3


def test_experts_take_6_bytes_and_their_losses_are_nearly_stock():
    losses = {}
    for level in ("O1", "O2"):
        module, config = _module(), FP8Config(opt_level=level)
        convert_to_float8(module, config)
        optimizer = SingleDeviceMuon(module.parameters(), lr=0.02)
        convert_optimizer(optimizer, config, model=module)
        torch.manual_seed(1)
        x, index, scores = batch(64)
        losses[level] = []
        for _ in range(8):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = (module(x, index, scores).float() - x).square().mean()
            loss.backward()
            losses[level].append(loss.item())
            counted = memory_report(module, optimizer)
            optimizer.step()
    assert losses["O2"][-1] < 0.9 * losses["O2"][0]
    assert losses["O2"] == pytest.approx(losses["O1"], rel=0.01)
    # weight 2, residual 1, gradient 2, momentum 1, and a scale of 2 bytes for 64 or 48 elements
    assert counted.bytes_per_param == pytest.approx(6 + 2 / 60, abs=0.02)
