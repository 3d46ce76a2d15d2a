"""Cases of every kernel family: what the GPU tests compare, of small shapes, on CPU tensors."""

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import torch_fp8.ops.cross_entropy
import torch_fp8.ops.expert_gate
import torch_fp8.ops.grad_codec
import torch_fp8.ops.messages
import torch_fp8.ops.moe_rows
from tests.emulator.driver import approximate_functions
from tests.emulator.on_card import card_module, on_card
from tests.kernel_cases import casts, experts, messages, optimizer, producers
from tests.torch_fp8.loss_head import loss_cases
from torch_fp8.ops.messages import Layout

ODD, WHOLE = (37, 131), (130, 272)
"""Shapes of one program, with columns that are moved one by one, and of several programs."""
BF16 = torch.bfloat16
_MATRICES = ((100, 128), (5, 48), (36, 33), (3, 7))


def operators() -> Any:
    modules = vars(producers.OPS).items()
    return SimpleNamespace(**{name: card_module(module) for name, module in modules})


def _cast(granularity: str, kind: str) -> None:
    choices = casts.CHOICES[:1] if granularity != "rowwise" else casts.CHOICES[2:]
    casts.check_cast(casts.kernel(), "cpu", granularity, kind, [ODD, WHOLE], choices)


def _sums(granularity: Any) -> None:
    with on_card():
        casts.check_sums("cpu", granularity, (300, 1040))


def _steps(weight: str, grad: str) -> None:
    step, sizes = optimizer.kernel(), {"shapes": _MATRICES}
    optimizer.check_steps(step, "cpu", weight, grad, **sizes)


def _payload(granularity: Any, power_of_two: bool) -> None:
    step, weight = optimizer.kernel(), "bf16 with 8 bits"
    optimizer.check_payload(step, "cpu", weight, granularity, power_of_two, [(144, 160)])


def _update_rms() -> None:
    from tests.internals import update_rms

    optimizer.check_update_rms(update_rms, "cpu", "bf16", 0.1, [(100, 128), (5, 48)])


def _messages(keys: Any) -> None:
    wire, layout = card_module(torch_fp8.ops.messages), Layout(70, 5)
    messages.check_messages(wire, "cpu", layout, 4 * 70 * 32 - 33, BF16, 0, keys)


_MINUS_LOG2_E = np.array(0xBFB8AA3B, np.uint32).view(np.float32)


def sigmoid(x: Tensor) -> Tensor:
    functions, minus_log2_e = approximate_functions(), _MINUS_LOG2_E
    with np.errstate(over="ignore", divide="ignore"):
        power = functions.ex2(x.contiguous().numpy() * minus_log2_e, True)
        return torch.from_numpy(functions.rcp(power + np.float32(1), True)).view(x.shape)


def expert_rows(check: Callable[..., None], *choices: Any, few: bool) -> None:
    """Run a case of `torch_fp8.ops.moe_rows`.

    Args:
        check: function of `tests.kernel_cases.experts`.
        choices: its other arguments.
        few: whether columns that are moved together have one route; the kernels read a route
            alike for these and for columns that are moved one by one.
    """
    rows = card_module(torch_fp8.ops.moe_rows)
    check(rows, "cpu", *choices, columns=(48,), choices=("random",) if few else experts.CHOICES)
    check(rows, "cpu", *choices, columns=(131,))


def expert_gate(
    form: str, bias: bool, dtype: torch.dtype, widths: Iterable[int] = (48, 131)
) -> None:
    gate = card_module(torch_fp8.ops.expert_gate)
    experts.check_gate(gate, "cpu", experts.FORMS[form], bias, dtype, widths, sigmoid)


def losses(check: Callable[..., None], form: str, kind: str) -> None:
    check(card_module(torch_fp8.ops.cross_entropy), "cpu", form, kind, shapes=[(37, 1003)])


def _gradient() -> None:
    parts = card_module(torch_fp8.ops.grad_codec)
    messages.check_gradient(parts, "cpu", ODD, BF16)


def _messages_at_edges() -> None:
    wire = card_module(torch_fp8.ops.messages)
    for layout, numel in ((Layout(70), 4 * 70 * 32 - 16), (Layout(5), 100), (Layout(1), 64)):
        messages.check_messages(wire, "cpu", layout, numel, torch.float32, 0, None)


def _gradients_at_edges() -> None:
    parts = card_module(torch_fp8.ops.grad_codec)
    for shape in ((5, 48), (3, 7), (0, 64), (1, 1)):
        messages.check_gradient(parts, "cpu", shape, torch.float32)
    messages.check_rounding(parts, card_module(torch_fp8.ops.messages), "cpu")


def _producers_at_edges(ops: Any) -> None:
    producers.check_norm(ops, "cpu", (1, 160), "inf", few=True)
    producers.check_swiglu(ops, "cpu", (48, 1), "zeros", smooth=False, few=True)
    producers.check_gate_up(ops, "cpu", (17, 144), gate_first=False, few=True)


def families(few_rows: bool = False) -> dict[str, Callable[[], None]]:
    """Return the cases by name; each raises `Mismatch` where a kernel is wrong.

    Args:
        few_rows: whether those of experts do not take each route and form with each width.
    """
    ops = operators()
    few: dict[str, Any] = {"few": True}
    rows_transposed = partial(expert_rows, experts.check_transposition, few=few_rows)
    return {
        **{f"cast {g}": partial(_cast, g, "row spread") for g in casts.GRANULARITIES},
        **{f"cast {g} with NaN": partial(_cast, g, "nan") for g in casts.GRANULARITIES},
        "known scale": partial(
            casts.check_known_scale, casts.kernel(), "cpu", "boundaries", [WHOLE]
        ),
        "transpose": partial(casts.check_transpose, casts.transpose_kernel(), "cpu", [ODD, WHOLE]),
        "beside": partial(casts.check_beside, casts.beside_kernel(), "cpu"),
        "weights": partial(casts.check_side_by_side, casts.side_by_side_kernel(), "cpu"),
        "gradients": partial(casts.check_joined, casts.joining_kernel(), "cpu"),
        "strides": partial(casts.check_strides, casts.kernel(), "cpu", "block_1x32"),
        "sums": partial(_sums, "block_1x128"),
        "sums beside a slot": partial(_sums, "tensorwise"),
        "norm": partial(producers.check_norm, ops, "cpu", ODD, "gaussian", **few),
        "norm once": partial(producers.check_norm_once, ops, "cpu", (64, 512), "block_1x128"),
        "norm once with a scale": partial(
            producers.check_norm_once, ops, "cpu", (64, 512), "tensorwise"
        ),
        "norm finds amax": partial(
            producers.check_norm_once, ops, "cpu", (17, 272), "tensorwise", finds_amax=True
        ),
        "norm backward": partial(producers.check_norm_backward, ops, "cpu", WHOLE, True),
        "edges": partial(_producers_at_edges, ops),
        "producers of strided inputs": partial(producers.check_strides, ops),
        "swiglu": partial(producers.check_swiglu, ops, "cpu", WHOLE, "inf", True, **few),
        "smoothing": partial(producers.check_smoothing, ops, "cpu", ODD, "gaussian"),
        "swiglu backward": partial(producers.check_swiglu_backward, ops, "cpu", ODD, True, **few),
        "gate and up": partial(producers.check_gate_up, ops, "cpu", WHOLE, True, **few),
        "losses": partial(losses, loss_cases.check_rows, "capped", "everything"),
        "losses cast": partial(losses, loss_cases.check_quantize, "plain", "plain"),
        "adamw, 8 bits": partial(_steps, "bf16 with 8 bits", "bf16"),
        "adamw, no residual and 8-bit gradients": partial(_steps, "bf16 alone", "8-bit"),
        "adamw with a tensorwise payload": partial(_payload, "tensorwise", False),
        "adamw with a payload of blocks": partial(_payload, "block_128x128", True),
        "size of updates": _update_rms,
        "messages": partial(_messages, None),
        "messages, stochastic": partial(_messages, messages.KEYS["stochastic"]),
        "messages at edges": _messages_at_edges,
        "gradient": _gradient,
        "gradients at edges": _gradients_at_edges,
        "expert rows": partial(expert_rows, experts.check_rows, few=few_rows),
        "expert rows transposed": partial(rows_transposed, False),
        "tokens transposed": partial(rows_transposed, True),
        "expert gate": partial(expert_gate, "plain", False, BF16, (48,) if few_rows else (48, 131)),
        "expert gate, interleaved": partial(
            expert_gate, "interleaved with limits", True, BF16, (131,) if few_rows else (48, 131)
        ),
    }


_EDGES = ((1, 1), (0, 48), (48, 0), (3, 272), (128, 128), (133, 144))
"""Shapes of one element, of none, of few rows, of one tile, and of rows to pad."""
_CORNERS = ((75, 32), (1, 96), (5, 48), (36, 33), (1, 1), (0, 64))
"""Matrices in each layout of the optimizer: several chunks, one row, parts of groups, nothing."""


def _cast_everything(granularity: Any) -> None:
    cast, e5m2 = casts.kernel(), casts.CHOICES[2:]
    for kind in casts.KINDS:
        casts.check_cast(cast, "cpu", granularity, kind, [ODD, (130, 144)], casts.CHOICES[:1])
    if granularity == "tensorwise":
        for kind in ("row spread", "huge", "inf", "nan"):
            casts.check_known_scale(cast, "cpu", kind, [ODD])
    casts.check_cast(cast, "cpu", granularity, "row spread", [WHOLE], e5m2, thorough=WHOLE)
    casts.check_cast(cast, "cpu", granularity, "row spread", _EDGES, casts.CHOICES[1:2])
    casts.check_strides(cast, "cpu", granularity)
    if granularity == "rowwise":  # longer than the registers hold
        casts.check_cast(cast, "cpu", granularity, "row spread", [(3, 16500)], e5m2)


def _sum_everything() -> None:
    granularities: tuple[Any, ...] = ("tensorwise", "rowwise", "block_1x128", "block_1x32")
    with on_card():
        for granularity in granularities:
            casts.check_sums("cpu", granularity, ODD, "nan")
            casts.check_sums("cpu", granularity, (144, 133), transposed=True)
        casts.check_total("cpu")


def _step_values() -> None:
    step, weight = optimizer.kernel(), "bf16 with 8 bits"
    optimizer.check_choices(step, "cpu", (9, 96))
    optimizer.check_values(step, "cpu")
    for exponent in (-30, 30):
        optimizer.check_steps(step, "cpu", weight, "bf16", exponent, [(9, 64)], steps=1)
    optimizer.check_steps(step, "cpu", weight, "bf16", 0, _CORNERS, finds_amax=True)
    for granularity, power_of_two in (("tensorwise", True), ("block_128x128", False)):
        sizes = [(16, 160), (144, 32)]
        optimizer.check_payload(step, "cpu", weight, granularity, power_of_two, sizes)


def corners() -> dict[str, Callable[[], None]]:
    """Return cases of every value, layout and dtype of casts and steps, by name."""
    step = partial(optimizer.check_steps, optimizer.kernel(), "cpu")
    return {
        **{f"casts-{g}": partial(_cast_everything, g) for g in casts.GRANULARITIES},
        "sums": _sum_everything,
        **{
            f"adamw-{weight}-{grad}": partial(step, weight, grad, 0, _CORNERS, steps=1)
            for weight, grad in itertools.product(optimizer.WEIGHTS, optimizer.GRADS)
        },
        "adamw-values": _step_values,
    }
