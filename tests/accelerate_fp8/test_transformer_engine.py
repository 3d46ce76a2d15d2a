"""``FP8Config(backend="transformer-engine")`` in Accelerate, on the stub; te stays Accelerate's."""

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import nn

from accelerate_fp8 import FP8Config, FP8Kwargs
from torch_fp8.nn.transformer_engine import TransformerEngineLinear


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))


def make(accelerate, backend="transformer-engine", **options):
    handler = FP8Kwargs(FP8Config(backend=backend, **options))
    return accelerate.Accelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=[handler])


def train(accelerator, steps=8):
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for step in range(steps):
        x = torch.randn(5, 64, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x).float().pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def test_trains_as_with_our_own_layers(accelerate, te):
    losses, model = train(make(accelerate))
    assert type(model[0]) is type(model[2]) is TransformerEngineLinear
    AcceleratorState._reset_state(True)
    ours, _ = train(make(accelerate, backend="torch"))
    assert losses == pytest.approx(ours, rel=0.05)


def test_layers_under_a_device_map_hook(accelerate, te):
    accelerator = make(accelerate, opt_level="O1")
    model = layers()
    for layer in (model[0], model[2]):
        add_hook_to_module(layer, ModelHook())
    for _ in range(2):
        accelerator.prepare(model)
        assert model(torch.randn(5, 64)).shape == (5, 64)
        assert isinstance(model[0], TransformerEngineLinear)
        assert model[0].fp8.engine is not None


def test_fsdp_is_refused_by_name(accelerate, te, monkeypatch):
    fsdp = property(lambda self: DistributedType.FSDP)
    monkeypatch.setattr(accelerate.Accelerator, "distributed_type", fsdp)
    with pytest.raises(ValueError, match="one device and under DDP"):
        make(accelerate)
