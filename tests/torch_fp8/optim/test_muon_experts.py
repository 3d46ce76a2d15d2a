"""Muon for fused experts (E, N, K), as third-party classes step them: a batch of matrices.

`torch.optim.Muon` takes matrices alone, and says so when it is made.
"""

import pytest
import torch
from torch import nn

from tests.batched_muon import SingleDeviceMuon
from tests.internals import BUFFER, Int8Momentum, SplitWeight
from tests.moe_experts import E, experts
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8


def _module():
    torch.manual_seed(0)
    return experts()


def _gradients(module, step):
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
