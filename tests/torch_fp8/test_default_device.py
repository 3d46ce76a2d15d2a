"""What is converted stays on its own device, whatever torch's default device is.

The meta device as the default stands for ``torch.set_default_device("cuda")``: what is made without
a device of its own meets the CPU's tensors, and fails.
"""

import copy
import io

import pytest
import torch
from torch import nn
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from tests.internals import RECIPES
from tests.internals import kernels_adamw as adamw
from tests.steps import train_steps
from torch_fp8 import (
    FP8Config,
    convert_optimizer,
    convert_to_float8,
    memory_report,
    merged_state_dict,
)

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
    convert_to_float8(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    convert_optimizer(optimizer, config, model=model)
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


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_recipe_trains_evaluates_and_is_copied(recipe):
    model, optimizer, tokens = _made({}, recipe)
    losses = _steps(model, optimizer, tokens)
    assert losses[1] < losses[0]
    other = copy.deepcopy(model)
    for each in (model, other):
        each.eval()
    with torch.no_grad():
        assert torch.equal(model(tokens), other(tokens))


def test_a_stock_checkpoint_is_opened():
    """Also of a step that is a number, as older versions of torch have it."""
    with torch.device("cpu"):
        torch.manual_seed(0)
        stock = Block()
        its_optimizer = torch.optim.AdamW(stock.parameters(), foreach=False)
        tokens = torch.randint(96, (2, 16))
        _steps(stock, its_optimizer, tokens)
    saved = its_optimizer.state_dict()
    for entry in saved["state"].values():
        entry["step"] = entry["step"].item()
    model, optimizer, _ = _made({})
    optimizer.load_state_dict(saved)
    assert _steps(model, optimizer, tokens)
    steps = {state["step"].item() for state in optimizer.state_dict()["state"].values()}
    assert steps == {4.0}


def test_histories_are_loaded():
    model, optimizer, tokens = _made({}, "delayed")
    _steps(model, optimizer, tokens)
    history, last = model.out.scaling_state
    model.out.load_scaling_state(history.clone(), last.clone())
    assert torch.equal(model.out.scaling_state[0], history)


def test_no_weight_to_ask_of_is_no_tensor_of_the_default_device():
    assert adamw.update_rms([]).device.type == "cpu"
