"""Checks of each recipe on this device: its three GEMMs against float32, and its speed.

GEMMs run eager and compiled, with few tokens, and with a frozen weight.

The floors are those of Gaussian data (benchmarks/results/numerics.csv), 28.5 dB for E4M3 with E4M3
and 24.6 dB for E5M2 with E4M3, minus half a dB. An operand in the wrong format is below them. The
worst of a few hundred rows is within 2.5 dB of the whole.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torch_fp8.config import FP8Config
from torch_fp8.conversion.convert import convert_to_float8
from torch_fp8.conversion.freeze import freeze
from torch_fp8.conversion.layer_benchmark import Card, LayerShape, layer_times
from torch_fp8.environment.check import run_parts
from torch_fp8.environment.result import NotRun
from torch_fp8.nn.linear import Float8Linear
from torch_fp8.ops import refused_rows
from torch_fp8.ops.hardware import reason_not_native
from torch_fp8.quantization.formats import E4M3, MIN_CAPABILITY
from torch_fp8.quantization.metrics import sqnr_db, worst_row_sqnr_db
from torch_fp8.quantization.recipe import GEMMS, Gemm, make_recipe

E4M3_FLOOR_DB, E5M2_FLOOR_DB = 28.0, 24.0
ROW_ALLOWANCE_DB = 2.5
FEATURES_IN, FEATURES_OUT = 256, 384
TOKENS = (256, 99)
"""Numbers of tokens: a multiple of 16, and another one, which needs padding."""
FEW_TOKENS = (99, 16, 1)
LARGE = (4096, 4096)
"""The features of the layers checked with few tokens, because a GPU refuses GEMMs by their size."""
EXACT_DB = 12.0
"""The dB over a floor that no FP8 product reaches: two bits of mantissa."""
TIMED_TOKENS, TIMED_FEATURES = 8192, 4096


def floor_db(gemm: Gemm) -> float:
    """Return the minimum SQNR in dB of a GEMM of Gaussian operands."""
    is_e4m3 = gemm.a.format == gemm.b.format == E4M3
    return E4M3_FLOOR_DB if is_e4m3 else E5M2_FLOOR_DB


def device_at_hand() -> torch.device:
    """Return the first GPU, or the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def check_recipe(recipe: str) -> str:
    """Check a recipe in all ways: eager, compiled, and with few tokens."""
    return run_parts(
        {
            "eager": lambda: check_gemms(recipe),
            "compiled": lambda: check_compiled(recipe),
            "few tokens": lambda: check_few_tokens(recipe),
        }
    )


def check_gemms(recipe: str) -> str:
    """Check the output and both gradients of an eager layer, and return their SQNRs."""
    layer, path = _layer(recipe)
    return f"{_measured(layer, layer, recipe)}, {path}"


def check_compiled(recipe: str) -> str:
    """Check the compiled layer in the same way; it must be one graph per shape without a break."""
    layer, path = _layer(recipe)
    torch.compiler.reset()
    # On a CPU the traced graph runs eagerly: compiling it would take minutes and show no more.
    backend = _Counting("aot_eager" if layer.weight.device.type == "cpu" else "inductor")
    compiled = torch.compile(layer, backend=backend, dynamic=False, fullgraph=True)
    measured = _measured(layer, compiled, recipe)
    counts = f"{backend.graphs} graphs for {len(TOKENS)} shapes, 0 breaks"
    if backend.graphs != len(TOKENS):
        raise RuntimeError(f"{counts}, instead of one graph for each")
    return f"{measured}, {counts} ({backend.name}), {path}"


def check_few_tokens(recipe: str) -> str:
    """Check the output and gradients of a large layer with few tokens, and with a single token."""
    layer, path = _layer(recipe, large=True)
    return f"{_few_tokens(layer, recipe)}, {path}"


def check_frozen() -> str:
    """Check a layer with a weight stored only in FP8, like the base of adapters."""
    layer, path = _layer("tensorwise", large=True)
    weight = layer.weight.detach().clone()
    recipe = freeze(layer).recipe
    assert recipe is not None
    return f"{_few_tokens(layer, recipe.name, weight)}, {recipe.name}, {path}"


def _few_tokens(layer: Float8Linear, recipe: str, frozen: Tensor | None = None) -> str:
    """Compare each GEMM with a row's floor: one token is one row, or scaled copies of it."""
    floors = {
        name: floor_db(gemm) - ROW_ALLOWANCE_DB
        for name, gemm in zip(GEMMS, make_recipe(recipe).gemms, strict=True)
    }
    decibels = []
    for tokens in FEW_TOKENS:
        for name, (got, want) in _results(layer, layer, tokens, frozen).items():
            decibels.append((name, tokens, sqnr_db(want, got)))
    layer.eval()
    prompt, token = (_gaussian(layer, n, layer.in_features) for n in FEW_TOKENS[::2])
    with torch.no_grad():
        layer(prompt)
        output = layer(token)
    cache = layer.fp8.payloads
    repeated = " (repeated)" if cache.operand is not None else ""
    weight = layer.weight.detach() if frozen is None else frozen
    decibels.append(("fprop", 1, sqnr_db(token.double() @ weight.double().t(), output)))
    for name, tokens, sqnr in decibels:
        if not sqnr >= floors[name]:  # NaN is not
            wanted = f"{floors[name]:.1f} dB"
            raise RuntimeError(
                f"{name} of {tokens} tokens has {sqnr:.1f} dB, its floor is {wanted}"
            )
    least = min(decibels, key=lambda gemm: gemm[2] - floors[gemm[0]])
    sizes = len(refused_rows.padded)
    padded = f", refused sizes of GEMMs that run padded: {sizes}" if sizes else ""
    return (
        f"{', '.join(map(str, FEW_TOKENS))} tokens and one decoded{repeated}, the worst: "
        f"{least[0]} of {least[1]} {least[2]:.1f} dB{padded}"
    )


def time_recipe(recipe: str) -> str:
    """Time forward and backward of a large layer, including casts, against BF16."""
    device = device_at_hand()
    reason = _reason(device, recipe)
    if reason is not None:
        raise NotRun(reason)
    shape = LayerShape(TIMED_FEATURES, TIMED_FEATURES, False, torch.bfloat16)
    times = layer_times(Card.of(device), shape, TIMED_TOKENS, (make_recipe(recipe),))
    fp8 = times.fp8[recipe]
    return (
        f"{times.plain / fp8:.2f} times the speed of BF16: {fp8 * 1e3:.3f} ms, BF16 "
        f"{times.plain * 1e3:.3f} ms, one layer of {shape}, {TIMED_TOKENS} tokens, forward and "
        "backward with all casts"
    )


class _Counting:
    """A backend of torch.compile that counts its graphs."""

    def __init__(self, name: str) -> None:
        self.name, self.graphs = name, 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.graphs += 1
        return torch._dynamo.lookup_backend(self.name)(graph, inputs)


def _layer(recipe: str, large: bool = False) -> tuple[Float8Linear, str]:
    """Return a converted layer, and a description of how its GEMMs run."""
    device = device_at_hand()
    reason = "the CPU has no tensor cores" if device.type == "cpu" else _reason(device, recipe)
    torch.manual_seed(0)
    features = LARGE if large and device.type == "cuda" else (FEATURES_IN, FEATURES_OUT)
    layer = nn.Linear(*features, bias=False).to(device, torch.bfloat16)
    nn.init.normal_(layer.weight)
    convert_to_float8(layer, FP8Config(recipe=recipe, emulate=reason is not None))
    assert isinstance(layer, Float8Linear)
    return layer, "native" if reason is None else "emulated"


def _reason(device: torch.device, recipe: str) -> str | None:
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return "this card has no FP8 tensor cores"
    return reason_not_native(device, recipe)


def _measured(layer: nn.Linear, run: Callable[[Tensor], Tensor], recipe: str) -> str:
    """Return the lowest SQNR of each GEMM over all shapes; raise if one is below its floor."""
    gemms = make_recipe(recipe).gemms
    least = {name: (float("inf"), float("inf")) for name in GEMMS}
    for tokens in TOKENS:
        for name, (got, want) in _results(layer, run, tokens).items():
            if not bool(got.isfinite().all()):
                raise RuntimeError(f"{name} with {tokens} tokens is not finite")
            all_, row = least[name]
            least[name] = (
                min(all_, sqnr_db(want, got)),
                min(row, worst_row_sqnr_db(want, got)),
            )
    text = ", ".join(f"{name} {all_:.1f} dB (row {row:.1f})" for name, (all_, row) in least.items())
    for name, gemm in zip(GEMMS, gemms, strict=True):
        floor, (all_, row) = floor_db(gemm), least[name]
        if all_ < floor or row < floor - ROW_ALLOWANCE_DB:
            wanted = f"{floor:.1f} dB (row {floor - ROW_ALLOWANCE_DB:.1f})"
            raise RuntimeError(f"{name} is below its floor of {wanted}: {text}")
        if all_ > floor + EXACT_DB:
            raise RuntimeError(f"{name} is more exact than FP8, so it ran without: {text}")
    return text


def _results(
    layer: nn.Linear,
    run: Callable[[Tensor], Tensor],
    tokens: int,
    frozen: Tensor | None = None,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return (computed, exact) of output, input gradient and, unless frozen, weight gradient."""
    weight = layer.weight.detach() if frozen is None else frozen
    x, grad = (_gaussian(layer, tokens, features) for features in reversed(weight.shape))
    leaf = x.clone().requires_grad_()
    layer.weight.grad = None
    output = run(leaf)
    output.backward(grad)
    assert leaf.grad is not None
    w, x, grad = weight.double(), x.double(), grad.double()
    pairs = {"fprop": (output.detach(), x @ w.t()), "dgrad": (leaf.grad, grad @ w)}
    if frozen is None:
        assert layer.weight.grad is not None
        pairs["wgrad"] = layer.weight.grad, grad.t() @ x
    return pairs


def _gaussian(layer: nn.Linear, tokens: int, features: int) -> Tensor:
    generator = torch.Generator().manual_seed(tokens + features)
    x = torch.randn(tokens, features, generator=generator)
    return x.to(layer.weight.device, torch.bfloat16)
