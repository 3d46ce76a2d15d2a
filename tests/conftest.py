"""Fixtures for all tests, and the environment they run in."""

import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_config_from_outside(monkeypatch):
    monkeypatch.delenv("TORCH_FP8_CONFIG", raising=False)
