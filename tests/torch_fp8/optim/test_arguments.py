import pytest
import torch
from torch import nn

from torch_fp8 import FP8Config, convert_optimizer


def test_a_model_in_place_of_an_optimizer_is_told():
    with pytest.raises(
        TypeError, match=r"got Linear; torch_fp8.convert_to_float8\(model, config\)"
    ):
        convert_optimizer(nn.Linear(32, 32))
    with pytest.raises(TypeError, match=r"got list; pass the optimizer"):
        convert_optimizer([])


def test_what_is_no_model_is_told():
    optimizer = torch.optim.AdamW(nn.Linear(32, 32).parameters())
    with pytest.raises(TypeError, match=r"model=\.\.\.\) takes an nn.Module, got AdamW"):
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
