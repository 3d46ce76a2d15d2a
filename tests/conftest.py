"""Fixtures for all tests, and the environment they run in."""

import importlib
import os
import sys
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_config_from_outside(monkeypatch):
    monkeypatch.delenv("TORCH_FP8_CONFIG", raising=False)


@pytest.fixture
def te(monkeypatch):
    """The stub of ``transformer_engine.pytorch``, on any device."""
    from torch_fp8 import transformer_engine

    def forget():
        for name in [n for n in sys.modules if n.partition(".")[0] == "transformer_engine"]:
            del sys.modules[name]
        transformer_engine.native_recipe.cache_clear()

    forget()
    monkeypatch.syspath_prepend(Path(__file__).parent / "stubs")
    monkeypatch.setattr(transformer_engine, "_is_cuda", lambda device: True)
    yield importlib.import_module("transformer_engine.pytorch")
    forget()
