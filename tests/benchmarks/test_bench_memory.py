"""Peaks that are counted without memory, and what is said of them."""

import argparse

import pytest
import torch

from benchmarks.bench_memory import Case, measure

pytestmark = pytest.mark.long


LAYOUT = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
MIB = 2**20


def counted(variant, *, fake=True, checkpointing=False):
    arguments = argparse.Namespace(fake=fake, toy=True)
    case = Case("toy", variant, checkpointing, 1)
    return measure(case, LAYOUT, arguments, torch.device("cpu"))


def test_counting_without_memory_agrees_with_running():
    fake, real = counted("bf16-mixed"), counted("bf16-mixed", fake=False)
    assert real.pop("loss") > 0
    assert fake["weights"] == real["weights"]
    assert fake["states"] == real["states"]
    assert fake["peak_mib"] == pytest.approx(real["peak_mib"], rel=0.05)
