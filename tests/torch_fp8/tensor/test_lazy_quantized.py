import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.internals import OF_TENSOR, LazyQuantizedTensor, Quantizer, ScaleSource, producer, shared
from tests.steps import Calls, renew_scales
from tests.torch_fp8.block_models import MLP, Norm
from torch_fp8 import FP8Config, convert_to_float8


def _norm_and_layer():
    torch.manual_seed(0)
    model = nn.Sequential(Norm(64), nn.Linear(64, 64)).bfloat16()
    convert_to_float8(model, FP8Config())
    return model


def _x(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).bfloat16()


def test_who_asks_first_decides_the_scale_of_both_layouts():
    spec = _norm_and_layer()[1].fp8.recipe.input
    y = shared(_x(16, 64), "mlp")
    first, second = (Quantizer(spec, ScaleSource(torch.tensor(scale))) for scale in (0.5, 0.125))
    row, none = y.production.layouts(first, rowwise=True, columnwise=False)
    assert none is None
    again, col = y.production.layouts(second, rowwise=True, columnwise=True)
    assert again is row
    assert row.scale == col.scale == 0.5
    assert torch.equal(col.qdata.view(torch.uint8), row.qdata.view(torch.uint8).t())


def test_ranks_with_parts_of_an_activation_cast_them_with_one_scale(monkeypatch):
    spec = _norm_and_layer()[1].fp8.recipe.input
    alone, _ = shared(_x(16, 64), "mlp").production.layouts(
        Quantizer(spec, OF_TENSOR), rowwise=True, columnwise=False
    )
    # Another rank's part has an amax that is four times as large.
    monkeypatch.setattr(producer, "group_amax", lambda amax, group: 4 * amax)
    grouped = Quantizer(spec, OF_TENSOR, group=object())
    row, col = shared(_x(16, 64), "mlp").production.layouts(grouped, rowwise=True, columnwise=True)
    assert row.scale == col.scale == 4 * alone.scale


def test_a_plain_reader_notices_that_the_input_was_written_to():
    model = _norm_and_layer()
    x = _x(4, 64)
    y = model[0](x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="'0' was modified in place"):
        y + 0


def test_what_was_made_before_a_write_to_the_input_is_used_after_it():
    model = _norm_and_layer()
    want = model(_x(4, 64))
    x = _x(4, 64)
    y = model[0](x)
    dense = y + 0
    x.add_(1)
    assert torch.equal(y + 0, dense)
    assert torch.equal(model[1](y), want)  # cast from the plain tensor that there is


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
@pytest.mark.parametrize("grad", [True, False])
def test_no_layer_reads_what_an_activation_function_has_overwritten(recipe, grad):
    norm, layer = model = nn.Sequential(Norm(64), nn.Linear(64, 64)).bfloat16()
    convert_to_float8(model, FP8Config(recipe=recipe))
    x = _x(16, 64).requires_grad_(grad)
    want = layer(nn.functional.relu(norm(x)))
    y = norm(x)
    positive = nn.functional.relu(y, inplace=True)
    assert torch.equal(positive + 0, nn.functional.relu(norm(x)))
    with pytest.raises(RuntimeError, match=r"relu modifies the output of '0' in place.*skip"):
        layer(y)
    if recipe != "delayed":  # whose history has moved on
        assert torch.equal(layer(positive), want)


def test_writing_to_it_is_refused_however_it_is_said():
    y, other = _norm_and_layer()[0](_x(16, 64)), _x(16, 64)
    for write in (
        lambda: y.add_(1),
        lambda: torch.add(other, 1, out=y),
        lambda: torch._foreach_mul_([y], 2.0),
        lambda: torch.relu_(input=y),
        lambda: y.__setitem__(0, 0.0),
    ):
        with pytest.raises(RuntimeError, match="modifies the output of '0' in place"):
            write()


def test_a_read_without_autograd_leaves_the_next_one_connected():
    x = _x(4, 64).requires_grad_()
    y = _norm_and_layer()[0](x)
    with torch.no_grad():
        assert not (y + 0).requires_grad
    (y + 0).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("reads", ["the layer", "torch", "both"])
def test_a_frozen_part_without_gradients_stays_out_of_the_graph_of_who_reads_it(reads):
    model, x = _norm_and_layer(), _x(4, 64)
    with torch.no_grad():
        y = model[0](x)
    assert not y.requires_grad
    if reads != "torch":
        model[1](y).sum().backward()
        grad, model[1].weight.grad = model[1].weight.grad, None
        model[1](y.detach().clone()).sum().backward()
        assert torch.equal(grad, model[1].weight.grad)
    if reads != "the layer":
        assert not (y + 0).requires_grad
    assert model[0].weight.grad is None


def test_all_plain_readers_share_one_tensor():
    y = _norm_and_layer()[0](_x(4, 64).requires_grad_())
    first, second = y.view(4, 64), y.view(4, 64)
    assert first._base is second._base


def test_a_leaf_is_freed_with_its_last_reader():
    y = _norm_and_layer()[0](_x(4, 64).requires_grad_())
    gc.disable()
    try:
        leaf = y.detach().requires_grad_()
        (leaf * 3).sum().backward()
        alive = weakref.ref(leaf)
        del leaf
        assert alive() is None
    finally:
        gc.enable()


def test_a_copy_of_what_is_held_twice_is_one():
    y = shared(_x(4, 64), "mlp")
    first, second = copy.deepcopy([y, y])
    assert type(first) is torch.Tensor
    assert first is second
    first.zero_()
    assert torch.equal(y + 0, _x(4, 64))


class Grouped(nn.Module):
    def __init__(self, size, inner):
        super().__init__()
        self.layer = nn.Linear(size // 2, inner // 2, bias=False)

    def forward(self, x):
        return self.layer(x.unflatten(-1, (2, -1))).flatten(-2)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_a_gradient_behind_a_view_of_another_width_has_that_width(recipe):
    model = nn.Sequential(MLP(64, 256)).bfloat16()
    model[0].gate_proj = Grouped(64, 256).bfloat16()
    assert convert_to_float8(model, FP8Config(recipe=recipe)).producers == ("0",)
    seen = []

    def note(module, grads):
        seen.append(type(grads[0]))

    def to_plain(module, args, y):
        y.register_hook(lambda grad: grad + 0)

    model[0].up_proj.register_full_backward_pre_hook(note)
    grads = []
    for _ in range(2):
        x = _x(32, 64).requires_grad_()
        model(x).float().square().sum().backward()
        grads.append([x.grad, *(p.grad for p in model.parameters())])
        model.zero_grad()
        model[0].gate_proj.register_forward_hook(to_plain)
    assert seen[0] is LazyQuantizedTensor
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_what_a_region_of_a_checkpoint_makes_of_its_own_is_there_after_it():
    norm = _norm_and_layer()[0]

    def region(x):
        y = norm(x)
        return y, y * 2

    x = _x(4, 64).requires_grad_()
    y, twice = checkpoint(region, x, use_reentrant=False)
    with Calls() as operators:
        again = y * 2
    assert torch.equal(again, twice)
    assert "rms_norm" not in operators.names


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "delayed"])
def test_the_amax_is_that_of_the_result_however_it_was_cast(recipe):
    """A cast in blocks takes none, one with a given scale raises its reader's slot."""
    model = nn.Sequential(Norm(128), nn.Linear(128, 128, bias=False)).bfloat16()
    convert_to_float8(model, FP8Config(recipe=recipe))
    for _ in range(2):  # with delayed scaling the second is cast ahead
        y = model[0](_x(64, 128).requires_grad_())
        model[1](y)
        assert y.amax().shape == ()
        assert y.amax() == y.dequantize().float().abs().amax()
        renew_scales()
