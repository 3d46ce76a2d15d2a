"""Classes that a module has been given, beside those that fully_shard gives it."""

import copy

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from torch_fp8.nn.class_swap import add_mixin, is_fsdp_class, remove_mixin


class Mixin(nn.Module):
    """Some other text."""


class Outer:
    class Layer(nn.Linear):
        """A layer."""


def test_a_class_keeps_all_its_names():
    layer = Outer.Layer(4, 4)
    add_mixin(layer, Mixin)
    assert isinstance(layer, Mixin)
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(type(layer), name) == getattr(Outer.Layer, name)
    remove_mixin(layer, Mixin)
    assert type(layer) is Outer.Layer


def test_the_class_of_fsdp_stays_in_front_with_all_it_has(single_process_group):
    layer = Outer.Layer(4, 4)
    fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    sharded = type(layer)
    add_mixin(layer, Mixin)
    assert is_fsdp_class(type(layer))
    front, mixed = type(layer).__bases__
    assert front is FSDPModule
    assert mixed.__bases__ == (Mixin, Outer.Layer)
    assert type(layer).__name__ == sharded.__name__ == "FSDPLayer"
    with pytest.raises(AssertionError, match="deepcopy"):  # as FSDP2 has it
        copy.deepcopy(layer)
    remove_mixin(layer, Mixin)
    assert type(layer).__bases__ == sharded.__bases__


def test_a_class_of_two_bases_is_not_fsdps_for_that():
    class FSDPModule:
        pass

    class Alone(FSDPModule):
        pass

    class Two(Mixin, Outer.Layer):
        pass

    assert not is_fsdp_class(Alone)
    assert not is_fsdp_class(Two)
