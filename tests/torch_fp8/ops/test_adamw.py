"""The reference step: torch's Adam and AdamW, off by a rounding of what is stored and no more."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.internals import (
    GRADIENT,
    MOMENT1,
    MOMENT2,
    BlockScaled,
    GradientParts,
    StepScalars,
    WeightMatrix,
    decode,
    encode,
    join,
    num_groups,
    split,
    stream_state,
)
from torch_fp8.ops import adamw
from torch_fp8.ops.adamw import adamw_step_reference, update_rms_reference

STEPS = 25
OPTIONS = {
    "adamw": {},
    "decay": {"lr": 0.05, "weight_decay": 0.3},
    "coupled_decay": {"adam": True, "weight_decay": 0.1},
    "maximize": {"maximize": True, "weight_decay": 0.1},
    "coupled_maximize": {"adam": True, "maximize": True, "weight_decay": 0.1},
    "betas": {"betas": (0.5, 0.9), "eps": 1e-3},
    "slow_betas": {"betas": (0.95, 0.9999), "eps": 1e-15},
    "fast_betas": {"betas": (0.1, 0.99)},
}
EVERY_OPTION = pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
EVERY_LENGTH = pytest.mark.parametrize("bits", [None, 8, 0], ids=lambda b: f"residual={b}")


def _scalars(
    step,
    lr=1e-3,
    betas=(0.9, 0.999),
    eps=1e-8,
    weight_decay=0.0,
    maximize=False,
    adam=False,
    seed=0,
    parameter=0,
):
    beta1, beta2 = betas
    return StepScalars(
        beta1_complement=1 - beta1,
        beta2=beta2,
        beta2_complement=1 - beta2,
        step_size=lr / (1 - beta1**step),
        inv_sqrt_correction=(1 - beta2**step) ** -0.5,
        eps=eps,
        decay=1.0 if adam else 1 - lr * weight_decay,
        weight_decay=weight_decay if adam else 0.0,
        maximize=maximize,
        stream=stream_state(seed, step, parameter),
    )


def _zeros(rows, cols):
    scale = torch.full((rows, num_groups(cols)), 127, dtype=torch.uint8)
    return BlockScaled(torch.zeros(rows, cols, dtype=torch.uint8), scale)


def _matrix(rows, cols, bits, start=None):
    """A fresh parameter; bits None is a float32 weight."""
    if start is None:
        start = torch.randn(rows, cols) * torch.exp(3 * torch.randn(rows, cols))
    moments = _zeros(rows, cols), _zeros(rows, cols)
    if bits is None:
        return WeightMatrix(start, None, start, *moments, 0, 0, cols)
    weight, residual = split(start, bits)
    stored = None if residual is None else residual.to(torch.int8)
    return WeightMatrix(weight, stored, weight, *moments, 0, 0, cols)


def _merged(matrix):
    if matrix.weight.dtype == torch.float32:
        return matrix.weight.clone()
    return join(matrix.weight, matrix.residual, 0 if matrix.residual is None else 8)


def _tensors(matrix):
    tensors = [matrix.weight, *matrix.exp_avg, *matrix.exp_avg_sq]
    return tensors if matrix.residual is None else [*tensors, matrix.residual]


def _clone(matrix):
    def copy(value):
        if isinstance(value, BlockScaled):
            return BlockScaled(*(t.clone() for t in value))
        return value.clone() if isinstance(value, torch.Tensor) else value

    return WeightMatrix(*(copy(value) for value in matrix))


def _equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(_tensors(a), _tensors(b), strict=True))


def _gradient(rows, cols, step=0, dtype=torch.bfloat16):
    """Columns of very different scale, zeros among them, and changing over the steps."""
    generator = torch.Generator().manual_seed(step)
    scale = torch.exp(4 * torch.randn(cols, generator=generator.manual_seed(99)))
    grad = torch.randn(rows, cols, generator=generator.manual_seed(step)) * scale
    grad[:, ::7] *= step % 2
    return grad.to(dtype)


def _quantized(grad):
    codes = encode(grad.float() * 4, GRADIENT)
    return GradientParts(*codes, torch.tensor(0.25))


def _value(grad):
    if isinstance(grad, GradientParts):
        return decode(BlockScaled(grad.qdata, grad.scale), GRADIENT) * grad.multiplier
    return grad.float()


def _spacing(x, scale, format):
    """Of the format's values around |x|, by the scale's exponent; float64."""
    factor = torch.exp2(scale.double() - 127).repeat_interleave(32, 1)[:, : x.shape[1]]
    exponent = torch.frexp(x.double().abs() / factor).exponent - 1
    return torch.exp2(exponent.clamp(min=1 - format.bias).double() - format.mantissa_bits) * factor


def _torch_step(matrix, weight, grad, step, options):
    """(weight, exp_avg, exp_avg_sq) by torch's optimizer from the state that is stored here."""
    options = {"lr": 1e-3, "weight_decay": 0.0, **options}
    optimizer_class = torch.optim.Adam if options.pop("adam", False) else torch.optim.AdamW
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = optimizer_class([parameter], foreach=False, **options)
    optimizer.state[parameter] = {
        "step": torch.tensor(float(step - 1)),
        "exp_avg": decode(matrix.exp_avg, MOMENT1),
        "exp_avg_sq": decode(matrix.exp_avg_sq, MOMENT2),
    }
    parameter.grad = _value(grad)
    optimizer.step()
    state = optimizer.state[parameter]
    return parameter.detach(), state["exp_avg"], state["exp_avg_sq"]


@EVERY_OPTION
@pytest.mark.parametrize(
    ("bits", "kind"),
    [(None, "float32"), (8, "bfloat16"), (8, "quantized"), (4, "quantized"), (0, "bfloat16")],
    ids=str,
)
def test_each_step_is_torchs_within_the_formats_spacing(options, bits, kind):
    """From the same state and gradient every deviation is below one spacing, and even in the mean.

    Beyond that a few ulps of float32 are torch's, whose operations come in another order.
    """
    matrix = _matrix(24, 70, bits)
    deviations = []
    for step in range(1, STEPS + 1):
        grad = _gradient(24, 70, step, torch.float32 if kind == "float32" else torch.bfloat16)
        grad = _quantized(grad) if kind == "quantized" else grad
        before = _merged(matrix)
        weight, exp_avg, exp_avg_sq = _torch_step(matrix, before, grad, step, options)
        adamw_step_reference(matrix._replace(grad=grad), _scalars(step, **options))

        first, second = (exp_avg, matrix.exp_avg), (exp_avg_sq, matrix.exp_avg_sq)
        for (exact, stored), format in ((first, MOMENT1), (second, MOMENT2)):
            spacing = _spacing(exact, stored.scale, format)
            deviation = (decode(stored, format).double() - exact.double()) / spacing
            assert deviation.abs().max() <= 1.0001
            positive = (
                exact.double()
                > format.smallest
                * torch.exp2(stored.scale.double() - 127).repeat_interleave(32, 1)[
                    :, : exact.shape[1]
                ]
            )
            deviations.append((format, deviation[positive]))

        now = _merged(matrix)
        # m may cancel: its error is one of its larger operand, at most 32 sqrt(v).
        slack = torch.finfo(torch.float32).eps * (4 * before.abs() + 64 * options.get("lr", 1e-3))
        if bits is not None:  # the integers of the floats differ by less than 2^(16 - k)
            spacing = torch.exp2(torch.frexp(weight).exponent.float() - 24 + 16 - bits)
            slack = slack + spacing
        assert ((now - weight).abs() <= slack).all()

    for format in (MOMENT1, MOMENT2):
        deviation = torch.cat([d for f, d in deviations if f is format])
        assert (deviation.abs() > 0.5).float().mean() > 0.01  # it is not rounding to nearest
        assert deviation.mean().abs() < 5 * deviation.std() / deviation.numel() ** 0.5


@EVERY_LENGTH
def test_two_runs_are_equal_bit_for_bit_and_other_streams_are_not(bits):
    def run(**stream):
        torch.manual_seed(0)
        matrix = _matrix(16, 96, bits)
        for step in range(1, 6):
            grad = _gradient(16, 96, step)
            adamw_step_reference(matrix._replace(grad=grad), _scalars(step, **stream))
        return matrix

    first = run()
    assert _equal(first, run())
    for other in (run(seed=1), run(parameter=1)):
        assert not torch.equal(first.exp_avg.qdata, other.exp_avg.qdata)
        assert not torch.equal(first.exp_avg_sq.qdata, other.exp_avg_sq.qdata)
        assert bits is None or not torch.equal(_merged(first), _merged(other))


@EVERY_LENGTH
@pytest.mark.parametrize("shape", [(7, 200), (30, 33), (1, 1000), (70, 1)], ids=str)
@pytest.mark.parametrize("chunk", [32, 96, 1024])
def test_parts_give_the_bits_of_the_whole(monkeypatch, bits, shape, chunk):
    for kind in (torch.bfloat16, torch.float32, "quantized"):
        grad = _gradient(*shape, 1)
        grad = _quantized(grad) if kind == "quantized" else grad.to(kind)
        whole = _matrix(*shape, bits)
        parts = _clone(whole)
        adamw_step_reference(whole._replace(grad=grad), _scalars(1))
        with monkeypatch.context() as context:
            context.setattr(adamw, "_CHUNK", chunk)
            adamw_step_reference(parts._replace(grad=grad), _scalars(1))
        assert _equal(whole, parts)


class _Allocations(TorchDispatchMode):
    def __init__(self, known):
        super().__init__()
        self._known = {t.untyped_storage().data_ptr() for t in known}
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._known:
                    self.largest = max(self.largest, storage.nbytes())
        return result


@EVERY_LENGTH
@pytest.mark.parametrize("shape", [(256, 512), (32, 4096), (512, 20)], ids=str)
@pytest.mark.parametrize("step_of", [adamw_step_reference, update_rms_reference])
def test_no_temporary_has_a_tensors_size(monkeypatch, bits, shape, step_of):
    """The largest is of 8 bytes for each element of a part; short rows are padded to groups."""
    chunk = 4096
    monkeypatch.setattr(adamw, "_CHUNK", chunk)
    matrix = _matrix(*shape, bits)
    grad = _quantized(_gradient(*shape))
    matrix = matrix._replace(grad=grad)
    with _Allocations([*_tensors(matrix), *grad]) as allocations:
        step_of(matrix, _scalars(1))
    padding = max(1, 32 / shape[1])
    assert 0 < allocations.largest <= 8 * chunk * padding


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@EVERY_LENGTH
def test_a_gradient_that_is_not_finite_shows(bits, bad):
    matrix, grad = _matrix(4, 100, bits), _gradient(4, 100, 1, torch.float32)
    grad[1, 40] = bad
    adamw_step_reference(matrix._replace(grad=grad), _scalars(1))
    element = torch.zeros(4, 100, dtype=torch.bool)
    element[1, 40] = True
    group = torch.zeros(4, 100, dtype=torch.bool)
    group[1, 32:64] = True
    assert torch.equal(_merged(matrix).isnan(), element)
    assert torch.equal(matrix.weight.isnan(), element)
    assert torch.equal(decode(matrix.exp_avg, MOMENT1).isnan(), group)
    assert torch.equal(decode(matrix.exp_avg_sq, MOMENT2).isnan(), group)


@pytest.mark.parametrize("bits", [8, 0])
def test_the_three_roundings_are_unrelated(bits):
    """One word decides for the weight, m and v: their errors must not go together.

    A constant gradient, so that m, v and the weight have the same fraction everywhere.
    """
    matrix = _matrix(256, 512, bits, start=torch.ones(256, 512))
    grad = torch.full((256, 512), 0.777)
    lr = 0.7e-6 * 2 ** (8 - bits)
    adamw_step_reference(matrix._replace(grad=grad), _scalars(1, lr=lr))
    values = _merged(matrix), decode(matrix.exp_avg, MOMENT1), decode(matrix.exp_avg_sq, MOMENT2)
    flat = torch.stack([v.double().flatten() for v in values])
    assert (flat.std(1) > 0).all()
    correlation = torch.corrcoef(flat) - torch.eye(3)
    assert correlation.abs().max() < 5 / grad.numel() ** 0.5


@pytest.mark.parametrize("bits", [8, 4, 0])
def test_an_update_below_the_spacing_arrives_in_the_mean(bits):
    """Steps of 1e-5 on weights of 1: below 1 BF16's spacing is 390 times, with 8 bits 1.5 times."""
    rows, cols = 64, 512
    matrix = _matrix(rows, cols, bits, start=torch.ones(rows, cols))
    for step in range(1, 41):
        grad = torch.full((rows, cols), 0.5)
        adamw_step_reference(matrix._replace(grad=grad), _scalars(step, lr=1e-5))
    moved = (1 - _merged(matrix).double()).mean()
    noise = (2.0**-8 * 2.0**-bits * 40 * 1e-5 / (rows * cols)) ** 0.5  # spacing x path, sqrt
    assert moved == pytest.approx(40 * 1e-5, abs=5 * noise + 0.002 * 40 * 1e-5)


@EVERY_LENGTH
def test_a_factor_of_the_learning_rate_is_that(bits):
    """Half of it, without decay, gives the bits of half the rate; the moments do not notice."""
    matrix, grad = _matrix(8, 70, bits), _gradient(8, 70, 1)
    halved, slower = _clone(matrix), _clone(matrix)
    adamw_step_reference(halved._replace(grad=grad), _scalars(1, lr=0.25), torch.tensor(0.5))
    adamw_step_reference(slower._replace(grad=grad), _scalars(1, lr=0.125))
    assert _equal(halved, slower)
    assert not torch.equal(_merged(halved), _merged(matrix))


def test_a_factor_of_the_learning_rate_holds_for_the_decay():
    matrix, scalars = _matrix(8, 70, None), _scalars(1, lr=0.25, weight_decay=0.1)
    expected = matrix.weight * (1 - 0.5 * 0.25 * 0.1)
    adamw_step_reference(matrix._replace(grad=torch.zeros(8, 70)), scalars, torch.tensor(0.5))
    assert torch.allclose(matrix.weight, expected, rtol=3e-7, atol=0)


def test_an_empty_matrix_is_left_alone():
    for shape in ((0, 64), (5, 0)):
        matrix = _matrix(*shape, 8)
        adamw_step_reference(matrix._replace(grad=torch.zeros(shape)), _scalars(1))
        assert update_rms_reference(matrix._replace(grad=torch.zeros(shape)), _scalars(1)) == 0


@pytest.mark.parametrize("options", [{}, {"adam": True, "weight_decay": 0.1, "maximize": True}])
@pytest.mark.parametrize("bits", [None, 8, 0])
def test_update_rms_is_stable_adamws(monkeypatch, options, bits):
    """sqrt(mean(g^2 / max(v_hat, eps^2))), arXiv 2304.13013, of the v that the step will have."""
    monkeypatch.setattr(adamw, "_CHUNK", 256)
    matrix = _matrix(20, 100, bits, start=torch.randn(20, 100))
    for step in range(1, 4):
        matrix = matrix._replace(grad=_gradient(20, 100, step, torch.float32))
        adamw_step_reference(matrix, _scalars(step))
    grad = 5 * _gradient(20, 100, 4, torch.float32)
    grad[:, :8] = 0.0
    scalars = _scalars(4, eps=0.1, **options)
    before = _clone(matrix)
    rms = update_rms_reference(matrix._replace(grad=grad), scalars)
    assert _equal(matrix, before)
    g = grad.double() * (-1 if scalars.maximize else 1)
    g = g + scalars.weight_decay * _merged(matrix).double()
    v = decode(matrix.exp_avg_sq, MOMENT2).double() * 0.999 + 0.001 * g**2
    expected = (g**2 / (v / (1 - 0.999**4)).clamp(min=0.01)).mean().sqrt()
    assert float(rms) == pytest.approx(float(expected), rel=1e-5)
    assert rms.dtype == torch.float32
