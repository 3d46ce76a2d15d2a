import pytest
import torch
from torch import nn

from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8, restore_weights, revert


def test_a_model_in_place_of_an_optimizer_is_told():
    with pytest.raises(
        TypeError, match=r"got Linear; torch_fp8.convert_to_float8\(model, config\)"
    ):
        convert_optimizer(nn.Linear(32, 32))
    with pytest.raises(TypeError, match=r"takes a torch.optim.Optimizer, got list"):
        convert_optimizer([])


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_model_that_it_does_not_train_is_refused_before_anything_changes(level):
    mine, other = nn.Linear(128, 64), nn.Linear(128, 64)
    optimizer = torch.optim.AdamW(mine.parameters())
    with pytest.raises(
        ValueError, match="none of the 2 parameters of AdamW is one of the 2 of Lin"
    ):
        convert_optimizer(optimizer, FP8Config(opt_level=level), model=other)
    assert type(optimizer) is torch.optim.AdamW
    assert type(mine.weight) is nn.Parameter


def test_a_part_of_a_model_and_more_than_one_are_as_they_were():
    one, two = nn.Linear(128, 64), nn.Linear(128, 64)
    assert convert_optimizer(torch.optim.AdamW([one.weight]), model=one).converted
    both = torch.optim.AdamW([*one.parameters(), *two.parameters()])
    assert convert_optimizer(both, "rowwise", model=two).converted


def test_weights_of_an_optimizer_that_a_host_wrapped_are_restored():
    class Wrapper:
        def __init__(self, optimizer):
            self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    model = nn.Linear(128, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    convert_to_float8(model)
    convert_optimizer(optimizer, model=model)
    assert restore_weights(Wrapper(optimizer)) == 1


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_model_prepared_in_inference_mode_is_trained_outside_it(level, recipe):
    losses = []
    for inside in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        config = FP8Config(opt_level=level, recipe=recipe)
        with torch.inference_mode(inside):
            convert_to_float8(model, config)
            convert_optimizer(optimizer, config, model=model)
            assert torch.is_inference_mode_enabled() is inside
        for _ in range(2):
            loss = model(torch.ones(16, 64)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.inference_mode(inside):
            restore_weights(optimizer)
            revert(model)
        loss = model(torch.ones(16, 64)).square().mean()
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == losses[1]


def test_a_weight_made_in_inference_mode_is_refused():
    with torch.inference_mode():
        model = nn.Linear(128, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match=r"created inside torch.inference_mode\(\)"):
        convert_optimizer(optimizer, model=model)
