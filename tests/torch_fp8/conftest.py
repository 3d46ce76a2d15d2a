"""Fixtures for the engine's tests."""

import pytest
import torch
import torch.distributed as dist


@pytest.fixture
def single_process_group(tmp_path):
    """A gloo process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


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
