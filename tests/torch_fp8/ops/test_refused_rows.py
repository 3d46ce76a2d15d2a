"""GEMMs that a card refuses because of their number of rows, on a stub of torch's operator."""

import warnings

import pytest
import torch

from tests.internals import E4M3, RECIPES, CastSpec, repeated_forward
from torch_fp8 import FP8Config, convert_to_float8, freeze, rollout
from torch_fp8.ops import refused_rows, scaled_mm
from torch_fp8.ops.quantize import QuantizedTensor, dequantize, quantize

NAMES = {kind: name for name, (kind,) in scaled_mm._SCALING.items()}
REFUSAL = "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmulAlgoGetHeuristic()`"
FEATURES = (192, 80)


class Card:
    """Stands for the operator on a card: it reads operands as `lay_out` lays them out.

    Attributes:
        refuses: function of (M, K), whether the card has no GEMM with these.
        shapes: (M, K) of every call.
    """

    def __init__(self):
        self.refuses, self.shapes, self.error = lambda m, k: False, [], REFUSAL

    def __call__(self, a, b, a_scale, a_kind, _, b_scale, b_kind, __, bias, dtype, ___, fast):
        self.shapes.append(tuple(a.shape))
        if self.refuses(*a.shape):
            raise RuntimeError(self.error)
        a, b = _values(a, *a_scale, *a_kind), _values(b.t(), *b_scale, *b_kind, is_b=True)
        product = a @ b.t()
        return (product if bias is None else product + bias).to(dtype)


def _values(qdata, scale, kind, is_b=False):
    """Dequantize in float64: the order of a sum must not show."""
    name, (rows, cols) = NAMES[kind], qdata.shape
    if name == "rowwise":
        scale = scale.t() if is_b else scale
    if name == "block_1x128":
        assert scale.stride() == (1, rows)
    if name == "block_128x128":
        scale = scale.t()[:, : cols // 128]
    if name == "block_1x32":
        tiles = scale.view(torch.uint8).view(-(-rows // 128), -1, 32, 4, 4).permute(0, 3, 2, 1, 4)
        exponents = tiles.reshape(tiles.shape[0] * 128, -1)[:rows, : -(-cols // 32)]
        scale = torch.exp2(exponents.float() - 127)
    return dequantize(QuantizedTensor(qdata, scale.contiguous(), name)).double()


@pytest.fixture
def card(monkeypatch):
    """A `Card` that runs every GEMM of this process; it has refused nothing yet."""
    card = Card()
    monkeypatch.setattr(torch, "_scaled_mm_v2", card)
    monkeypatch.setattr(scaled_mm, "_emulated", _as_on_a_card)
    monkeypatch.setattr(refused_rows, "padded", {})
    return card


def _as_on_a_card(a, b, *options):
    return scaled_mm.multiply_laid_out(a, scaled_mm.lay_out(b, a.qdata.shape[1]), *options)


def _odd(m, k):
    return bool(m % 128 or k % 128)


def _layer(recipe):
    torch.manual_seed(0)
    layer = torch.nn.Linear(*FEATURES, dtype=torch.bfloat16)
    convert_to_float8(layer, FP8Config(recipe="tensorwise" if recipe == "frozen" else recipe))
    if recipe == "frozen":
        freeze(layer)
    return layer


def _step(layer, run, tokens):
    generator = torch.Generator().manual_seed(tokens)
    x, grad = (
        torch.randn(tokens, features, generator=generator).bfloat16() for features in FEATURES
    )
    layer.zero_grad()
    output = run(x.requires_grad_())
    output.backward(grad)
    return [output.detach(), x.grad, layer.weight.grad]


@pytest.mark.parametrize("recipe", [*RECIPES, "frozen"])
def test_refused_numbers_of_tokens_give_what_others_give(card, recipe):
    layer = _layer(recipe)
    expected = [tensor for m in (1, 16, 99) for tensor in _step(layer, layer, m)]
    card.refuses = _odd
    layer = _layer(recipe)
    with pytest.warns(
        UserWarning, match="FP8: cpu refuses a GEMM of .* It runs padded to M = "
    ) as said:
        found = [tensor for m in (1, 16, 99) for tensor in _step(layer, layer, m)]
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)
    scales = {str(warning.message).partition(" with M")[0] for warning in said}
    assert len(said) == len(scales)


def test_a_refused_call_is_not_tried_again(card):
    layer = _layer("rowwise")
    card.refuses = _odd
    with pytest.warns(UserWarning, match="FP8"):
        _step(layer, layer, 99)
    card.shapes.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _step(layer, layer, 99)
        _step(layer, layer, 97)
    assert len(card.shapes) == 6
    assert not any(_odd(*shape) for shape in card.shapes)


def test_more_rows_are_tried_until_the_card_takes_them(card):
    """As rowwise scales on an H100: 9,216 columns and up to 256 rows are refused."""
    card.refuses = lambda m, k: m <= 256
    spec = CastSpec(E4M3, "rowwise")
    a, b = quantize(torch.randn(127, 128), spec), quantize(torch.randn(32, 128), spec)
    with pytest.warns(UserWarning, match=r"M = 127, K = 128, N = 32\. .* M = 512, K = 128"):
        output = scaled_mm.scaled_matmul(a, b, torch.bfloat16)
    assert [m for m, _ in card.shapes] == [127, 128, 256, 512]
    assert torch.equal(output, scaled_mm.scaled_matmul_reference(a, b, torch.bfloat16))


@pytest.mark.parametrize(
    ("error", "message", "tried"),
    [
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED", "ALLOC_FAILED", [1]),
        (REFUSAL, "refuses a GEMM of tensorwise .* choose another recipe", [1, 128, 256, 512]),
    ],
    ids=["another", "every size"],
)
def test_other_errors_and_refusals_of_every_size_are_raised(card, error, message, tried):
    card.refuses, card.error = lambda m, k: True, error
    a, b = (quantize(torch.randn(m, 128), CastSpec(E4M3, "tensorwise")) for m in (1, 32))
    with pytest.raises(RuntimeError, match=message):
        scaled_mm.scaled_matmul(a, b, torch.bfloat16)
    assert [m for m, _ in card.shapes] == tried
    assert not refused_rows.padded


def test_a_compiled_layer_pads_within_its_operator(card):
    layer = _layer("tensorwise")
    expected = _step(layer, layer, 99)
    card.refuses = _odd
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with pytest.warns(UserWarning, match="FP8"):
        found = _step(layer, compiled, 99)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("recipe", ["rowwise", "frozen"])
def test_a_decoded_token_is_padded(card, recipe, monkeypatch):
    monkeypatch.setattr(repeated_forward, "is_watched", lambda x: False)  # as on CUDA
    layer = _layer(recipe).eval()
    x = torch.randn(1, 1, FEATURES[0]).bfloat16()
    with rollout(layer), torch.no_grad():
        layer(torch.randn(16, FEATURES[0]).bfloat16())
        expected = layer(x)
        card.refuses = _odd
        with pytest.warns(UserWarning, match="FP8"):
            found = layer(x) if recipe == "frozen" else repeated_forward.repeated(layer, x)
    assert found.shape == (1, 1, FEATURES[1])
    assert torch.equal(found, expected)
