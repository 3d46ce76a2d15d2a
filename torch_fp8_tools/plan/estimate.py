"""An estimate of a step's seconds from arithmetic, memory traffic and network traffic.

A linear layer with M tokens, K inputs and N outputs runs three GEMMs (two if its weight is frozen)
of 2 M N K operations each. A GEMM takes the longer of the times for its arithmetic and its bytes.
Casts take the time of the bytes that they read and write (`CAST_BYTES`). Attention, norms,
activation functions, the loss and the optimizer are estimated as in benchmarks/roofline.py.
Launches are free. Collectives of FSDP2 and DDP overlap with compute, those of tensor parallelism do
not; a pipeline idles for (P - 1) / m of its time, with m micro-batches. The generation of an RLHF
step is not included.

The rates are data sheet peaks times reachable shares (`torch_fp8_tools.plan.cards`); no GPU has
measured them yet.
"""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import nn

from torch_fp8.conversion.memory import MemoryReport
from torch_fp8.nn.linear import Float8Layer
from torch_fp8_tools.plan.cards import (
    GPUS_PER_NODE,
    LATENCY,
    SHARE_OF_BANDWIDTH,
    SHARE_OF_FLOPS,
    SHARE_OF_LINK,
)
from torch_fp8_tools.plan.counts import StepBytes, by_layers
from torch_fp8_tools.plan.experts import ExpertWeight, expert_seconds, expert_weights_of
from torch_fp8_tools.plan.models import make_model, stages
from torch_fp8_tools.plan.setup import BF16, TRAINED, Setup

CAST_BYTES = {
    "tensorwise": (6.0, 6.0, 6.0),
    "delayed": (4.0, 6.0, 4.0),
    "rowwise": (8.0, 8.0, 8.0),
    "blockwise": (4.0625, 6.0, 4.0625),
    "mxfp8": (4.0625, 6.0625, 4.0625),
}
"""Recipe -> bytes that casts read and write per element of input, weight and gradient, in a forward
and backward; counted from the launches (benchmarks/results/quantization_bytes.csv).
"""


@dataclass(frozen=True)
class Seconds:
    """The seconds of a step by kind of work.

    Attributes:
        gemms: the seconds of the GEMMs of linear layers and experts.
        casts: the seconds of casts to FP8, and of gathers and transpositions for experts.
        others: the seconds of attention, norms, activation functions and the loss.
        optimizer: the seconds of the optimizer's step.
        wire: the seconds of collectives that can overlap with compute.
        exposed_wire: the seconds of collectives that cannot.
        step: the seconds of the whole step.
    """

    gemms: float
    casts: float
    others: float
    optimizer: float
    wire: float
    exposed_wire: float
    step: float


@dataclass(frozen=True)
class Linears:
    """The linear layers of a GPU's part of a model, and its experts.

    Layers are given as (N, K, frozen), separately for those in FP8 and in BF16.
    """

    fp8: tuple[tuple[int, int, bool], ...]
    bf16: tuple[tuple[int, int, bool], ...]
    experts: tuple[ExpertWeight, ...]


def linears_of(setup: Setup, role: str, level: str) -> Linears:
    """Collect the shapes of linear layers and experts on the fullest GPU of a model.

    Args:
        setup: the planned run.
        role: one of `torch_fp8_tools.plan.setup.ROLES`.
        level: one of `torch_fp8_tools.plan.setup.LEVELS`.
    """

    def count(layers: int) -> Counter[tuple[str, Any]]:
        model = make_model(setup, role, level, layers=layers)
        experts = expert_weights_of(model, setup.config)
        shapes: Counter[tuple[str, Any]] = Counter(("experts", weight) for weight in experts)
        for module in model.modules():
            weight = getattr(module, "weight", None)
            if isinstance(module, (nn.Linear, Float8Layer)) and weight is not None:
                kind = "fp8" if isinstance(module, Float8Layer) else "bf16"
                shapes[kind, (*weight.shape, not weight.requires_grad)] += 1
        return shapes

    shapes = tuple(by_layers(setup, stages(setup)[0][1], count).elements())
    kinds = ("fp8", "bf16", "experts")
    return Linears(**{kind: tuple(shape for of, shape in shapes if of == kind) for kind in kinds})


def wire_bytes(setup: Setup, trained: float, step: StepBytes, level: str) -> float:
    """Return the bytes that a GPU sends in an optimizer step.

    FSDP2's bytes are counted. Replicas exchange gradients once: DDP all-reduces them in float32
    (BF16-mixed), and replicas of FSDP2 shards (HSDP) in BF16. With FP8 both send 8-bit values in
    groups of 32 with a scale each. Tensor parallelism all-reduces BF16 activations, twice in
    forward and twice in backward of each layer.

    Args:
        setup: the planned run.
        trained: the number of elements of a GPU's gradients.
        step: the counted bytes of a step.
        level: one of `torch_fp8_tools.plan.setup.LEVELS`.
    """
    fsdp = (step.gathered + step.scattered) * setup.accumulate
    return fsdp + _replica_bytes(setup, trained, level) + _tensor_bytes(setup)


def seconds_of_step(
    setup: Setup, level: str, linears: dict[str, Linears], standing: dict[str, MemoryReport],
    steps: dict[str, StepBytes], trained_elements: dict[str, float],
) -> Seconds:  # fmt: skip
    """Estimate a step of all models of a run.

    Args:
        setup: the planned run.
        level: one of `torch_fp8_tools.plan.setup.LEVELS`.
        linears, standing, steps, trained_elements: dicts from role to the linears of a GPU's part
            of the model, the counted bytes, and the number of elements of its gradients.
    """
    gemms = casts = others = optimizer = 0.0
    for role, shapes in linears.items():
        trained = role in TRAINED
        gemms += setup.accumulate * _gemm_seconds(setup, shapes, level, trained=trained)
        if level != BF16:
            casts += setup.accumulate * _cast_seconds(setup, shapes, trained=trained)
        for in_fp8 in (True, False):
            experts = [weight for weight in shapes.experts if weight.in_fp8 == in_fp8]
            of_gemms, moved = expert_seconds(setup, experts, in_fp8=in_fp8, trained=trained)
            gemms += setup.accumulate * of_gemms
            casts += setup.accumulate * moved
        others += setup.accumulate * _other_seconds(setup, trained=trained)
        if trained:
            optimizer += _optimizer_bytes(standing[role]) / _bandwidth(setup)
    busy = gemms + casts + others
    wire = sum(
        _fsdp_seconds(setup, steps[role]) + _replica_seconds(setup, trained_elements[role], level)
        for role in steps
    )
    exposed = _transfer(_tensor_bytes(setup), setup, setup.tensor)
    waiting = (busy + exposed) * (setup.pipeline - 1) / setup.accumulate
    return Seconds(
        gemms=gemms,
        casts=casts,
        others=others,
        optimizer=optimizer,
        wire=wire,
        exposed_wire=exposed,
        step=max(busy + exposed + waiting, wire) + optimizer,
    )


def _gemm_seconds(setup: Setup, linears: Linears, level: str, *, trained: bool) -> float:
    total = 0.0
    for in_fp8, shapes in ((level != BF16, linears.fp8), (False, linears.bf16)):
        for n, k, frozen in shapes:
            m = setup.tokens
            forward = _gemm(setup, m, n, k, in_fp8)
            total += forward
            if trained:
                total += _gemm(setup, m, k, n, in_fp8)
                total += 0.0 if frozen else _gemm(setup, n, k, m, in_fp8)
                total += forward if setup.checkpointing else 0.0
    return total


def _gemm(setup: Setup, m: int, n: int, k: int, in_fp8: bool) -> float:
    """Return the seconds of (m, k) times (k, n) with a BF16 result."""
    peak = setup.card.fp8 if in_fp8 else setup.card.bf16
    num_bytes = (1 if in_fp8 else 2) * (m * k + n * k) + 2 * m * n
    return max(2 * m * n * k / (SHARE_OF_FLOPS * peak), num_bytes / _bandwidth(setup))


def _cast_seconds(setup: Setup, linears: Linears, *, trained: bool) -> float:
    x, w, g = CAST_BYTES[setup.recipe]
    share = 1.0 if trained else 0.5
    total = 0.0
    for n, k, frozen in linears.fp8:
        weight = 0.0 if frozen else w * n * k
        total += share * (x * setup.tokens * k + weight) + trained * g * setup.tokens * n
    return total / _bandwidth(setup)


def _other_seconds(setup: Setup, *, trained: bool) -> float:
    """Return the seconds of attention, of the operations between linear layers, and of the loss."""
    text = setup.config.get_text_config()
    hidden = text.hidden_size
    inner = getattr(text, "intermediate_size", None) or 4 * hidden
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or hidden // heads
    queries = heads * head_dim / setup.tensor
    layers = -(-text.num_hidden_layers // setup.pipeline)
    m = setup.tokens
    passes = 3.5 + setup.checkpointing if trained else 1.0
    attention = passes * 2 * m * setup.sequence * queries / (SHARE_OF_FLOPS * setup.card.bf16)
    forward = 2 * 2 * hidden + 2 * 3 * hidden + 8 * queries + 3 * inner / setup.tensor
    backward = 2 * 3 * hidden + 2 * 3 * hidden + 8 * queries + 5 * inner / setup.tensor
    between = forward * (1 + (trained and setup.checkpointing)) + (backward if trained else 0.0)
    loss = 3 * 4 * m * text.vocab_size
    return layers * (attention + 2 * m * between / _bandwidth(setup)) + loss / _bandwidth(setup)


def _optimizer_bytes(report: MemoryReport) -> float:
    written = report.weights + report.moments + report.master + report.scales
    return 2.0 * written + report.gradients


def _fsdp_seconds(setup: Setup, step: StepBytes) -> float:
    if setup.fsdp == 1:
        return 0.0
    sent = _transfer(step.gathered + step.scattered, setup, setup.fsdp)
    return setup.accumulate * (sent + step.calls * LATENCY * math.log2(setup.fsdp))


def _replica_seconds(setup: Setup, elements: float, level: str) -> float:
    """Return the seconds of the gradient exchange between replicas, with a collective per layer."""
    if setup.data == 1 or not elements:
        return 0.0
    sent = _replica_bytes(setup, elements, level)
    calls = -(-setup.config.get_text_config().num_hidden_layers // setup.pipeline)
    waits = calls * LATENCY * math.log2(setup.data)
    return _transfer(sent, setup, setup.data * setup.fsdp) + waits


def _replica_bytes(setup: Setup, elements: float, level: str) -> float:
    """Return the bytes of a rank's shards in the gradient exchange between replicas."""
    plain = 2.0 if setup.fsdp > 1 else 4.0
    each = plain if level == BF16 else 1 + 1 / 32
    return 2 * (setup.data - 1) / setup.data * each * elements


def _tensor_bytes(setup: Setup) -> float:
    if setup.tensor == 1:
        return 0.0
    text = setup.config.get_text_config()
    layers = -(-text.num_hidden_layers // setup.pipeline)
    ring = 2 * (setup.tensor - 1) / setup.tensor
    return 4 * layers * ring * 2 * setup.tokens * text.hidden_size * setup.accumulate


def _transfer(num_bytes: float, setup: Setup, ranks: int) -> float:
    """Return the seconds to send bytes among `ranks` ranks; beyond a node the network limits."""
    inside = ranks <= GPUS_PER_NODE and setup.tensor * ranks <= max(GPUS_PER_NODE, setup.tensor)
    rate = setup.card.link if inside else setup.card.network
    return num_bytes / (SHARE_OF_LINK * rate) if ranks > 1 else 0.0


def _bandwidth(setup: Setup) -> float:
    return SHARE_OF_BANDWIDTH * setup.card.bandwidth
