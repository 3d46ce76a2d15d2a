"""The cases of kernels tell a wrong one; references with a fault stand for kernels here."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_map

from tests.kernel_cases import casts, messages, optimizer, played, producers
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


def wrong_gradients():
    return changed(grad_codec, decode_gradient=lambda *x: grad_codec.decode_gradient(*x) * 2)


def called(launcher):
    return played.Call("call", launcher, (lambda: torch.randn(3),))


ODD, EVEN = (37, 131), (48, 272)
ONCE, BLOCKS = (("cpu", EVEN, granularity) for granularity in ("tensorwise", "block_1x128"))
BACKWARD = "cpu", EVEN, True
SWIGLU = "cpu", EVEN, "gaussian", True, True
CASTS = "cpu", "tensorwise", "gaussian", [ODD]
NORM = "cpu", ODD, "gaussian", True
STEP = "cpu", "fp32", "bf16", 0, [(5, 48)]
WRONG = [
    (played.check_played, called(lambda x: x * x[0].item())),
    (played.check_played, called(lambda x: x * float(x.numpy()[0]))),
    *(
        (casts.check_cast, with_wrong_scale, "cpu", granularity, "gaussian", [ODD])
        for granularity in casts.GRANULARITIES
    ),
    (casts.check_cast, with_wrong_payload, *CASTS),
    (casts.check_known_scale, with_wrong_payload, "cpu", "gaussian", [ODD]),
    (casts.check_known_scale, without_raising, "cpu", "gaussian", [ODD]),
    (casts.check_strides, with_wrong_scale, "cpu", "tensorwise"),
    (producers.check_norm, with_wrong("rms_norm", "rms_norm_statistics", 3), *NORM),
    (producers.check_norm_once, with_wrong("rms_norm", "rms_norm_quantize_once", 1), *BLOCKS),
    (producers.check_norm_backward, with_wrong("rms_norm", "rms_norm_backward", 1), *BACKWARD),
    (producers.check_swiglu, with_wrong("swiglu", "swiglu", None), *SWIGLU),
    (producers.check_swiglu, with_wrong("swiglu", "swiglu_save", 1), *SWIGLU),
    (producers.check_smoothing, with_wrong("smooth", "smooth_factors", 1), "cpu", EVEN, "nan"),
    *(
        (check, wrong("swiglu_backward", *names), "cpu", EVEN, True, True)
        for check, wrong, *names in (
            (producers.check_swiglu_backward, with_wrong, "swiglu_backward", 0),
            (producers.check_swiglu_backward, without_slot, "swiglu_backward_quantize"),
            (producers.check_gate_up, with_wrong, "gate_up_backward_amax", None),
            (producers.check_gate_up, without_slot, "gate_up_backward_quantize"),
        )
    ),
    (producers.check_norm, without_slot("rms_norm", "rms_norm_quantize"), *NORM),
    (producers.check_norm_once, without_slot("rms_norm", "rms_norm_quantize_once"), *ONCE),
    (producers.check_swiglu, without_slot("swiglu", "swiglu_quantize"), *SWIGLU),
    (producers.check_smoothing, without_slot("smooth", "quantize_columns"), "cpu", EVEN, "nan"),
    (optimizer.check_steps, step_with_wrong_decay, *STEP),
    (optimizer.check_payload, step, "cpu", "fp32", "tensorwise", True, [(16, 32)]),
    (
        optimizer.check_update_rms,
        lambda pairs: update_rms(pairs) * 1.001,
        *("cpu", "bf16", 0.1, [(5, 48)]),
    ),
    (messages.check_gradient, wrong_gradients(), "cpu", ODD, torch.bfloat16),
    (
        messages.check_messages,
        changed(wire, unpack_sum=wrong_sum),
        *("cpu", wire.Layout(5), 4 * 5 * 32, torch.bfloat16, 0, None),
    ),
]


@pytest.mark.parametrize(("check", "kernel", "arguments"), [(c, k, a) for c, k, *a in WRONG])
def test_a_wrong_kernel_is_told(check, kernel, arguments):
    with pytest.raises(Mismatch):
        check(kernel, *arguments)


@pytest.mark.parametrize("granularity", ["tensorwise", "block_1x128"])
def test_wrong_sums_are_told(granularity, monkeypatch):
    """A sum of 16-bit values would lose what float32 keeps."""

    def rounded(*arguments):
        payloads, sums = original(*arguments)
        return payloads, sums.bfloat16().float()

    original = casts.quantize_layouts_and_sum
    monkeypatch.setattr(casts, "quantize_layouts_and_sum", rounded)
    with pytest.raises(Mismatch, match="too far off"):
        casts.check_sums("cpu", granularity, (500, 48))
