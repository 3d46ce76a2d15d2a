"""Smoke checks of the kernels: one call of each family on a GPU, compared with the CPU reference.

They detect a GPU, a driver or a compiler that does not work. ``pytest -m gpu`` compares all shapes,
formats and edge cases.
"""

from collections.abc import Iterable, Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn

from torch_fp8.config import FP8Config
from torch_fp8.conversion.convert import convert_to_float8
from torch_fp8.kernels.arguments import BackwardInputs, CastOptions, NormBackwardInputs, NormInputs
from torch_fp8.ops import messages, rms_norm, swiglu, swiglu_backward
from torch_fp8.ops.quantize import quantize_2d
from torch_fp8.ops.transpose import transposed_bytes
from torch_fp8.optim.convert import convert_optimizer
from torch_fp8.quantization.recipe import Granularity

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
GRANULARITIES = get_args(Granularity)
SHAPE = (129, 272)
"""Rows and columns that are not multiples of a tile."""
NEIGHBOURS = 0.01
"""The share of 16-bit results that may be the reference's neighbouring values, because sums run in
another order, which changes the last bits of float32.
"""


def check_casts(device: str) -> str:
    """Check casts of both formats in both layouts, and the transpose of their bytes."""
    x = _matrix()
    for granularity in GRANULARITIES:
        for dtype in (E4M3, E5M2):
            power_of_two = granularity == "block_1x32"
            options = CastOptions(dtype, granularity, power_of_two, True, True)
            want = quantize_2d.reference(x, options)
            _compare(f"{granularity} {dtype}", quantize_2d(x.to(device), options), want, exact=True)
    qdata = quantize_2d(x.to(device), CastOptions(E4M3, "tensorwise", False, True, False))[0]
    assert qdata is not None
    want = transposed_bytes.reference(qdata.cpu().view(torch.uint8), 144)
    _compare("transpose", [transposed_bytes(qdata, 144).view(torch.uint8)], [want], exact=True)
    return f"{', '.join(GRANULARITIES)}: bit for bit"


def check_norm(device: str) -> str:
    """Check RMSNorm with its cast, and its backward."""
    x, weight, grad = _matrix(), torch.linspace(0.5, 1.5, SHAPE[1]), _matrix(seed=1)
    want = rms_norm.rms_norm_quantize_once(
        NormInputs(x, weight, 1e-5, 0.0, BF16), _known_scale("cpu"), True
    )
    got = rms_norm.rms_norm_quantize_once(
        NormInputs(x.to(device), weight.to(device), 1e-5, 0.0, BF16), _known_scale(device), True
    )
    _compare("forward", got, want)
    rstd = want[4]
    assert rstd is not None
    inputs = NormBackwardInputs(grad, x, None, weight, rstd, 0.0, BF16, True)
    moved = NormBackwardInputs(*_moved(inputs, device))
    _compare("backward", rms_norm.rms_norm_backward(moved), rms_norm.rms_norm_backward(inputs))
    return "within a neighbour"


def check_swiglu(device: str) -> str:
    """Check SwiGLU with its cast, and its backward."""
    gate, up, grad = (_matrix(seed=seed) for seed in range(3))
    want = swiglu.swiglu_quantize(gate, up, None, _known_scale("cpu"), True)
    moved = gate.to(device), up.to(device), None
    _compare("forward", swiglu.swiglu_quantize(*moved, _known_scale(device), True), want)
    inputs = BackwardInputs(grad, gate, None, up, None, None, BF16)
    backward = swiglu_backward.swiglu_backward
    got = backward(BackwardInputs(*_moved(inputs, device)))
    _compare("backward", got, backward(inputs))
    return "within a neighbour"


def check_optimizer(device: str) -> str:
    """Check three steps of AdamW at O2: 8-bit moments, split weights, stochastic rounding."""
    weights = [_trained(place) for place in ("cpu", device)]
    _compare("weights", weights[1:], weights[:1], exact=True)
    return "three steps, bit for bit"


def check_messages(device: str) -> str:
    """Check the exchange between ranks: messages packed, reduced and summed."""
    # Groups and plain values fill their messages, because padding is uninitialized memory.
    layout, plain = messages.Layout(512, 8), torch.linspace(-1, 1, 4 * 8)
    values = _matrix((512, 128)).flatten()
    packed = messages.pack_flat(values, plain, layout, 4)
    moved = messages.pack_flat(values.to(device), plain.to(device), layout, 4)
    _compare("packed", [moved], [packed], exact=True)
    reduced = messages.reduce_and_repack(packed, layout, 0.25)
    moved = messages.reduce_and_repack(packed.to(device), layout, 0.25)
    _compare("reduced", [moved], [reduced], exact=True)
    return "bit for bit"


def _matrix(shape: tuple[int, int] = SHAPE, seed: int = 0) -> Tensor:
    """Return BF16 rows of different magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return (x * 2.0 ** torch.randint(-4, 5, (shape[0], 1), generator=generator)).to(BF16)


def _known_scale(device: str) -> CastOptions:
    return CastOptions(E4M3, "tensorwise", False, True, True, torch.tensor(0.02, device=device))


def _moved(arguments: Iterable[Any], device: str) -> list[Any]:
    return [t.to(device) if isinstance(t, Tensor) else t for t in arguments]


def _trained(device: str) -> Tensor:
    layer = nn.Linear(*SHAPE[::-1], bias=False)
    with torch.no_grad():
        layer.weight.copy_(_matrix().float() / 8)
    layer.to(device)
    config = FP8Config(recipe="tensorwise", emulate=True)
    convert_to_float8(layer, config)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    convert_optimizer(optimizer, config, model=layer)
    for seed in range(1, 4):
        layer.weight.grad = _matrix(seed=seed).to(device, layer.weight.dtype)
        optimizer.step()
    return layer.weight.detach().float()


def _compare(
    what: str,
    results: Sequence[Tensor | None],
    references: Sequence[Tensor | None],
    exact: bool = False,
) -> None:
    """Raise unless results equal the references or (if not `exact`) a few are neighbours."""
    for i, (result, reference) in enumerate(zip(results, references, strict=True)):
        absent = [x is None or not x.numel() for x in (result, reference)]
        if absent[0] != absent[1]:
            raise RuntimeError(f"{what}: only one of result {i} and its reference exists")
        if absent[0] or result is None or reference is None:
            continue
        if result.shape != reference.shape or result.dtype != reference.dtype:
            raise RuntimeError(f"{what}: result {i} has another shape or dtype")
        got, want = result.cpu().float(), reference.float()
        floats = reference.dtype.is_floating_point
        step = max(torch.finfo(reference.dtype).eps if floats else 0.0, 2.0**-14)
        near = (got - want).abs() <= step * (want.abs() + want.abs().max() * 2.0**-14)
        share = float((got != want).float().mean())
        most = 0.0 if exact else 1.0 if reference.dtype == torch.float32 else NEIGHBOURS
        if not bool(near.all()) or share > most:
            raise RuntimeError(
                f"{what}: {share:.2%} of result {i} differ from the reference, "
                f"{int((~near).sum())} by more than a neighbour"
            )
