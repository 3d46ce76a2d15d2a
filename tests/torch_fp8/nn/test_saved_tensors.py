from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

from tests.moe_experts import batch, experts
from tests.steps import adamw
from torch_fp8 import FP8Config


def _linear():
    return nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64)), (torch.randn(32, 64),)


def _experts():
    model = nn.Module()
    model.experts = experts()
    return model, batch(32)


@pytest.mark.parametrize("build", [_linear, _experts])
def test_a_copy_of_a_saved_weight_is_cast_as_its_half_was(build):
    model, (x, *rest) = build()
    optimizer, _ = adamw(model, FP8Config(recipe="rowwise"))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    forward = model.experts if rest else model
    x = x.bfloat16().requires_grad_()
    gradients = []
    for copies in (nullcontext(), save_on_cpu()):
        with copies:
            loss = forward(x, *rest).float().square().mean()
        (gradient,) = torch.autograd.grad(loss, x)
        gradients.append(gradient)
    assert torch.equal(*gradients)
