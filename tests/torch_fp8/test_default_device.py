"""What is converted stays on its own device, whatever torch's default device is.

The meta device as the default stands for ``torch.set_default_device("cuda")``: what is made without
a device of its own meets the CPU's tensors, and fails.
"""

import io

import pytest
import torch
from torch import nn
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from tests.steps import adamw, train_steps
from torch_fp8 import FP8Config, memory_report, merged_state_dict

LEVELS = {
    "O1": {"opt_level": "O1"},
    "O2": {"opt_level": "O2"},
    "O3": {"opt_level": "O3"},
    "O3, release": {"opt_level": "O3", "gradient_release": True},
    "cached": {"opt_level": "O2", "cache_weights": True},
}


@pytest.fixture(autouse=True)
def default_device():
    with torch.device("meta"):
        yield


class Block(nn.Module):
    """An embedding, a norm, a gated MLP, a linear with a bias: all that is converted."""

    def __init__(self):
        super().__init__()
        config = LlamaConfig(hidden_size=64, intermediate_size=128, vocab_size=96)
        self.embedding = nn.Embedding(96, 64)
        self.norm, self.mlp = LlamaRMSNorm(64), LlamaMLP(config)
        self.out = nn.Linear(64, 64)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.mlp(self.norm(x))
        return self.out(x)


def _made(options, recipe="tensorwise"):
    with torch.device("cpu"):
        torch.manual_seed(0)
        model = Block()
        tokens = torch.randint(96, (2, 16))
    config = FP8Config(recipe=recipe, **options)
    optimizer, _ = adamw(model, config, lr=1e-2, foreach=False)
    return model, optimizer, tokens


def _steps(model, optimizer, tokens):
    loss_of = lambda model, step: model(tokens).float().square().mean()  # noqa: E731
    return train_steps(model, optimizer, 2, loss_of=loss_of)


@pytest.mark.parametrize("level", LEVELS)
def test_a_run_is_saved_loaded_and_goes_on(level):
    if level == "O1" and torch.__version__.startswith("2.11"):
        pytest.skip("the AdamW of torch 2.11 itself makes its steps on the default device")
    model, optimizer, tokens = _made(LEVELS[level])
    losses = _steps(model, optimizer, tokens)
    assert losses[1] < losses[0]
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    other, its_optimizer, _ = _made(LEVELS[level])
    other.load_state_dict(saved["model"])
    its_optimizer.load_state_dict(saved["optimizer"])
    assert _steps(other, its_optimizer, tokens) == _steps(model, optimizer, tokens)
    merged = merged_state_dict(model, optimizer)
    assert all(tensor.device.type == "cpu" for tensor in merged.values())
    assert memory_report(model, optimizer).bytes_per_param > 0
