"""Cases of rows of experts and of their activation: bits equal to the reference's on the CPU.

`ops` is `torch_fp8.ops.moe_rows` or `torch_fp8.ops.expert_gate`, or what stands for it; the
reference is always its own. Where the card's sigmoid is given, that of the activation computes with
it; else a code may rarely be the neighbour.
"""

from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.internals import E4M3, CastSpec, GateBackwardInputs, GateForm
from tests.kernel_cases.comparison import NEIGHBOURS, require, same_bits
from torch_fp8.ops import expert_gate, moe_rows
from torch_fp8.ops.moe_rows import Route, moe_route
from torch_fp8.ops.quantize import QuantizedTensor, quantize, saved_values

EXPERTS = 5
ROWWISE = CastSpec(E4M3, "rowwise", power_of_two=True)
COLUMNS = (48, 131, 272)
"""A part of a tile, columns that are moved one by one, and several tiles."""
CHOICES = {
    "random": torch.randint(0, EXPERTS, (61, 2), generator=torch.Generator().manual_seed(0)),
    "all to one": torch.full((147, 1), 2),
    "one token": torch.tensor([[3, 0, 1]]),
    "no token": torch.empty(0, 2, dtype=torch.long),
    "experts without tokens": torch.tensor([[1, 4]]).expand(21, 2),
    "experts elsewhere": torch.tensor([[0, EXPERTS], [EXPERTS, 3]]).repeat(9, 1),
    "eight of them": torch.arange(72).view(9, 8) % EXPERTS,
    "all elsewhere": torch.full((5, 2), EXPERTS),
}


def tokens_of(count: int, cols: int) -> Tensor:
    """Return tokens (T, K) of every size, one of them not finite, and one of zeros."""
    generator = torch.Generator().manual_seed(count + cols)
    x = torch.randn(count, cols, generator=generator)
    x *= 2.0 ** torch.randint(-9, 10, (count, 1), generator=generator)
    if count > 3:
        x[1, cols // 2], x[2] = float("nan"), 0
    return x


def payload_of(count: int, cols: int) -> QuantizedTensor:
    return quantize(tokens_of(count, cols), ROWWISE)


def routes(choices: Iterable[str] = CHOICES) -> dict[str, tuple[Route, int]]:
    return {name: (moe_route(CHOICES[name], EXPERTS), len(CHOICES[name])) for name in choices}


def moved(tensors: Iterable[Any], device: str) -> list[Any]:
    return [x.to(device) if isinstance(x, Tensor) else x for x in tensors]


def check_rows(
    ops: Any, device: str, columns: Iterable[int] = COLUMNS, choices: Iterable[str] = CHOICES
) -> None:
    for cols in columns:
        for name, (route, count) in routes(choices).items():
            x, what = payload_of(count, cols), f"{name}, {cols} columns"
            args = (x.qdata, x.scale, route.token)
            results = ops.gather_payload(*moved(args, device))
            wanted = moe_rows.gather_payload.reference(*args)
            for got, want in zip(results, wanted, strict=True):
                same_bits(got, want, f"gathered: {what}")
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                rows = tokens_of(len(route.slot), cols).clamp(-300, 300).to(dtype)
                got = ops.combine_rows(*moved((rows, route.row), device))
                want = moe_rows.combine_rows.reference(rows, route.row)
                same_bits(got, want, f"added up, {dtype}: {what}")


def check_transposition(
    ops: Any,
    device: str,
    gathers: bool,
    columns: Iterable[int] = COLUMNS,
    choices: Iterable[str] = CHOICES,
) -> None:
    for cols in columns:
        for name, (route, count) in routes(choices).items():
            x = payload_of(count if gathers else len(route.slot), cols)
            args = (x.qdata, x.scale, route.offs, route.token if gathers else None)
            _check_transposed(ops, device, args, f"{name}, {cols} columns")
        if not gathers:
            x, offs = payload_of(77, cols), torch.tensor([16, 16, 64], dtype=torch.int32)
            _check_transposed(ops, device, (x.qdata, x.scale, offs, None), "rows behind the groups")


def _check_transposed(ops: Any, device: str, args: tuple[Any, ...], what: str) -> None:
    results = ops.transpose_payload(*moved(args, device))
    wanted = moe_rows.transpose_payload.reference(*args)
    for got, want in zip(results, wanted, strict=True):
        same_bits(got, want, f"transposed: {what}")


FORMS = {
    "plain": GateForm(),
    "interleaved with limits": GateForm(True, True, 1.702, 7.0),
    "limits": GateForm(False, True, 1.702, 7.0),
}
Sigmoid = Callable[[Tensor], Tensor]


def _same_payload(got: Tensor, want: Tensor, exact: bool, what: str) -> None:
    if exact or (want.dtype.itemsize > 1 and not want.isfinite().all()):
        same_bits(got, want, what)
        return
    codes = [x.cpu().float().nan_to_num() for x in (got, want)]
    share = float((codes[0] != codes[1]).float().mean()) if want.numel() else 0.0
    require(share <= NEIGHBOURS + 2 / max(want.numel(), 1), f"{what}: {share:.1%} differ")


def check_gate(
    ops: Any,
    device: str,
    form: GateForm,
    bias: bool,
    dtype: torch.dtype = torch.bfloat16,
    widths: Iterable[int] = COLUMNS,
    sigmoid: Sigmoid | None = None,
    choices: Iterable[str] = ("random", "one token", "no token"),
) -> None:
    """Check payloads of the activation and of its gradients, what is saved, and scores'."""
    card = expert_gate.sigmoid if sigmoid is None else sigmoid
    for width in widths:
        for name, (route, count) in routes(choices).items():
            rows, what = len(route.slot), f"{name}, {width} wide, {form}"
            h = tokens_of(rows, 2 * width).clamp(-300, 300).to(dtype)
            generator = torch.Generator().manual_seed(rows)
            score = torch.rand(rows, generator=generator) * (route.slot < 2 * count)
            added = torch.randn(EXPERTS, 2 * width, generator=generator) if bias else None
            args = (h, score, route.offs, added)
            results = ops.expert_gate_quantize(*moved(args, device), form, True)
            with mock.patch.object(expert_gate, "sigmoid", card):
                wanted = expert_gate.expert_gate_quantize.reference(*args, form, True)
            unsaved = ops.expert_gate_quantize(*moved(args, device), form, False)
            for got, want in zip(unsaved, (*results[:2], None, None, None, None), strict=True):
                same_bits(got, want if want is None else want.cpu(), f"not saved: {what}")
            for got, want in zip(results[:2], wanted[:2], strict=True):
                _same_payload(got, want, sigmoid is not None, f"activation: {what}")
            for got, want in zip(results[2:], wanted[2:], strict=True):
                same_bits(got, want, f"saved: {what}")
            grad = tokens_of(rows, width).flip(0).clamp(-300, 300).to(dtype)
            inputs = GateBackwardInputs(grad, score, *wanted[2:])
            _check_gate_backward(ops, device, form, inputs, card, sigmoid is not None, what)


def _check_gate_backward(
    ops: Any,
    device: str,
    form: GateForm,
    inputs: GateBackwardInputs,
    card: Sigmoid,
    exact: bool,
    what: str,
) -> None:
    *results, dscore = ops.expert_gate_backward(GateBackwardInputs(*moved(inputs, device)), form)
    with mock.patch.object(expert_gate, "sigmoid", card):
        *wanted, want_score = expert_gate.expert_gate_backward.reference(inputs, form)
    for got, want in zip(results, wanted, strict=True):
        _same_payload(got, want, exact, f"backward: {what}")
    grad, _, gate_q, gate_s, up_q, up_s = inputs
    act = expert_gate.activation(saved_values(gate_q, gate_s), saved_values(up_q, up_s), form)
    bound = (grad.float() * act).abs().sum(1) * max(grad.shape[1], 64) * 2.0**-24
    close = ((dscore.cpu() - want_score).abs() <= bound) | want_score.isnan()
    require(close.all(), f"scores: {what}")
    require(torch.equal(dscore.cpu().isnan(), want_score.isnan()), f"NaN of scores: {what}")
