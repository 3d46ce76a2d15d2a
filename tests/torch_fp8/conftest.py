"""Fixtures for the engine's tests."""

import pytest
import torch


@pytest.fixture
def scaled_mm_calls(monkeypatch):
    """The keyword arguments of each call of torch's scaled matmul.

    torch 2.11 has ``F.scaled_mm`` for CUDA only; on the CPU the engine calls its predecessor there.
    """
    calls = []
    for owner, name in ((torch.nn.functional, "scaled_mm"), (torch, "_scaled_mm")):
        monkeypatch.setattr(owner, name, _recording(getattr(owner, name), calls))
    return calls


def _recording(function, calls):
    def recorded(*args, **kwargs):
        calls.append(kwargs)
        return function(*args, **kwargs)

    return recorded
