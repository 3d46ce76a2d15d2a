"""The self-test: each recipe in its own process, with the shapes that training meets first.

``python -m torch_fp8_tools.env.smoke SUBJECT`` runs the checks of one subject and prints what it
found in its last line: the kernels against their references, a recipe, or a frozen weight. A
subject that raises, hangs or ends its process only fails its own line.

The floors are those of Gaussian data (benchmarks/results/numerics.csv), 28.5 dB for E4M3 with E4M3
and 24.6 dB for E5M2 with E4M3, minus half a dB. An operand in the wrong format is below them. The
worst of a few hundred rows is within 2.5 dB of the whole.
"""

import contextlib
import faulthandler
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from torch_fp8._version import distribution_version
from torch_fp8.config import FP8Config
from torch_fp8.conversion.convert import convert_to_float8
from torch_fp8.conversion.freeze import freeze
from torch_fp8.kernels.arguments import BackwardInputs, CastOptions, NormBackwardInputs, NormInputs
from torch_fp8.nn.linear import Float8Linear
from torch_fp8.ops import refused_rows, rms_norm, swiglu, swiglu_backward
from torch_fp8.ops.hardware import reason_not_native
from torch_fp8.ops.quantize import quantize_2d
from torch_fp8.ops.transpose import transposed_bytes
from torch_fp8.optim.convert import convert_optimizer
from torch_fp8.quantization.formats import E4M3, E5M2, MIN_CAPABILITY
from torch_fp8.quantization.recipe import GEMMS, CastSpec, Gemm, Granularity, make_recipe
from torch_fp8_tools.env.hosts import child_environment
from torch_fp8_tools.env.result import FAILED, NOT_RUN, OK, SUBJECTS, Result, last_line, one_line
from torch_fp8_tools.metrics import sqnr_db, worst_row_sqnr_db

SECTION = "self-test"
KERNELS, *_, FROZEN = SUBJECTS
LIMIT_S = 600.0
"""The seconds after which a subject fails; its process compiles its kernels."""
E4M3_FLOOR_DB, E5M2_FLOOR_DB, ROW_ALLOWANCE_DB = 28.0, 24.0, 2.5
EXACT_DB = 12.0
"""The dB over a floor that no FP8 product reaches: two bits of mantissa."""
FEATURES, LARGE = (256, 384), (4096, 4096)
"""A layer's features on a CPU and on a GPU, which refuses GEMMs by their size."""
TOKENS, FEW_TOKENS = (256, 99), (16, 1)
"""Numbers of tokens: a multiple of 16, one that needs padding, and few, as in inference."""
SHAPE = (129, 272)
"""Rows and columns of the kernels' inputs, which are not multiples of a tile."""
NEIGHBOURS = 0.01
"""The share of 16-bit results that may be next to the reference's, as sums run in another order."""


def smoke(subjects: Sequence[str]) -> Iterator[Result]:
    """Yield the result of each subject, from a process of its own."""
    for subject in subjects:
        reason = _no_kernel() if subject == KERNELS else ""
        yield Result(SECTION, subject, NOT_RUN, reason) if reason else _result(subject)


def command(subject: str) -> list[str]:
    """Return the command of a subject's process."""
    return [sys.executable, "-m", __name__, subject]


def _result(subject: str) -> Result:
    """Run a subject's process; its last line is the detail."""
    began, status = time.monotonic(), None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        log = Path(folder, "log")
        with log.open("wb") as output, contextlib.suppress(subprocess.TimeoutExpired):
            status = subprocess.run(
                command(subject),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**child_environment(), "TMPDIR": folder},
                timeout=LIMIT_S,
            ).returncode
        printed = log.read_text(errors="replace").strip()
    seconds, detail = time.monotonic() - began, one_line(printed.rpartition("\n")[2])
    if status == 0:
        return Result(SECTION, subject, OK, detail, seconds)
    if status is None:
        detail = f"took more than {LIMIT_S:.0f} s"
    elif status < 0:
        detail = f"its process was ended by {signal.Signals(-status).name}"
    return Result(SECTION, subject, FAILED, detail, seconds, printed)


def _no_kernel() -> str:
    """Return why no kernel can run here, or an empty string if kernels can run."""
    if not torch.cuda.is_available():
        return "no card"
    if torch.cuda.get_device_capability() < MIN_CAPABILITY:
        return "this card is below sm_89: it runs the references"
    return "" if distribution_version("triton") else "Triton is not installed"


def check(subject: str) -> str:
    """Run the checks of a subject and return what they found; raise if one of them fails."""
    if subject == KERNELS:
        return check_kernels("cuda")
    eager = check_eager(subject)
    return eager if subject == FROZEN else f"{eager}; compiled: {check_compiled(subject)}"


def check_eager(subject: str) -> str:
    """Check output and gradients of an eager layer, also with few tokens and a decoded one.

    The weight of `FROZEN` is stored only in FP8, like the base of adapters.
    """
    layer, path = _layer("tensorwise" if subject == FROZEN else subject)
    weight, recipe = layer.weight.detach().clone(), subject
    if subject == FROZEN:
        frozen = freeze(layer).recipe
        assert frozen is not None
        recipe = frozen.name
        path = f"{recipe}, {path}"
    measured = _measured(layer, layer, recipe, (*TOKENS, *FEW_TOKENS), weight)
    return f"{measured}, {_decoded(layer, recipe, weight)}, {path}"


def check_compiled(recipe: str) -> str:
    """Check the compiled layer in the same way; a break of its graph raises."""
    layer, path = _layer(recipe)
    torch.compiler.reset()
    # On a CPU the traced graph runs eagerly: compiling it would take minutes and show no more.
    backend = "aot_eager" if layer.weight.device.type == "cpu" else "inductor"
    compiled = torch.compile(layer, backend=backend, dynamic=False, fullgraph=True)
    measured = _measured(layer, compiled, recipe, TOKENS, layer.weight.detach())
    return f"{measured}, {backend}, {path}"


def _layer(recipe: str) -> tuple[Float8Linear, str]:
    """Return a converted layer, and a description of how its GEMMs run."""
    has_card = torch.cuda.is_available()
    device = torch.device("cuda", 0) if has_card else torch.device("cpu")
    is_native = has_card and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY
    is_native = is_native and reason_not_native(device, recipe) is None
    torch.manual_seed(0)
    layer = nn.Linear(*(LARGE if has_card else FEATURES), bias=False).to(device, torch.bfloat16)
    nn.init.normal_(layer.weight)
    convert_to_float8(layer, FP8Config(recipe=recipe, emulate=not is_native))
    assert isinstance(layer, Float8Linear)
    return layer, "native" if is_native else "emulated"


def floor_db(gemm: Gemm) -> float:
    """Return the minimum SQNR in dB of a GEMM of Gaussian operands."""
    is_e4m3 = gemm.a.format == gemm.b.format == E4M3
    return E4M3_FLOOR_DB if is_e4m3 else E5M2_FLOOR_DB


def _measured(
    layer: nn.Linear,
    run: Callable[[Tensor], Tensor],
    recipe: str,
    tokens: Sequence[int],
    weight: Tensor,
) -> str:
    """Return the lowest SQNR of each GEMM over the shapes; raise if one is below its floor.

    A GEMM of few tokens has the floor of a row: one token is one row, or scaled copies of it.
    """
    floors = dict(zip(GEMMS, map(floor_db, make_recipe(recipe).gemms), strict=True))
    least: dict[str, float] = {}
    for count in tokens:
        for name, (got, want) in _results(layer, run, count, weight).items():
            sqnr, row = sqnr_db(want, got), worst_row_sqnr_db(want, got)
            few = count in FEW_TOKENS
            floor = floors[name] - ROW_ALLOWANCE_DB if few else floors[name]
            where = f"{name} of {count} tokens has {sqnr:.1f} dB (row {row:.1f})"
            if not (sqnr >= floor and (few or row >= floor - ROW_ALLOWANCE_DB)):  # NaN is not
                raise RuntimeError(f"{where}, its floor is {floor:.1f} dB")
            if sqnr > floor + EXACT_DB:
                raise RuntimeError(f"{where}, more exact than FP8, so it ran without")
            least[name] = min(sqnr, least.get(name, sqnr))
    return ", ".join(f"{name} {sqnr:.1f} dB" for name, sqnr in least.items())


def _decoded(layer: Float8Linear, recipe: str, weight: Tensor) -> str:
    """Return the SQNR of one token after a prompt without gradients; raise if it is low."""
    floor = floor_db(make_recipe(recipe).fprop) - ROW_ALLOWANCE_DB
    prompt, token = (_gaussian(layer, count, layer.in_features) for count in (TOKENS[1], 1))
    with torch.no_grad():
        layer.eval()(prompt)
        sqnr = sqnr_db(token.double() @ weight.double().t(), layer(token))
    if not sqnr >= floor:
        raise RuntimeError(f"a decoded token has {sqnr:.1f} dB, its floor is {floor:.1f} dB")
    repeated = " (repeated)" if layer.fp8.payloads.operand is not None else ""
    sizes = len(refused_rows.padded)
    padded = f", refused sizes of GEMMs that run padded: {sizes}" if sizes else ""
    return f"a decoded token {sqnr:.1f} dB{repeated}{padded}"


def _results(
    layer: nn.Linear, run: Callable[[Tensor], Tensor], tokens: int, weight: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return (computed, exact) of output, input gradient and, unless frozen, weight gradient."""
    x, grad = (_gaussian(layer, tokens, features) for features in reversed(weight.shape))
    leaf = x.clone().requires_grad_()
    layer.weight.grad = None
    output = run(leaf)
    output.backward(grad)
    w, x, grad = weight.double(), x.double(), grad.double()
    exact = x @ w.t(), grad @ w, grad.t() @ x
    computed = output.detach(), leaf.grad, layer.weight.grad
    triples = zip(GEMMS, computed, exact, strict=True)
    of_weight = layer.weight.requires_grad
    return {name: (got, want) for name, got, want in triples if name != "wgrad" or of_weight}


def _gaussian(layer: nn.Linear, tokens: int, features: int) -> Tensor:
    generator = torch.Generator().manual_seed(tokens + features)
    x = torch.randn(tokens, features, generator=generator)
    return x.to(layer.weight.device, torch.bfloat16)


def check_kernels(device: str) -> str:
    """Call a kernel of each family on a device, and compare it with the CPU's reference."""
    x, up, grad = map(_matrix, range(3))
    known = CastOptions(E4M3.dtype, "tensorwise", False, True, True, torch.tensor(0.02))
    norm = NormInputs(x, torch.linspace(0.5, 1.5, SHAPE[1]), 1e-5, 0.0, torch.bfloat16)
    rstd = rms_norm.rms_norm_quantize_once(norm, known, True)[4]
    assert rstd is not None
    backward = NormBackwardInputs(grad, x, None, norm.weight, rstd, 0.0, torch.bfloat16, True)
    gated = BackwardInputs(grad, x, None, up, None, torch.bfloat16)
    cases: dict[str, tuple[Any, ...]] = {
        f"cast {spec}": (quantize_2d, x, CastOptions.of(spec, rowwise=True, columnwise=True))
        for spec in (
            CastSpec(format, granularity, power_of_two=granularity == "block_1x32")
            for granularity in get_args(Granularity)
            for format in (E4M3, E5M2)
        )
    }
    cases |= {
        "transpose": (transposed_bytes, x[:, :144].to(E4M3.dtype), 144),
        "norm": (rms_norm.rms_norm_quantize_once, norm, known, True),
        "norm's backward": (rms_norm.rms_norm_backward, backward),
        "SwiGLU": (swiglu.swiglu_quantize, x, up, None, known, True),
        "SwiGLU's backward": (swiglu_backward.swiglu_backward, gated),
        "optimizer": (trained, x.float() / 8),
    }
    for name, (function, *arguments) in cases.items():
        results = function(*(_moved(argument, device) for argument in arguments))
        _compare(name, results, function(*arguments), name.startswith(("norm", "SwiGLU")))
    return f"{len(cases)} calls equal their references"


def _matrix(seed: int) -> Tensor:
    """Return BF16 rows of different magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SHAPE, generator=generator)
    return (x * 2.0 ** torch.randint(-4, 5, (SHAPE[0], 1), generator=generator)).to(torch.bfloat16)


def _moved(value: Any, device: str) -> Any:
    """Return a tensor, or the tensors in tuples, on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if not isinstance(value, tuple):
        return value
    parts = [_moved(part, device) for part in value]
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


def trained(weight: Tensor) -> Tensor:
    """Return a weight after three steps of AdamW at O2, with 8-bit moments and split weights."""
    layer = nn.Linear(*SHAPE[::-1], bias=False, device=weight.device)
    with torch.no_grad():
        layer.weight.copy_(weight)
    config = FP8Config(recipe="tensorwise", emulate=True)
    convert_to_float8(layer, config)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    convert_optimizer(optimizer, config, model=layer)
    for seed in range(1, 4):
        layer.weight.grad = _matrix(seed).to(weight.device, layer.weight.dtype)
        optimizer.step()
    return layer.weight.detach().float()


def _compare(name: str, results: Any, references: Any, is_near: bool) -> None:
    """Raise unless results equal the references, or (if `is_near`) a few are neighbours."""
    if isinstance(results, Tensor):
        results, references = [results], [references]
    for i, pair in enumerate(zip(results, references, strict=True)):
        forms = [None if x is None or not x.numel() else (tuple(x.shape), x.dtype) for x in pair]
        if forms[0] != forms[1]:
            raise RuntimeError(f"{name}: result {i} is {forms[0]}, and its reference {forms[1]}")
        if forms[0] is None:
            continue
        dtype, (got, want) = forms[0][1], (x.cpu().float() for x in pair)
        step = max(torch.finfo(dtype).eps if dtype.is_floating_point else 0.0, 2.0**-14)
        far = ~((got - want).abs() <= step * (want.abs() + want.abs().max() * 2.0**-14))
        share = float((got != want).float().mean())
        most = 0.0 if not is_near else 1.0 if dtype == torch.float32 else NEIGHBOURS
        if bool(far.any()) or share > most:
            raise RuntimeError(
                f"{name}: {share:.2%} of result {i} differ from the reference, "
                f"{int(far.sum())} by more than a neighbour"
            )


if __name__ == "__main__":
    faulthandler.enable()
    faulthandler.dump_traceback_later(LIMIT_S - 10)  # shows where it hangs
    try:
        print(one_line(check(sys.argv[1])))
    except Exception as error:
        traceback.print_exc()
        print(last_line(error))
        sys.exit(1)
