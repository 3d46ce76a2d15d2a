"""``FP8Config(backend="transformer-engine")`` in Accelerate, on the stub; te stays Accelerate's."""

import logging

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, is_transformer_engine_available
from torch import nn

from accelerate_fp8 import FP8Config, FP8Kwargs
from torch_fp8.nn.transformer_engine import TransformerEngineLinear


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 64)
        self.lm_head = nn.Linear(64, 64)

    def forward(self, x):
        return self.lm_head(self.down(self.up(x).relu()))


def make(accelerate, backend="transformer-engine", **options):
    handler = FP8Kwargs(FP8Config(backend=backend, **options))
    return accelerate.Accelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=[handler])


def train(accelerator, steps=8):
    model = Block()
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


@pytest.mark.parametrize("options", [{"opt_level": "O2"}, {"opt_level": "O3"}], ids=str)
def test_trains_as_with_our_own_layers(accelerate, te, caplog, options):
    caplog.set_level(logging.INFO, logger="accelerate_fp8")
    losses, model = train(make(accelerate, **options))
    assert [type(layer) for layer in model.children()] == [
        TransformerEngineLinear,
        TransformerEngineLinear,
        nn.Linear,
    ]
    AcceleratorState._reset_state(True)
    ours, _ = train(make(accelerate, backend="torch", **options))
    assert losses == pytest.approx(ours, rel=0.05)
    summaries = [r.getMessage() for r in caplog.records if "linear layers" in r.getMessage()]
    theirs, own = ([line for line in s.splitlines() if "  auto  " not in line] for s in summaries)
    assert theirs == own
    assert "Transformer Engine has its own casts" in summaries[0]


def test_layers_under_a_device_map_hook(accelerate, te):
    accelerator = make(accelerate, opt_level="O1")
    model = Block()
    for layer in (model.up, model.down):
        add_hook_to_module(layer, ModelHook())
    for _ in range(2):
        accelerator.prepare(model)
        assert model(torch.randn(5, 64)).shape == (5, 64)
        assert isinstance(model.up, TransformerEngineLinear)
        assert model.up.fp8.engine is not None


def test_fsdp_is_refused_by_name(accelerate, te, monkeypatch):
    fsdp = property(lambda self: DistributedType.FSDP)
    monkeypatch.setattr(accelerate.Accelerator, "distributed_type", fsdp)
    with pytest.raises(ValueError, match="one device and under DDP"):
        make(accelerate)


def test_accelerates_own_flag_stays_accelerates_own(accelerate, te, monkeypatch):
    """``--fp8_backend te`` is Accelerate's integration, which looks for the package itself."""
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "te")
    if is_transformer_engine_available():
        accelerator = accelerate.Accelerator(mixed_precision="fp8", cpu=True)
        assert str(accelerator.fp8_backend).endswith("TE")
        assert "_fp8_preparation" not in vars(accelerator)
    else:
        with pytest.raises(ImportError, match="TransformerEngine is not available"):
            accelerate.Accelerator(mixed_precision="fp8", cpu=True)
