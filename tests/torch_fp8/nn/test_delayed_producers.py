"""Norms and gated MLPs that cast with delayed scaling: one read, and whose slot gets the amax.

The twin of a model here has hooks that make plain tensors of everything that is handed over in FP8:
its layers cast for themselves, each with its own scale. Both compute the same, bit for bit.
"""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.internals import INPUT, Float8GatedMLP, Float8RMSNorm, scaling_buffers
from tests.steps import Calls, assert_equal, gaussian, renew_scales, through_a_file, train
from tests.torch_fp8.block_models import MLP, JoinedMLP
from torch_fp8 import FP8Config, convert_to_float8

SIZE, INNER = 64, 128


class Readers(nn.Module):
    """Two layers that read one norm, in an order that may be turned round, or one of them."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(SIZE, eps=1e-5)
        self.a, self.b = (nn.Linear(SIZE, SIZE, bias=False) for _ in range(2))
        self.order = ("a", "b")

    def forward(self, x):
        y = self.norm(x)
        return sum(getattr(self, name)(y) for name in self.order)


class Block(nn.Module):
    def __init__(self, mlp=MLP):
        super().__init__()
        self.readers, self.norm = Readers(), nn.RMSNorm(SIZE, eps=1e-5)
        self.mlp, self.context = mlp(SIZE, INNER), None

    def forward(self, x):
        if self.context is None:
            return self._forward(x)
        return checkpoint(self._forward, x, use_reentrant=False, **self.context)

    def _forward(self, x):
        x = x + self.readers(x)
        return x + self.mlp(self.norm(x))


def _block(mlp=MLP, **options):
    torch.manual_seed(0)
    model = Block(mlp).bfloat16()
    convert_to_float8(model, FP8Config(recipe="delayed", amax_history_len=4, **options))
    return model


def _plain(model):
    def gradient(grad):
        return grad + 0

    for module in model.modules():
        if isinstance(module, Float8RMSNorm):
            module.register_forward_hook(lambda m, args, y: y + 0)
        if isinstance(module, Float8GatedMLP):
            module.down_proj.register_forward_pre_hook(lambda m, args: (args[0] + 0,))
            layers = [m for n, m in module.named_children() if "gate" in n or "up" in n]
            for layer in layers:
                layer.register_forward_hook(
                    lambda m, args, y: y.register_hook(gradient) and None if y.requires_grad else y
                )
    return model


def _assert_same(model, twin, x):
    assert_equal(train(twin, x), train(model, x))
    _assert_same_buffers(model, twin)
    renew_scales()
    _assert_same_buffers(model, twin)
    for m in (model, twin):
        m.zero_grad()


def _assert_same_buffers(model, twin):
    buffers = dict(twin.named_buffers())
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


def _steps(*, zeros=True):
    for seed in range(4):
        yield gaussian(2, 17, SIZE, seed=seed) * (seed if zeros else seed + 1)


# Values and histories.


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("mlp", [MLP, JoinedMLP])
def test_results_and_histories_are_those_of_layers_that_cast_for_themselves(mlp, algorithm):
    model = _block(mlp, amax_compute_algo=algorithm)
    twin = _plain(copy.deepcopy(model))
    for x in _steps():
        _assert_same(model, twin, x)
    for x, mode in itertools.product([gaussian(2, 17, SIZE, seed=9)], ("eval", "train")):
        with torch.no_grad():
            assert torch.equal(getattr(model, mode)()(x), getattr(twin, mode)()(x))
        _assert_same_buffers(model, twin)
    _assert_same(model, twin, gaussian(2, 17, SIZE, seed=10))


@pytest.mark.parametrize(
    "change", ["frozen", "checkpointed", "mlp.up_proj", "mlp.down_proj", "readers.a"]
)
def test_layers_that_are_frozen_run_again_or_are_skipped_among_them(change):
    model = _block(skip=(change,) if "." in change else ())
    for layer in (model.mlp.gate_proj, model.mlp.down_proj):
        layer.weight.requires_grad_(change != "frozen")
    twin = _plain(copy.deepcopy(model))
    model.context = {} if change == "checkpointed" else None
    for x in _steps():
        _assert_same(model, twin, x)


def test_who_reads_first_may_change():
    model = _block()
    _assert_same(model, _plain(copy.deepcopy(model)), gaussian(8, SIZE))
    model.readers.order = ("b", "a")
    scales = [
        layer.fp8.quantizer(layer, INPUT).source.scale
        for layer in (model.readers.a, model.readers.b)
    ]
    assert torch.equal(*scales)
    model(gaussian(8, SIZE, seed=2))
    slots = [scaling_buffers(layer)[2][INPUT] for layer in (model.readers.a, model.readers.b)]
    assert torch.equal(*slots)
    assert slots[0] > 0
    model(gaussian(8, SIZE, seed=2))
    assert model.readers.norm.fp8.reader is model.readers.b.fp8.quantizer(model.readers.b, INPUT)


def test_a_reader_in_evaluation_behind_a_norm_in_training():
    model = _block()
    for layer in (model.readers.a, model.readers.b, model.mlp.down_proj):
        layer.eval()
    twin = _plain(copy.deepcopy(model))
    for x in _steps(zeros=False):
        _assert_same(model, twin, x)
    assert not model.readers.a.fp8.scales_known


# What runs.


@pytest.mark.parametrize("mlp", [MLP, JoinedMLP])
def test_one_operator_casts_each_of_them_and_takes_the_amax(mlp):
    model = _block(mlp)
    model(gaussian(32, SIZE).requires_grad_()).sum().backward()
    renew_scales()
    with Calls() as calls:
        model(gaussian(32, SIZE).requires_grad_()).sum().backward()
    count = calls.names.count
    assert count("rms_norm_quantize_once") == 2
    assert count("swiglu_quantize") == 1
    assert count("swiglu_backward_quantize") == (mlp is MLP)
    assert count("gate_up_backward_quantize") == (mlp is JoinedMLP)
    layers = 2 if mlp is MLP else 1
    weights, others = 3 + layers, 3  # the gradients of a, b and down
    assert count("quantize_2d") == 2 * weights + others  # weights are transposed in backward
    assert count("rms_norm_backward") == 2
    assert len(calls.names) == 4 + 2 * weights + others + 2


def test_a_norm_learns_who_reads_it():
    model = _block()
    norm = model.readers.norm
    assert norm.fp8.reader is None
    with Calls() as calls:
        model(gaussian(8, SIZE))
    assert calls.names.count("rms_norm_statistics") == 2
    renew_scales()
    model(gaussian(8, SIZE))
    assert norm.fp8.reader is model.readers.a.fp8.quantizer(model.readers.a, INPUT)
    with Calls() as calls:
        model(gaussian(8, SIZE))
    assert "rms_norm_statistics" not in calls.names


def test_copies_have_scales_and_slots_of_their_own():
    model = _block()
    _assert_same(model, _plain(copy.deepcopy(model)), gaussian(8, SIZE))
    copied = copy.deepcopy(model)
    loaded = through_a_file(model)
    before = torch.stack(scaling_buffers(model.readers.a)[2])
    for x in _steps():
        _assert_same(copied, loaded, x)
    assert torch.equal(torch.stack(scaling_buffers(model.readers.a)[2]), before)
    assert copied.readers.norm.fp8.reader.source.slot is not model.readers.norm.fp8.reader


def test_a_norm_that_is_converted_again_has_met_nobody():
    model = _block()
    model(gaussian(8, SIZE))
    convert_to_float8(model, FP8Config(recipe="delayed", amax_history_len=8))
    assert model.readers.norm.fp8.reader is None


# Checkpointing.


def test_a_forward_that_runs_again_casts_as_it_did():
    """The scale is known beforehand: nothing has to be remembered of the first pass."""
    model = _block()
    model(gaussian(8, SIZE))
    renew_scales()
    model(gaussian(8, SIZE))
    model.context = {}
    with Calls() as calls:
        model(gaussian(8, SIZE).requires_grad_()).sum().backward()
    assert calls.names.count("rms_norm_quantize_once") == 4
