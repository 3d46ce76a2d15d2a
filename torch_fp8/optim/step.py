"""The step of parameters: `torch_fp8.ops.adamw` for large weights, torch's Adam for the rest."""

import operator
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adam import adam

from torch_fp8.config import FP8Config
from torch_fp8.kernels.arguments import (
    GradientParts,
    StepScalars,
    WeightMatrix,
    WeightPayload,
)
from torch_fp8.ops.adamw import adamw_step_reference, update_rms_reference
from torch_fp8.ops.gemm_operand import aligned
from torch_fp8.ops.registry import emulates_casts
from torch_fp8.optim.residual import join_weight, set_residual, settled_residual
from torch_fp8.optim.state import State, shard_origin
from torch_fp8.quantization.block_scaled import matrix_shape
from torch_fp8.quantization.payload_shape import SQUARE
from torch_fp8.quantization.split_float import EXACT_BITS, RESIDUAL_BITS
from torch_fp8.quantization.stochastic_rounding import stream_keys, stream_state
from torch_fp8.tensor.dtensor import local
from torch_fp8.tensor.float8_grad import Float8Grad
from torch_fp8.tensor.halves import VERSIONS, Halves, split_matrix
from torch_fp8.tensor.wide_grad import WideGrad

_MIN_EPS = 2.0**-63
"""The smallest eps of a step; its square is still a normal float32 number. 8-bit gradients round
small values to zero, where m / (sqrt(v) + eps) would be 0 / 0 if eps were 0.
"""


class Entry(NamedTuple):
    """A parameter to step.

    Attributes:
        number: its index among all parameters of the optimizer.
        group, parameter, state: its group, itself, its state.
        grad: its gradient, in the form in which it is stored.
        halves: this rank's halves of it, or None if it is not split.
    """

    number: int
    group: dict[str, Any]
    parameter: Tensor
    state: State
    grad: Tensor
    halves: Halves | None


Prepared = tuple[WeightMatrix, dict[str, Any], State, Tensor | None, Halves | None]
"""A matrix to step, its group and state, where to copy its weight to, and its halves."""


class KeptMatrix(NamedTuple):
    """The matrix of a split weight from one step to the next, which lives as long as its halves.

    Attributes:
        matrix: the matrix, without gradient and moments.
        codes_of: function from a moment in the optimizer's state to its codes.
        first, second: weak references to the codes of the moments.
    """

    matrix: WeightMatrix
    codes_of: Callable[[Any], Any]
    first: "weakref.ref[Tensor]"
    second: "weakref.ref[Tensor]"

    @staticmethod
    def of(matrix: WeightMatrix, state: State) -> "KeptMatrix":
        is_sharded = isinstance(state["exp_avg"], DTensor)
        codes_of = operator.attrgetter("_local_tensor.codes" if is_sharded else "codes")
        first, second = weakref.ref(matrix.exp_avg.qdata), weakref.ref(matrix.exp_avg_sq.qdata)
        bare: Any = dict.fromkeys(("grad", "exp_avg", "exp_avg_sq"))
        return KeptMatrix(matrix._replace(**bare, memo=[]), codes_of, first, second)


def current_matrix(number: int, halves: Halves, state: State, grad: Tensor) -> WeightMatrix | None:
    """Return the last step's matrix with a gradient, or None if weight or moments have changed."""
    last: KeptMatrix | None = halves.matrix
    if last is None or halves.stepped != halves.version:
        return None
    matrix, codes_of, first, second = last
    try:
        exp_avg, exp_avg_sq = codes_of(state["exp_avg"]), codes_of(state["exp_avg_sq"])
    except (KeyError, AttributeError):  # a new state, or plain tensors that were assigned
        return None
    same = exp_avg[0] is first() and exp_avg_sq[0] is second()
    if not same or not state["step"].is_cpu:
        return None
    gradient = gradient_matrix(grad, matrix.weight.shape)
    if matrix.payload is not None:
        codes = gradient.qdata if isinstance(gradient, GradientParts) else gradient
        if codes.data_ptr() % 16:
            return None
    others: Any = (*matrix[5:-1], number)
    return WeightMatrix(*matrix[:2], gradient, exp_avg, exp_avg_sq, *others)


def step_large(prepared: list[Prepared], entries: list[Entry], config: FP8Config) -> None:
    """Step parameters with 8-bit states; their ``step`` already counts this step.

    A weight that is not contiguous is copied, stepped and written back. These weights come last,
    one by one, because they may share memory, as in ``decoder.weight = Parameter(weight.t())``.

    Args:
        prepared: matrices of parameters of which only the gradient has changed; those of `entries`
            are added to this list.
        entries: the other parameters.
        config: the optimizer's configuration.
    """
    alone = []
    for entry in entries:
        halves, write_back = entry.halves, None
        weight = local(entry.parameter) if halves is None else halves.high
        if not weight.is_contiguous():
            if len(prepared) + len(entries) > 1:
                alone.append(entry)
                continue
            write_back = weight
        matrix = _matrix(entry, weight.contiguous(), config)
        if halves is not None and halves.payload is not None:
            matrix = _with_payload(matrix, halves)
        if halves is not None and write_back is None:
            halves.matrix = KeptMatrix.of(matrix, entry.state)
        prepared.append((matrix, entry.group, entry.state, write_back, halves))
    steps = [(id(group), float(state["step"])) for _, group, state, _, _ in prepared]
    groups = {at: p[1] for at, p in zip(steps, prepared, strict=True)}
    of_groups = {at: _scalars(group, at[1], config.seed) for at, group in groups.items()}
    every_half = [halves for *_, halves in prepared if halves is not None]
    for halves, version in zip(every_half, VERSIONS, strict=False):
        halves.version = version  # before the kernels: a step may be interrupted
    amaxes = [p[0].amax for p in prepared if p[0].amax is not None]
    if amaxes:
        torch._foreach_copy_(amaxes, [torch.zeros_like(amaxes[0])] * len(amaxes))
    devices = [p[0].weight.device for p in prepared]
    for device in dict.fromkeys(devices):
        chosen = [i for i, x in enumerate(devices) if x == device]
        matrices = [(prepared[i][0], of_groups[steps[i]]) for i in chosen]
        _step_on(device, matrices, [prepared[i][2] for i in chosen], config)
    for matrix, _, _, write_back, halves in prepared:
        if write_back is not None:
            write_back.copy_(matrix.weight.view(write_back.shape))
        if halves is not None:
            halves.measured = halves.stepped = halves.version
            if matrix.payload is not None:
                halves.filled = halves.version
            if halves.cast is not None:
                halves.current_payload(halves.cast)
    for entry in alone:
        step_large([], [entry], config)


def _with_payload(matrix: WeightMatrix, halves: Halves) -> WeightMatrix:
    """Let the step also write the FP8 payload that a weight keeps, if its kernels can."""
    cast, payload = halves.cast, halves.payload
    if cast is None or payload is None or matrix.weight.device.type != "cuda":
        return matrix
    if cast.spec.granularity not in SQUARE or emulates_casts(matrix.weight.device):
        return matrix
    from torch_fp8.kernels.adamw import writes_payload

    qdata, scale, granularity = payload
    by_step = WeightPayload(granularity, cast.spec.power_of_two, qdata, scale)
    return matrix._replace(payload=by_step) if writes_payload(matrix, by_step) else matrix


def _step_on(device: torch.device, entries: list[Any], states: Any, config: FP8Config) -> None:
    if device.type == "meta":
        return  # only the bytes of states and residuals are counted
    multipliers: list[Tensor | None] = []
    on_card = device.type == "cuda"
    if on_card:
        from torch_fp8.kernels.adamw import adamw_step, update_rms
    if config.update_clipping:
        # StableAdamW divides the rate of the update and of the decoupled decay: lr / max(1, RMS).
        of_all = update_rms(entries) if on_card else [update_rms_reference(*e) for e in entries]
        for state, rms in zip(states, of_all, strict=True):
            state["update_rms"] = rms
            multipliers.append(1 / rms.clamp(min=1))
    if on_card:
        adamw_step(entries, multipliers)
        return
    multipliers = multipliers or [None] * len(entries)
    for (matrix, scalars), multiplier in zip(entries, multipliers, strict=True):
        adamw_step_reference(matrix, scalars, multiplier)


def step_small(group: dict[str, Any], entries: list[Entry]) -> None:
    """Step one group's parameters that have full-precision moments, with torch's own function.

    Only this rank's part of a DTensor is passed on, because torch's function does not accept lists
    that mix DTensors and other tensors.
    """
    if not entries:
        return
    weights = [_full_precision(entry.parameter) for entry in entries]
    beta1, beta2 = group["betas"]
    names = "decoupled_weight_decay", "weight_decay", "eps", "maximize"
    adam(
        weights,
        [local(e.grad).to(w.dtype) for e, w in zip(entries, weights, strict=True)],
        [local(entry.state["exp_avg"]) for entry in entries],
        [local(entry.state["exp_avg_sq"]) for entry in entries],
        [],
        [entry.state["step"] for entry in entries],
        has_complex=any(weight.is_complex() for weight in weights),
        amsgrad=False,
        beta1=float(beta1),
        beta2=float(beta2),
        lr=float(group["lr"]),
        **{name: group[name] for name in names},
    )
    for entry, weight in zip(entries, weights, strict=True):
        parameter = entry.parameter
        if parameter.dtype == torch.bfloat16:
            high, residual = split_matrix(weight, EXACT_BITS)
            local(parameter).copy_(high)
            set_residual(parameter, residual)
        elif parameter.dtype == torch.float16:
            local(parameter).copy_(weight)


def _full_precision(parameter: Tensor) -> Tensor:
    if parameter.dtype != torch.bfloat16:
        weight = local(parameter)
        return weight.float() if weight.dtype == torch.float16 else weight
    settled_residual(parameter)  # moves the residual to the weight's device
    return join_weight(parameter)


def settle_weight(parameter: Tensor, halves: Halves, seed: int, state: State, index: int) -> None:
    """Bring the residual of a weight to the device and the 8 bits that its step needs.

    Args:
        parameter: the weight, which other code may have written.
        halves: this rank's halves of it.
        seed, state, index: the optimizer's seed, the weight's state (for its ``step``) and the
            weight's index; they key the random bits.
    """
    if halves.residual is not None and halves.residual.device != halves.high.device:
        halves.residual = halves.residual.to(halves.high.device)
    if halves.bits != RESIDUAL_BITS:
        keys = stream_keys(seed, -1 - int(state["step"]), index)
        halves.settle(keys, shard_origin(parameter))


def settled_gradient(parameter: Tensor, grad: Tensor) -> Tensor:
    """Redistribute a DTensor's gradient to the placements of the parameter, and return it.

    If ranks have different tokens, torch leaves the gradient of a replicated parameter (a norm
    under sequence parallelism) as partial sums.
    """
    is_sharded = isinstance(grad, DTensor) and isinstance(parameter, DTensor)
    if is_sharded and grad.placements != parameter.placements:
        parameter.grad = grad = grad.redistribute(placements=parameter.placements)
    return grad


def _matrix(entry: Entry, weight: Tensor, config: FP8Config) -> WeightMatrix:
    number, _, parameter, state, grad, halves = entry
    first: Any = local(state["exp_avg"])
    second: Any = local(state["exp_avg_sq"])
    shape = matrix_shape(weight.shape)
    row, col, row_length = shard_origin(parameter)
    residual = None if halves is None else halves.residual
    if halves is None and parameter.dtype == torch.bfloat16:
        if config.keeps_residuals:
            residual = settled_residual(parameter)
        else:
            set_residual(parameter, None)
    return WeightMatrix(
        weight=weight if weight.ndim == 2 else weight.view(shape),  # (R, K)
        residual=residual,
        grad=gradient_matrix(grad, shape),
        exp_avg=first.codes,
        exp_avg_sq=second.codes,
        row=row,
        col=col,
        row_length=row_length,
        amax=None if halves is None else halves.amax,
        number=number,
    )


def gradient_matrix(grad: Tensor, shape: tuple[int, ...]) -> Tensor | GradientParts:
    """Return a gradient in the form that the step accepts.

    Args:
        grad: the gradient, in any form that a parameter's ``grad`` can have.
        shape: (R, K), the weight's matrix.
    Returns:
        An aligned, contiguous (R, K) bfloat16 or float32 tensor, or the parts of an 8-bit gradient.
    """
    if type(grad) is not Tensor:
        grad = local(grad)
        if isinstance(grad, Float8Grad):
            return grad.codes
        grad = grad.stored if isinstance(grad, WideGrad) else grad
    if grad.dtype not in (torch.bfloat16, torch.float32):
        grad = grad.float()
    grad = grad.contiguous()
    grad = aligned(grad) if grad.storage_offset() else grad
    return grad if grad.ndim == 2 else grad.view(shape)  # (R, K)


def _scalars(group: dict[str, Any], step: float, seed: int) -> StepScalars:
    """Return the scalars of a group's parameters at this step."""
    beta1, beta2 = (float(beta) for beta in group["betas"])
    lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
    decoupled = bool(group["decoupled_weight_decay"])
    return StepScalars(
        beta1_complement=1 - beta1,
        beta2=beta2,
        beta2_complement=1 - beta2,
        step_size=lr / (1 - beta1**step),
        inv_sqrt_correction=(1 - beta2**step) ** -0.5,
        eps=max(float(group["eps"]), _MIN_EPS),
        decay=1 - lr * weight_decay if decoupled else 1.0,
        weight_decay=0.0 if decoupled else weight_decay,
        maximize=bool(group["maximize"]),
        stream=stream_state(seed, int(step)),
    )
