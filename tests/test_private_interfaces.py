import ast
import functools
import re

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput
from torch.nn.parallel import DistributedDataParallel

from scripts import house_figures
from scripts.house_figures import ROOT, own_names, private_names, trees

PAGE = ROOT / "docs" / "private-interfaces.md"


@pytest.fixture(autouse=True, scope="module")
def _parsed_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(house_figures, "trees", functools.cache(trees))
        yield


def _names(text):
    parts = [part for name in re.findall(r"`([^`]+)`", text) for part in name.split(".")]
    return {part for part in parts if part.startswith("_") and not part.startswith("__")}


@pytest.fixture(scope="module")
def named():
    return _names(" ".join(re.findall(r"^\| (`.*?) \|", PAGE.read_text(), re.M)))


def test_each_private_interface_has_its_reason(named):
    assert sorted(private_names().keys() - named) == []


def test_the_page_names_no_interface_that_is_not_used(named):
    assert sorted(named - private_names().keys()) == []


def test_names_of_torch_that_ours_hide_are_on_the_page():
    attributes = (n for t in trees().values() for n in ast.walk(t) if isinstance(n, ast.Attribute))
    of_others = {n.attr for n in attributes if getattr(n.value, "id", "") not in ("self", "cls")}
    layer = nn.Linear(1, 1)
    things = (torch, torch.ops.aten.add.Tensor, layer, torch.optim.SGD(layer.parameters()))
    classes = (torch.Tensor, DistributedDataParallel, PrepareModuleInput, ColwiseParallel)
    torchs = {name for thing in (*things, *classes) for name in dir(thing)}
    hidden = {name for name in of_others & torchs & own_names() if re.match("_[^_]", name)}
    assert sorted(hidden - _names(PAGE.read_text())) == []
