"""Checks of each recipe on this device: its three GEMMs against float32, eager and compiled; its
speed.

The floors are those of Gaussian data, 28.5 dB where E4M3 meets E4M3 and 24.6 dB where E5M2 does,
less half a dB: an operand in the wrong format lies below. The worst of a few hundred rows lies
within 2.5 dB of the whole.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torch_fp8.config import FP8Config
from torch_fp8.conversion.convert import convert_to_float8
from torch_fp8.conversion.layer_benchmark import Card, LayerShape, layer_times
from torch_fp8.environment.result import NotRun
from torch_fp8.ops.scaled_mm import reason_not_native
from torch_fp8.quantization.formats import E4M3, MIN_CAPABILITY
from torch_fp8.quantization.metrics import sqnr_db, worst_row_sqnr_db
from torch_fp8.quantization.recipe import GEMMS, Gemm, make_recipe

E4M3_FLOOR_DB, E5M2_FLOOR_DB = 28.0, 24.0
ROW_ALLOWANCE_DB = 2.5
FEATURES_IN, FEATURES_OUT = 256, 384
TOKENS = (256, 99)
"""Numbers of tokens: a multiple of 16, and one that is none, so that padding is seen, too."""
TIMED_TOKENS, TIMED_FEATURES = 8192, 4096


def floor_db(gemm: Gemm) -> float:
    """Return the least SQNR in dB of a GEMM of Gaussian operands."""
    is_e4m3 = gemm.a.format == gemm.b.format == E4M3
    return E4M3_FLOOR_DB if is_e4m3 else E5M2_FLOOR_DB


def device_at_hand() -> torch.device:
    """Return the first card, or the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def check_gemms(recipe: str) -> str:
    """Check output and both gradients of an eager layer, and return their SQNRs."""
    layer, how = _layer(recipe)
    return f"{_measured(layer, layer, recipe)}, {how}"


def check_compiled(recipe: str) -> str:
    """Check the compiled layer likewise, which must be one graph for each shape without a break."""
    layer, how = _layer(recipe)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    # On a CPU the graph is run as it is traced: compiling it would take minutes and show no more.
    backend = _Counting("aot_eager" if layer.weight.device.type == "cpu" else "inductor")
    compiled = torch.compile(layer, backend=backend, dynamic=False)
    measured = _measured(layer, compiled, recipe)
    breaks = sum(counters["graph_break"].values())
    found = f"{backend.graphs} graphs for {len(TOKENS)} shapes, {breaks} breaks"
    if breaks:
        reasons = [reason.partition("\n")[0] for reason in counters["graph_break"]]
        raise RuntimeError(f"{found}: {'; '.join(reasons)}")
    if backend.graphs != len(TOKENS):
        raise RuntimeError(f"{found}, instead of one graph for each")
    return f"{measured}, {found} ({backend.name}), {how}"


def time_recipe(recipe: str) -> str:
    """Time forward and backward of a large layer, casts included, beside BF16."""
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
    """A backend of torch.compile that counts the graphs it is given."""

    def __init__(self, name: str) -> None:
        self.name, self.graphs = name, 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.graphs += 1
        return torch._dynamo.lookup_backend(self.name)(graph, inputs)


def _layer(recipe: str) -> tuple[nn.Linear, str]:
    """Return a converted layer, and in words how its GEMMs run."""
    device = device_at_hand()
    reason = "the CPU has no tensor cores" if device.type == "cpu" else _reason(device, recipe)
    torch.manual_seed(0)
    layer = nn.Linear(FEATURES_IN, FEATURES_OUT, bias=False).to(device, torch.bfloat16)
    nn.init.normal_(layer.weight)
    convert_to_float8(layer, FP8Config(recipe=recipe, emulate=reason is not None))
    return layer, "native" if reason is None else "emulated"


def _reason(device: torch.device, recipe: str) -> str | None:
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return "this card has no FP8 tensor cores"
    return reason_not_native(device, recipe)


def _measured(layer: nn.Linear, run: Callable[[Tensor], Tensor], recipe: str) -> str:
    """Return the SQNRs of all shapes, the least of each GEMM; raise where one is below its
    floor.
    """
    gemms = make_recipe(recipe).gemms
    least = {name: (float("inf"), float("inf")) for name in GEMMS}
    for tokens in TOKENS:
        ours, exact = _results(layer, run, tokens)
        for name, got, want in zip(GEMMS, ours, exact, strict=True):
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
    return text


def _results(
    layer: nn.Linear, run: Callable[[Tensor], Tensor], tokens: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Return output, input gradient and weight gradient: ours, and in float32."""
    device = layer.weight.device
    generator = torch.Generator().manual_seed(tokens)
    x, grad = (
        torch.randn(tokens, features, generator=generator).to(device, torch.bfloat16)
        for features in (FEATURES_IN, FEATURES_OUT)
    )
    leaf = x.clone().requires_grad_()
    layer.weight.grad = None
    output = run(leaf)
    output.backward(grad)
    assert leaf.grad is not None
    assert layer.weight.grad is not None
    ours = [output.detach(), leaf.grad, layer.weight.grad]
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        w, x, grad = layer.weight.detach().float(), x.float(), grad.float()
        exact = [x @ w.t(), grad @ w, grad.t() @ x]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    return [t.float() for t in ours], exact
