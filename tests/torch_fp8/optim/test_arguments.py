import pytest
import torch
from torch import nn

from torch_fp8 import (
    FP8Config,
    Monitor,
    conversion_report,
    convert_optimizer,
    convert_to_float8,
    freeze,
    memory_report,
    merged_state_dict,
    restore_weights,
    revert,
    rollout,
    scaling_state_dict,
    thaw,
)


def test_a_model_in_place_of_an_optimizer_is_told():
    with pytest.raises(
        TypeError, match=r"got Linear; torch_fp8.convert_to_float8\(model, config\)"
    ):
        convert_optimizer(nn.Linear(32, 32))
    with pytest.raises(TypeError, match=r"takes a torch.optim.Optimizer, got list"):
        convert_optimizer([])


def test_what_is_no_model_is_told():
    optimizer = torch.optim.AdamW(nn.Linear(32, 32).parameters())
    with pytest.raises(TypeError, match=r"model=\.\.\.\) takes an nn.Module or None, got AdamW"):
        convert_optimizer(optimizer, model=optimizer)


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


@pytest.mark.parametrize(
    "function",
    [freeze, thaw, revert, memory_report, scaling_state_dict, convert_to_float8, conversion_report],
)
def test_a_function_of_a_model_names_another_argument(function):
    for argument in (None, "llama", nn.Linear):
        with pytest.raises(
            TypeError, match=rf"{function.__name__}\(model=...\) takes an nn.Module, got "
        ):
            function(argument)


def test_weights_of_an_optimizer_that_a_host_wrapped_are_restored():
    class Wrapper:
        def __init__(self, optimizer):
            self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    model = nn.Linear(128, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    convert_to_float8(model)
    convert_optimizer(optimizer, model=model)
    assert restore_weights(Wrapper(optimizer)) == 1


def test_an_argument_in_place_of_an_optimizer_is_not_ignored():
    """`restore_weights(model)` changed nothing and returned 0."""
    model = nn.Linear(128, 64)
    with pytest.raises(TypeError, match=r"\(optimizer=...\) takes a torch.optim.Optimizer, got L"):
        restore_weights(model)
    with pytest.raises(TypeError, match=r"or an Iterable of Optimizer, got NoneType"):
        merged_state_dict(model, None)
    with pytest.raises(TypeError, match=r"rollout\(model=...\) takes an nn.Module"), rollout(None):
        pass


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: FP8Config.from_json(x), "from_json takes JSON text, the path of a JSON file"),
        (lambda x: Monitor(nn.Linear(16, 16), (), x), "config is 5, of type int; pass FP8Config"),
    ],
    ids=["from_json", "monitor"],
)
def test_an_argument_of_another_type_is_named(call, message):
    with pytest.raises(TypeError, match=message):
        call(5)


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
