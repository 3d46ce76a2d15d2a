import contextlib

import pytest
import torch
from torch import nn

from tests.internals import SplitWeight, residual_of, stored, whole_weights
from tests.steps import adamw, train_steps
from torch_fp8 import FP8Config, merged_state_dict

each_config = pytest.mark.parametrize(
    "config", [FP8Config(), FP8Config(opt_level="O3")], ids=lambda c: c.opt_level
)


class Tied(nn.Module):
    """An embedding whose weight is the output layer's, too; a layer of the user's in BF16."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(100, 64)
        self.hidden = nn.Linear(64, 64)
        self.own = nn.Linear(64, 64, dtype=torch.bfloat16)
        self.head = nn.Linear(64, 100, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.own(self.hidden(self.embedding(tokens))))


def _trained(config, steps=3):
    model = Tied()
    optimizer, _ = adamw(model, config, lr=1e-3)
    train_steps(model, optimizer, steps)
    return model, optimizer


@each_config
def test_a_model_shows_whole_weights_of_the_users_dtype(config):
    model, optimizer = _trained(config)
    parameters = dict(model.named_parameters())
    expected = merged_state_dict(model, optimizer)
    with whole_weights(model):
        state = model.state_dict()
        assert model.head.weight is model.embedding.weight  # the tied one once
        assert not any(isinstance(p, SplitWeight) for p in model.parameters())
    assert {name for name, t in state.items() if t.dtype == torch.bfloat16} == {
        "own.weight",
        "own.bias",
    }
    for name, tensor in state.items():
        own = tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, parameters[name] if own else expected[name])
    assert all(p is parameters[name] for name, p in model.named_parameters())
    split = {"embedding.weight", "hidden.weight"}
    assert {name for name, p in parameters.items() if isinstance(p, SplitWeight)} == split
    assert all(stored(p).dtype == torch.bfloat16 for n, p in parameters.items() if n in split)
    for name, tensor in model.state_dict().items():  # without it, too
        assert tensor.dtype == state[name].dtype
        assert torch.equal(tensor, state[name])


def test_the_parameters_are_back_after_an_error():
    model, _ = _trained(FP8Config(), steps=0)
    before = list(model.parameters())
    with pytest.raises(KeyboardInterrupt), whole_weights(model):
        raise KeyboardInterrupt
    assert all(p is q for p, q in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("shown", [True, False])
@each_config
def test_whole_weights_that_are_loaded_fall_into_the_same_parts(config, shown):
    model, optimizer = _trained(config)
    split = [p for p in model.parameters() if isinstance(p, SplitWeight)]
    assert len(split) == 2
    # Ties of the rounding to BF16, which a plain copy would round to even: another weight.
    for parameter in split:
        parameter.halves.residual.fill_(-128)
    with whole_weights(model) if shown else contextlib.nullcontext():
        saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = [p.detach().clone() for p in model.parameters()]
    parts = [[part.clone() for part in p.halves.tensors] for p in split]

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(saved)
    assert all(map(torch.equal, weights, model.parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert all(map(torch.equal, weights, model.parameters()))
    for before, parameter in zip(parts, split, strict=True):
        assert all(map(torch.equal, before, parameter.halves.tensors))


def test_residuals_of_bf16_weights_of_the_users_stay():
    model, optimizer = _trained(FP8Config())
    before = residual_of(model.own.weight).clone()
    assert before.any()
    with whole_weights(model):
        saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = merged_state_dict(model, optimizer)["own.weight"]
    model.load_state_dict(saved)
    assert torch.equal(residual_of(model.own.weight), before)
    assert torch.equal(merged_state_dict(model, optimizer)["own.weight"], expected)
