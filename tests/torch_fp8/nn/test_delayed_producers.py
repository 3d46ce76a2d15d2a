"""Norms and gated MLPs that cast with delayed scaling: one read, and whose history gets the amax.

The twin of a model here has hooks that make plain tensors of everything that is handed over in FP8:
its layers cast for themselves, each with its own history. Both compute the same, bit for bit.
"""

import copy
import io
import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.torch_fp8.nn.test_gated_mlp import Joined, Pair
from tests.torch_fp8.ops.test_swiglu import CHECKS
from tests.torch_fp8.training_step import Calls, assert_equal, gaussian, train
from torch_fp8 import FP8Config, convert_to_float8
from torch_fp8.kernels.arguments import BackwardInputs, NormInputs, NormWithRstd
from torch_fp8.nn.gated_mlp import Float8GatedMLP
from torch_fp8.nn.rms_norm import Float8RMSNorm
from torch_fp8.nn.scaling_buffers import INPUT
from torch_fp8.ops import gate_up, rms_norm, swiglu, swiglu_backward
from torch_fp8.ops.quantize_delayed import History
from torch_fp8.quantization.formats import E4M3
from torch_fp8.quantization.recipe import make_recipe
from torch_fp8.quantization.scaling import delayed_scale, tensor_amax
from torch_fp8.tensor.lazy_quantized import LazyQuantizedTensor

SPEC = make_recipe("delayed").input
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
    def __init__(self, mlp=Pair):
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


def _block(mlp=Pair, **options):
    torch.manual_seed(0)
    model = Block(mlp).bfloat16()
    convert_to_float8(model, FP8Config(recipe="delayed", amax_history_len=4, **options))
    return model


def _plain(model):
    """Every producer's results and gradients are plain tensors from here on."""

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
    """One step of both: results, gradients, histories and scales."""
    assert_equal(train(twin, x), train(model, x))
    _assert_same_histories(model, twin)
    for m in (model, twin):
        m.zero_grad()


def _assert_same_histories(model, twin):
    buffers = dict(twin.named_buffers())
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


def _steps(*, zeros=True):
    """Inputs: first zeros, which leave a history empty."""
    for seed in range(4):
        yield gaussian(2, 17, SIZE, seed=seed) * (seed if zeros else seed + 1)


# Values and histories.


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("mlp", [Pair, Joined])
def test_results_and_histories_are_those_of_layers_that_cast_for_themselves(mlp, algorithm):
    model = _block(mlp, amax_compute_algo=algorithm)
    twin = _plain(copy.deepcopy(model))
    for x in _steps():
        _assert_same(model, twin, x)
    for x, mode in itertools.product([gaussian(2, 17, SIZE, seed=9)], ("eval", "train")):
        with torch.no_grad():
            assert torch.equal(getattr(model, mode)()(x), getattr(twin, mode)()(x))
        _assert_same_histories(model, twin)
    _assert_same(model, twin, gaussian(2, 17, SIZE, seed=10))


def test_frozen_layers_and_inputs_without_gradients():
    model = _block()
    model.mlp.gate_proj.weight.requires_grad_(False)
    model.mlp.down_proj.weight.requires_grad_(False)
    twin = _plain(copy.deepcopy(model))
    for x in _steps():
        _assert_same(model, twin, x)


@pytest.mark.parametrize("skipped", ["mlp.up_proj", "mlp.down_proj", "readers.a"])
def test_layers_in_high_precision_among_them(skipped):
    torch.manual_seed(0)
    model = Block().bfloat16()
    convert_to_float8(model, FP8Config(recipe="delayed", amax_history_len=4, skip=(skipped,)))
    twin = _plain(copy.deepcopy(model))
    for x in _steps():
        _assert_same(model, twin, x)


def test_who_reads_first_may_change():
    """A norm that cast for another layer casts again."""
    model = _block()
    twin = _plain(copy.deepcopy(model))
    orders = (("a", "b"), ("b",), ("a",), ("b",))
    for order, x in zip(orders, _steps(zeros=False), strict=True):
        model.readers.order = twin.readers.order = order
        _assert_same(model, twin, x)


def test_a_reader_in_evaluation_behind_a_norm_in_training():
    model = _block()
    twin = _plain(copy.deepcopy(model))
    for x in _steps(zeros=False):
        _assert_same(model, twin, x)
        for m in (model, twin):
            for layer in (m.readers.a, m.readers.b, m.mlp.down_proj):
                layer.eval()


def test_what_was_cast_ahead_yields_to_a_scale_that_a_reader_brings():
    """As layers of a tensor-parallel group do, which agree on one."""
    model, scale, made = _block(), torch.tensor(0.25), []

    def read(activation):
        assert isinstance(activation, LazyQuantizedTensor)
        made.append(activation.production.layouts(SPEC, scale, rowwise=True, columnwise=True))

    model(gaussian(8, SIZE))
    model.mlp.down_proj.register_forward_pre_hook(lambda m, args: read(args[0]))
    model.readers.norm.register_forward_hook(lambda m, args, y: read(y))
    model(gaussian(8, SIZE))
    assert [payload.scale for layouts in made for payload in layouts] == [scale] * 4


# What runs.


@pytest.mark.parametrize("mlp", [Pair, Joined])
def test_one_operator_casts_each_of_them_and_takes_the_amax(mlp):
    model = _block(mlp)
    model(gaussian(32, SIZE).requires_grad_()).sum().backward()
    with Calls() as calls:
        model(gaussian(32, SIZE).requires_grad_()).sum().backward()
    count = calls.names.count
    assert count("rms_norm_quantize_delayed") == 2
    assert count("swiglu_quantize_delayed") == 1
    assert count("swiglu_backward_quantize_delayed") == (mlp is Pair)
    assert count("gate_up_backward_quantize_delayed") == (mlp is Joined)
    layers = 2 if mlp is Pair else 1
    inputs, gradients = 2 + layers + 1, layers
    assert count("advance_history") == inputs + gradients
    weights, others = 3 + layers, 3  # the gradients of a, b and down
    assert count("quantize_2d_delayed") == weights + others
    assert count("quantize_2d") == weights  # transposed
    assert count("rms_norm_backward") == 2
    assert len(calls.names) == 4 + count("advance_history") + 2 * weights + others + 2


def test_a_norm_learns_who_reads_it():
    model = _block()
    norm = model.readers.norm
    assert norm.fp8_reader is None
    with Calls() as calls:
        model(gaussian(8, SIZE))
    assert calls.names.count("rms_norm_statistics") == 2
    assert norm.fp8_reader.history.is_same(model.readers.a.quantizer(INPUT).history)
    with Calls() as calls:
        model(gaussian(8, SIZE))
    assert "rms_norm_statistics" not in calls.names


def test_copies_have_readers_of_their_own():
    model = _block()
    model(gaussian(8, SIZE))
    copied = copy.deepcopy(model)
    history = copied.readers.norm.fp8_reader.history
    assert history.is_same(copied.readers.a.quantizer(INPUT).history)
    assert not history.is_same(model.readers.a.quantizer(INPUT).history)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for x in _steps():
        _assert_same(copied, loaded, x)


def test_a_norm_that_is_converted_again_has_met_nobody():
    model = _block()
    model(gaussian(8, SIZE))
    convert_to_float8(model, FP8Config(recipe="delayed", amax_history_len=8))
    assert model.readers.norm.fp8_reader is None


# Checkpointing.


def test_a_checkpointed_block_has_the_same_gradients_and_histories():
    """The first forward of a norm is that of a first pass; by the second it has met its reader."""
    model = _block()
    twin = _plain(copy.deepcopy(model))
    model.context = {}
    for x in _steps():
        _assert_same(model, twin, x)


def test_a_forward_that_runs_again_casts_once_with_the_scale_that_it_had():
    model = _block()
    model(gaussian(8, SIZE))
    model.context = {}
    with Calls() as calls:
        model(gaussian(8, SIZE).requires_grad_()).sum().backward()
    norms, again = "rms_norm_quantize_delayed", "rms_norm_quantize"
    assert calls.names.count(norms) == calls.names.count(again) == 2


def test_two_forwards_before_their_backwards():
    """The second one's norms know their readers, the first one's did not."""
    model = _block()
    twin = copy.deepcopy(model)
    model.context = {}
    inputs = [gaussian(2, 17, SIZE, seed=s) for s in range(2)]
    found = []
    for m in (model, twin):
        xs = [x.clone().requires_grad_() for x in inputs]
        outputs = [m(x) for x in xs]
        for y in outputs:
            y.float().square().sum().backward()
        found.append([x.grad for x in xs] + [p.grad for p in m.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    _assert_same_histories(model, twin)


# Operators.

LAYOUTS = ((True, True), (True, False), (False, True))


def _history(filled, length=3):
    amaxes = torch.tensor([0.5, 3.0, 1.0])[:length] if filled else torch.zeros(length)
    return History(amaxes, torch.zeros(2))


def _casts(filled, algorithm="max", margin=0):
    config = FP8Config(recipe="delayed", amax_compute_algo=algorithm, margin=margin)
    for row, col in LAYOUTS:
        yield _history(filled).options(SPEC, config, rowwise=row, columnwise=col)


def _check(made, y, how):
    """``(q, scale, qt, amax)`` of y against the rules of delayed scaling."""
    q, scale, qt, amax = made
    assert amax == tensor_amax(y)
    assert scale == delayed_scale(how.amaxes, amax, E4M3, how.algorithm, how.margin)
    ops = torch.ops.torch_fp8
    want, _, want_t, _ = ops.quantize_2d(y, *how.with_scale(scale))
    assert torch.equal(q.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(qt.view(torch.uint8), want_t.view(torch.uint8))


@pytest.mark.parametrize("filled", [True, False])
@pytest.mark.parametrize(("algorithm", "margin"), [("max", 0), ("most_recent", 2)])
@pytest.mark.parametrize("shape", [(48, 160), (3, 5), (0, 16)], ids=str)
def test_values_are_those_of_the_result_and_the_rules(shape, algorithm, margin, filled):
    x, up, grad = (gaussian(*shape, seed=s) for s in range(3))
    weight = gaussian(shape[1], seed=3)
    for how in _casts(filled, algorithm, margin):
        q, s, qt, _, rstd, *_, amax = rms_norm.rms_norm_quantize_once(
            NormInputs(x, weight, 1e-5, 1.0, x.dtype), how, True
        )
        _check(
            (q, s, qt, amax), rms_norm.rms_norm(NormWithRstd(x, weight, rstd, 1.0, x.dtype)), how
        )
        *made, amax = swiglu.swiglu_quantize(x, up, None, how, True)
        _check((*made[:3], amax), swiglu.swiglu(x, up, None), how)
        inputs = BackwardInputs(grad, *made[4:], None, x.dtype)
        other = how._replace(amaxes=torch.full((3,), 7.0), progress=how.progress.clone())
        gradients = swiglu_backward.swiglu_backward(inputs)
        made = swiglu_backward.swiglu_backward_quantize(inputs, how, *other[:2])
        for i, (d, its) in enumerate(zip(gradients, (how, other), strict=True)):
            _check((*made[4 * i : 4 * i + 3], made[8][i]), d, its)
        both = gate_up.gate_up_backward(inputs, False)
        q, s, qt, _, amax = gate_up.gate_up_backward_quantize(inputs, False, how)
        _check((q, s, qt, amax), both, how)
        assert torch.equal(how.amaxes, _history(filled).amaxes)


@pytest.mark.parametrize("save", [True, False])
def test_operators_are_well_formed(save):
    library, check = torch.ops.torch_fp8, torch.library.opcheck
    x, up, grad = (gaussian(20, 140, seed=s) for s in range(3))
    saved = swiglu.swiglu_save(x, up, None)[:4] if save else (x, None, up, None)
    for how in _casts(True):
        check(library.rms_norm_quantize_delayed.default, (x, x[0], 1e-5, 0.0, x.dtype, *how, save))
        check(library.swiglu_quantize_delayed.default, (x, up, None, *how, save))
        inputs = (grad, *saved, None, x.dtype)
        other = _history(False)
        of_both = (*inputs, *how, other.amaxes, other.progress)
        operator, joined = (
            library.swiglu_backward_quantize_delayed.default,
            library.gate_up_backward_quantize_delayed.default,
        )
        check(operator, of_both, test_utils=CHECKS[save])
        check(joined, (*inputs, True, *how), test_utils=CHECKS[save])
