import logging
import pickle

import pytest
import torch
from torch import nn


def _model():
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))


def _losses(accelerator, steps=6):
    """Of the model and the optimizer that `accelerator` has."""
    (model,), (optimizer,) = accelerator._models, accelerator._optimizers
    batch, losses = torch.randn(16, 64, generator=torch.Generator().manual_seed(1)), []
    for _ in range(steps):
        with accelerator.autocast():  # a pickled model has lost what Accelerate put around it
            loss = model(batch).float().square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _pickled(accelerator):
    return pickle.loads(pickle.dumps(accelerator))


@pytest.fixture(params=["O1", "O2", "O3"])
def accelerator(request, accelerate, monkeypatch):
    monkeypatch.setenv("TORCH_FP8_CONFIG", f'{{"opt_level": "{request.param}"}}')
    return accelerate.Accelerator(mixed_precision="fp8", cpu=True)


def _prepare(accelerator):
    model = _model()
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def test_pickled_accelerator_trains_on_as_the_original(accelerator):
    _prepare(accelerator)
    first = _losses(accelerator)  # the optimizer has its states
    other = _pickled(accelerator)
    theirs = _losses(other)
    assert theirs == pytest.approx(_losses(accelerator), rel=1e-3)
    assert theirs[-1] < theirs[0] < first[0]


def test_copy_knows_its_own_models_and_optimizers(accelerator, caplog):
    _prepare(accelerator)
    other = _pickled(accelerator)
    preparation, (model,) = other._fp8_preparation, other._models
    assert set(preparation._reports) == {model}
    assert set(preparation._announced) == {model}
    optimizers = preparation.optimizers
    bare = other._optimizers[0].optimizer
    assert optimizers.that_train(other, model) == [bare]
    assert set(optimizers._reports) == (set() if optimizers.config.opt_level == "O1" else {bare})
    caplog.clear()
    with caplog.at_level(logging.INFO):
        other.prepare(model, other._optimizers[0])  # once more: nothing new to convert or to say
    assert "linear layers" not in caplog.text


def test_weights_of_a_copy_are_given_back(accelerator):
    _prepare(accelerator)
    other = _pickled(accelerator)
    unwrapped = other.unwrap_model(other._models[0], keep_fp32_wrapper=False)
    assert {p.dtype for p in unwrapped.parameters()} == {torch.float32}
