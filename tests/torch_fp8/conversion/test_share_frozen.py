import copy
import gc

import pytest
import torch
from torch import nn

from tests.internals import Float8FrozenWeight, share_equal_weights
from torch_fp8 import FP8Config, freeze, thaw


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(160, 96), nn.ReLU(), nn.Linear(96, 160), nn.Linear(160, 96))


def frozen(device=None):
    model = net()
    freeze(model, FP8Config(recipe="tensorwise"), device=device)
    return model


def live_bytes():
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor]
    storages = [t.untyped_storage() for t in tensors if t.dtype == torch.float8_e4m3fn]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def place_of(weight):
    return weight.qdata.data_ptr()


@pytest.fixture
def pair():
    policy, reference = frozen(), frozen()
    assert share_equal_weights([policy, reference])[0] == 3
    return policy, reference


@pytest.mark.long
def test_one_copy_is_alive():
    before = live_bytes()
    policy, reference = frozen(), frozen()
    both = live_bytes() - before
    shared = share_equal_weights([policy, reference])
    assert live_bytes() - before == both // 2
    scales = sum(m.weight.scale.nbytes for m in reference if isinstance(m, nn.Linear))
    assert shared[1] == both // 2 + scales


WRITES = {
    "in place": lambda m: m[0].weight.mul_(2.0),
    "data": lambda m: m[0].weight.data.add_(1.0),
    "data set": lambda m: setattr(m[0].weight, "data", torch.ones(96, 160)),
    "of another": lambda m: m[0].weight.copy_(changed()[0].weight),
    "loaded": lambda m: m.load_state_dict(changed().state_dict()),
    "thawed": lambda m: thaw(m) and m[0].weight.zero_(),
    "merged": lambda m: m[0].begin_merge() and m[0].weight.zero_(),
    "trained": lambda m: m[0].weight.requires_grad_(True).data.zero_(),
    "moved": lambda m: m._apply(lambda t: t.clone()) and m[0].weight.zero_(),
}


def changed():
    model = net()
    nn.init.constant_(model[0].weight, 3.0)
    freeze(model, FP8Config(recipe="tensorwise"))
    return model


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:'0.weight' was stored")
@pytest.mark.parametrize("written", ["policy", "reference"])
@pytest.mark.parametrize("name", WRITES)
def test_a_write_to_one_never_changes_the_other(pair, name, written):
    one, other = pair if written == "policy" else pair[::-1]
    x = torch.randn(4, 160)
    expected, bytes_before = other(x), other[0].weight.qdata.clone()
    kept = one[0].weight.dequantize()
    WRITES[name](one)
    assert not torch.equal((one[0].weight + 0).float(), kept.float()), "it was written"
    weight = other[0].weight
    assert isinstance(weight, Float8FrozenWeight)
    assert torch.equal(weight.qdata.view(torch.uint8), bytes_before.view(torch.uint8))
    assert torch.equal(other(x), expected)


@torch.no_grad()
def test_only_what_is_written_takes_memory_of_its_own(pair):
    policy, reference = pair
    reference[0].weight.mul_(2.0)
    places = [[place_of(m.weight) for m in model if hasattr(m, "weight")] for model in pair]
    assert [a == b for a, b in zip(*places, strict=True)] == [False, True, True]
    place = place_of(policy[0].weight)
    policy[0].weight.mul_(2.0)
    assert place_of(policy[0].weight) == place, "nobody shares it any more"


@torch.no_grad()
def test_equal_values_do_not_separate_them(pair):
    policy, reference = pair
    reference[0].weight.copy_(policy[0].weight)
    reference.load_state_dict(policy.state_dict())
    assert place_of(reference[0].weight) == place_of(policy[0].weight)
    assert share_equal_weights(pair)[0] == 0


@torch.no_grad()
def test_who_is_left_alone_writes_in_place():
    policy, reference = frozen(), frozen()
    share_equal_weights([policy, reference])
    del reference
    gc.collect()
    place = place_of(policy[2].weight)
    policy[2].weight.mul_(2.0)
    assert place_of(policy[2].weight) == place


def test_weights_that_differ_in_one_byte_or_one_scale_are_not_shared():
    policy, reference = frozen(), frozen()
    codes = reference[0].weight.qdata.view(torch.uint8)
    codes[5, 7] ^= 1
    reference[2].weight.scale[1, 0] *= 2
    assert share_equal_weights([policy, reference])[0] == 1


def test_names_do_not_matter_and_a_merged_weight_counts():
    policy, reference = frozen(), nn.ModuleDict({"other": frozen()})
    policy[0].begin_merge()
    assert share_equal_weights([policy, reference])[0] == 3
    policy[0].end_merge(merged=False)
    assert place_of(policy[0].weight) == place_of(reference["other"][0].weight)


def test_a_merged_layer_is_copied_without_the_other_models():
    policy, reference = frozen(), frozen()
    share_equal_weights([policy, reference])
    policy[0].begin_merge()
    before = live_bytes()
    twin = copy.deepcopy(policy[0])
    assert live_bytes() - before == twin.fp8.frozen.unmerged["weight"].qdata.nbytes
    assert twin.fp8.frozen.unmerged["weight"].sharers is None
