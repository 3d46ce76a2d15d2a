"""What the benchmark plants changes no loss but by rounding, and grows as it says."""

import math

import torch

from benchmarks import aligned_channels
from benchmarks.aligned_channels import NO_FAULTS, Faults, train


def _start():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(64, (4000,), generator=generator)
    return aligned_channels._built(0, 64).state_dict(), (tokens, tokens, 64)


def test_sporadic_outliers_leave_the_losses_in_bf16_as_they_are(monkeypatch):
    monkeypatch.setattr(aligned_channels, "evaluate", lambda model, held_out: 0.0)
    faults = Faults(magnitude=1.0, every=2)
    plain = train(None, 0, NO_FAULTS, 5, start=_start())
    assert train(None, 0, faults, 5, start=_start()).losses == plain.losses


def test_aligned_channels_grow_and_are_not_trained(monkeypatch):
    monkeypatch.setattr(aligned_channels, "evaluate", lambda model, held_out: 0.0)
    faults = Faults(aligned=(3,), magnitude=64.0, start=1, growth=3, outlier=1.0)
    rows = []

    def after_step(step, model, loss):
        mlp = model.model.layers[0].mlp
        pair = mlp.gate_proj.weight[3].detach().clone(), mlp.up_proj.weight[3].detach().clone()
        rows.append((*pair, mlp.down_proj.weight[:, 3].detach().clone()))
        assert math.isfinite(loss)

    train(None, 0, faults, 6, after_step, _start())
    assert not torch.equal(rows[0][0], rows[0][1])
    first, last = rows[1], rows[-1]
    for before, after, factor in zip(first, last, (64.0, 64.0, 64.0**-2), strict=True):
        torch.testing.assert_close(after, before * factor, rtol=1e-5, atol=0)
    assert torch.equal(last[0], last[1])
    assert torch.equal(rows[-2][2], last[2])  # and stays so
