"""The cases of kernels, on stand-ins: a right kernel passes, a wrong one does not.

The references stand for kernels here, called as kernels are.
"""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_map

from tests.kernel_cases import casts, checks, played, producers
from tests.kernel_cases.comparison import Mismatch
from torch_fp8.ops import grad_codec
from torch_fp8.ops import messages as wire
from torch_fp8.ops.adamw import adamw_step_reference, update_rms_reference


def cast(x, options):
    row, col = options.rowwise, options.columnwise
    if not options.raises_amax:
        options = options._replace(amax=None)
    made = casts.reference(x, options._replace(rowwise=True, columnwise=True))
    wanted = zip(made, (row, row, col, col), strict=True)
    return [part if is_wanted else None for part, is_wanted in wanted]


def with_wrong_scale(*arguments):
    made = cast(*arguments)
    return [made[0], None if made[1] is None else made[1] * 2, *made[2:]]


def with_wrong_payload(*arguments):
    """One element of the transpose."""
    *made, qdata_t, scale_t = cast(*arguments)
    if qdata_t is not None and qdata_t.numel():
        qdata_t.view(torch.uint8)[-1, -1] ^= 1
    return [*made, qdata_t, scale_t]


def without_raising(x, options):
    """A slot stays as it is."""
    if options.raises_amax:
        options = options._replace(amax=options.amax.clone())
    return cast(x, options)


def step(pairs, multipliers=None):
    for i, (matrix, scalars) in enumerate(pairs):
        adamw_step_reference(matrix, scalars, None if multipliers is None else multipliers[i])


def step_with_wrong_decay(pairs, multipliers=None):
    step([(matrix, scalars._replace(decay=1.0)) for matrix, scalars in pairs], multipliers)


def update_rms(pairs):
    return torch.stack([update_rms_reference(*pair) for pair in pairs])


def changed(owner, **functions):
    """A copy of a module in which some functions are others."""
    return SimpleNamespace(**{**vars(owner), **functions})


def doubled_scale(function):
    """The second of what it returns is the scale."""

    def wrong(*arguments):
        first, scale, *rest = function(*arguments)
        return (first, scale * 2, *rest)

    return wrong


def with_wrong(name, function, at):
    """The operators, of which one returns twice what it should at an index (None: the one)."""
    original = getattr(producers.OPS, name)

    def wrong(*arguments):
        made = getattr(original, function)(*arguments)
        if at is None:
            return made * 2
        return tuple(part * 2 if i == at else part for i, part in enumerate(made))

    return changed(producers.OPS, **{name: changed(original, **{function: wrong})})


def without_slot(name, function):
    """The operators, of which one leaves its slot as it is."""
    original = getattr(producers.OPS, name)

    def wrong(*arguments):
        copies = tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, arguments)
        return getattr(original, function)(*copies)

    return changed(producers.OPS, **{name: changed(original, **{function: wrong})})


def wrong_sum(messages, layout, out, out_plain, scale=1.0):
    wire.unpack_sum(messages, layout, out, out_plain, 2 * scale)


def called(launcher):
    return [played.Call("call", launcher, (lambda: torch.randn(3),))]


RIGHT = [
    (checks.played_calls, called(lambda x: x * 2)),
    *((checks.cast, granularity, cast) for granularity in casts.GRANULARITIES),
    (checks.known_scale, cast),
    (checks.strides, cast),
    (checks.bias_gradient,),
    (checks.norm,),
    (checks.norm_backward,),
    (checks.swiglu,),
    (checks.smoothing,),
    (checks.swiglu_backward,),
    (checks.gate_up,),
    (checks.step, "bf16 with 8 bits", step),
    (checks.update_size, update_rms),
    (checks.gradient,),
    (checks.message,),
]
WRONG = [
    (checks.played_calls, called(lambda x: x * x[0].item())),
    (checks.played_calls, called(lambda x: x * float(x.numpy()[0]))),
    *((checks.cast, granularity, with_wrong_scale) for granularity in casts.GRANULARITIES),
    (checks.cast, "tensorwise", with_wrong_payload),
    (checks.known_scale, with_wrong_payload),
    (checks.known_scale, without_raising),
    (checks.strides, with_wrong_scale),
    (checks.norm, with_wrong("rms_norm", "rms_norm_statistics", 3)),
    (checks.norm, with_wrong("rms_norm", "rms_norm_quantize_once", 1)),
    (checks.norm_backward, with_wrong("rms_norm", "rms_norm_backward", 1)),
    (checks.swiglu, with_wrong("swiglu", "swiglu", None)),
    (checks.swiglu, with_wrong("swiglu", "swiglu_save", 1)),
    (checks.smoothing, with_wrong("smooth", "smooth_factors", 1)),
    (checks.swiglu_backward, with_wrong("swiglu_backward", "swiglu_backward", 0)),
    (checks.gate_up, with_wrong("swiglu_backward", "gate_up_backward_amax", None)),
    (checks.norm, without_slot("rms_norm", "rms_norm_quantize")),
    (checks.norm, without_slot("rms_norm", "rms_norm_quantize_once")),
    (checks.swiglu, without_slot("swiglu", "swiglu_quantize")),
    (checks.swiglu_backward, without_slot("swiglu_backward", "swiglu_backward_quantize")),
    (checks.gate_up, without_slot("swiglu_backward", "gate_up_backward_quantize")),
    (checks.smoothing, without_slot("smooth", "quantize_columns")),
    (checks.step, "fp32", step_with_wrong_decay),
    (checks.update_size, lambda pairs: update_rms(pairs) * 1.001),
    (
        checks.gradient,
        changed(
            grad_codec,
            decode_gradient=lambda source, dtype: grad_codec.decode_gradient(source, dtype) * 2,
        ),
    ),
    (checks.message, changed(wire, unpack_sum=wrong_sum)),
]


def _id(case):
    return f"{case[0].__name__}-{case[1] if len(case) > 1 and isinstance(case[1], str) else ''}"


@pytest.mark.parametrize("case", RIGHT, ids=_id)
def test_a_right_kernel_passes(case):
    check, *arguments = case
    assert check("cpu", *arguments)


@pytest.mark.parametrize("case", WRONG, ids=_id)
def test_a_wrong_kernel_is_told(case):
    check, *arguments = case
    with pytest.raises(Mismatch):
        check("cpu", *arguments)


def test_the_payload_of_a_step_that_writes_none_is_told():
    with pytest.raises(Mismatch, match="not a cast of the new weight"):
        checks.payload("cpu", step)


@pytest.mark.parametrize("granularity", ["tensorwise", "block_1x128"])
def test_wrong_sums_are_told(granularity, monkeypatch):
    """A sum of 16-bit values would lose what float32 keeps."""

    def rounded(*arguments):
        payloads, sums = original(*arguments)
        return payloads, sums.bfloat16().float()

    original = casts.quantize_layouts_and_sum
    monkeypatch.setattr(casts, "quantize_layouts_and_sum", rounded)
    with pytest.raises(Mismatch, match="too far off"):
        casts.check_sums("cpu", granularity)
