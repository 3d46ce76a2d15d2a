import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import nn

from accelerate_fp8 import FP8Config, FP8Kwargs
from tests.internals import TransformerEngineLinear
from tests.steps import train_steps


def make(accelerate, backend="transformer-engine"):
    handler = FP8Kwargs(FP8Config(backend=backend))
    return accelerate.Accelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=[handler])


def loss_of(model, step):
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(step))
    return (model(x) - x).float().pow(2).mean()


def test_trains_as_with_our_own_layers_also_under_device_map_hooks(accelerate, te):
    losses = []
    for backend, hooks in (("torch", 0), ("transformer-engine", 0), ("transformer-engine", 2)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
        for layer in (model[0], model[2])[:hooks]:
            add_hook_to_module(layer, ModelHook())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        AcceleratorState._reset_state(True)
        accelerator = make(accelerate, backend)
        model, optimizer = accelerator.prepare(model, optimizer)
        losses.append(train_steps(model, optimizer, 8, loss_of=loss_of))
    assert type(model[0]) is type(model[2]) is TransformerEngineLinear
    assert model[0].fp8.engine is not None
    assert accelerator.prepare(model)(torch.randn(5, 64)).shape == (5, 64)
    assert losses[1] == losses[2] == pytest.approx(losses[0], rel=0.05)


def test_fsdp_is_refused_by_name(accelerate, te, monkeypatch):
    fsdp = property(lambda self: DistributedType.FSDP)
    monkeypatch.setattr(accelerate.Accelerator, "distributed_type", fsdp)
    with pytest.raises(ValueError, match="one device and under DDP"):
        make(accelerate)
