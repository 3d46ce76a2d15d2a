"""`MuonOptimizer`: Muon with its own step, split weights and an int8 momentum.

A weight takes 2 + 1 bytes, its BF16 gradient 2 and its momentum 1.03: 6.03, and 4.03 with gradient
release. While Muon steps a weight, the state contains a float32 momentum. It is encoded again
afterwards, so the update of a step uses the momentum before it is rounded.

``torch.optim.Muon`` is supported, and classes named ``Muon`` or ``SingleDeviceMuon`` with the same
state. States that such a class keeps for other weights, for example Adam's, stay as
they are.

A weight that FSDP2 has sharded by rows is stepped here, with a single int8 collective.
``torch.optim.Muon`` on DTensors would gather a matrix several times in each of its five
Newton-Schulz steps, in BF16. Here each rank updates its part of the momentum, quantizes its part of
the matrix to be orthogonalized, and all-gathers the codes once: 1.03 bytes per element. Each rank
then computes the whole update and applies its own rows.
"""

import contextlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torch_fp8.config import FP8Config
from torch_fp8.optim.converted import ConvertedOptimizer, run_closure, unhooked
from torch_fp8.optim.gradient_slot import attach_slots, finish_release
from torch_fp8.optim.split_optimizer import SplitOptimizer, widen_gradient
from torch_fp8.optim.state import is_large, shard_origin
from torch_fp8.quantization.linear_int8 import LinearInt8, decode, encode
from torch_fp8.tensor.dtensor import local, with_data
from torch_fp8.tensor.encoded import plain
from torch_fp8.tensor.exchange import stored_grad
from torch_fp8.tensor.quantized_state import Int8Momentum

BUFFER = "momentum_buffer"
_METHODS = ("step", "_init_group")
_COLUMNS = 1


class MuonOptimizer(SplitOptimizer):
    """The class that `convert_optimizer` puts in front of Muon."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Run a closure, then the user's Muon's step, on float32 momenta."""
        loss = run_closure(self, closure)
        self.fp8_hooks_restored += attach_slots(self)
        step = self._next_step()
        stepped = set(self.fp8_released)
        finish_release(self)
        if inspect.unwrap(self._fp8_base.step) is inspect.unwrap(torch.optim.Muon.step):
            for _, group, parameter in self.indexed_parameters():
                if stored_grad(parameter) is not None and steps_by_shards(parameter):
                    with self._decoded({parameter}, step):
                        state = self.state[parameter]
                        if BUFFER not in state:
                            state[BUFFER] = torch.zeros_like(parameter)
                        step_shard(parameter, state[BUFFER], group)
                    stepped.add(parameter)
        left = [p for _, _, p in self.indexed_parameters() if p not in stepped]
        alone = self._fp8_base.__module__.startswith("torch.optim")
        for parameters in [{p} for p in left] if alone else [set(left)]:
            self._step_chosen(parameters, step, **options)
        self.fp8_steps = step
        return loss

    def step_parameters(self, indexed: Iterable[tuple[int, dict[str, Any], Tensor]]) -> None:
        """Step some of `indexed_parameters` in backward, as the next ``step`` would."""
        with torch.no_grad():
            self._step_chosen({p for _, _, p in indexed}, self.fp8_steps + 1)

    def _step_chosen(self, chosen: set[Tensor], step: int, **options: Any) -> None:
        """Run the user's Muon's step while its groups contain only some of the parameters."""
        groups = [(group, group["params"]) for group in self.param_groups]
        for parameter in chosen:
            widen_gradient(parameter)
        with self._decoded(chosen, step):
            try:
                for group, parameters in groups:
                    group["params"] = [p for p in parameters if p in chosen]
                unhooked(self._fp8_base.step)(self, **options)
            finally:
                for group, parameters in groups:
                    group["params"] = parameters

    @contextlib.contextmanager
    def _decoded(self, chosen: set[Tensor], step: int) -> Iterator[None]:
        """Hold the momenta of some weights in their dtype, and round these weights afterwards."""
        with self.rounded(step):
            indices = {p: i for i, _, p in self.indexed_parameters() if p in chosen}
            try:
                for parameter in indices:
                    state = self.state.get(parameter, {})
                    if isinstance(local(state.get(BUFFER)), Int8Momentum):
                        momentum = local(state[BUFFER]).dequantize().to(parameter.dtype)
                        state[BUFFER] = with_data(parameter, momentum, tuple(parameter.shape))
                yield
            finally:
                for parameter, i in indices.items():
                    counters = self.fp8_config.seed, step, i
                    settle_momentum(parameter, self.state.get(parameter, {}), counters)

    def set_config(self, config: FP8Config) -> None:
        """Set the parts of a configuration that apply to Muon, including gradient release."""
        super().set_config(config)
        released = config.gradient_release and releases(self)
        self.fp8_config = replace(self.fp8_config, gradient_release=released)
        self._step_supports_amp_scaling = released
        self._settle()

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's own state with float32 momenta, and the rounding's keys."""
        packed = super().state_dict()
        for key, state in packed["state"].items():
            momentum = state.get(BUFFER)
            if isinstance(local(momentum), Int8Momentum):
                dense = with_data(momentum, local(momentum).dequantize(), tuple(momentum.shape))
                packed["state"][key] = {**state, BUFFER: dense}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of the original optimizer; momenta round to nearest."""
        super().load_state_dict(state_dict)
        self._settle()

    def _settle(self) -> None:
        for parameter, state in self.state.items():
            settle_momentum(parameter, state, None)


def settle_momentum(
    parameter: Tensor, state: dict[str, Any], counters: tuple[int, int, int] | None
) -> None:
    """Encode the plain momentum of a large weight as int8.

    Args:
        parameter: the weight.
        state: the weight's optimizer state.
        counters: seed, step and parameter index that key the rounding thresholds, or None to round
            to nearest.
    """
    momentum = state.get(BUFFER)
    if not isinstance(momentum, Tensor) or isinstance(local(momentum), Int8Momentum):
        return
    if not is_large(parameter) or momentum.shape != parameter.shape:
        return
    encoded = Int8Momentum.zeros(local(parameter))
    if counters is None:
        encoded.store(local(momentum))
    else:
        encoded.round_step(local(momentum), counters, shard_origin(parameter))
    state[BUFFER] = with_data(parameter, encoded, tuple(parameter.shape))


def is_muon(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is a Muon with a momentum buffer in its state."""
    base = optimizer._fp8_base if isinstance(optimizer, ConvertedOptimizer) else type(optimizer)
    if not any("Muon" in cls.__name__ for cls in base.__mro__):
        return False
    functions = [inspect.unwrap(getattr(base, name)) for name in _METHODS if hasattr(base, name)]
    return any(BUFFER in function.__code__.co_consts for function in functions)


def releases(optimizer: ConvertedOptimizer) -> bool:
    """Return whether Muon can step a single weight in backward, without other ranks."""
    base = optimizer._fp8_base
    sharded = any(isinstance(p, DTensor) for _, _, p in optimizer.indexed_parameters())
    own = base.__module__.startswith("torch.optim") or "SingleDevice" in base.__name__
    return own and not sharded


def steps_by_shards(parameter: Tensor) -> bool:
    """Return whether a weight is a matrix sharded by rows."""
    if not isinstance(parameter, DTensor) or parameter.ndim != 2:
        return False
    return all(p.is_replicate() or p.is_shard(0) for p in parameter.placements)


def step_shard(weight: Tensor, momentum: Tensor, group: dict[str, Any]) -> None:
    """Step this rank's part of a weight as ``torch.optim.Muon`` would step the whole.

    Args:
        weight: float32 DTensor (R, K) with its gradient.
        momentum: float32 DTensor (R, K) of the same sharding.
        group: options of ``torch.optim.Muon``.
    """
    grad, buffer, shard = (local(t.detach()) for t in (weight.grad, momentum, weight))
    grad = plain(grad)
    beta, rate = group["momentum"], float(group["lr"])
    buffer.lerp_(grad, 1 - beta)
    update = grad.lerp(buffer, beta) if group["nesterov"] else buffer
    row, _, _ = shard_origin(weight)
    whole = _orthogonal(_gathered(weight, update), group)
    shard.mul_(1 - rate * group["weight_decay"])
    rows = whole[row : row + len(shard)].to(shard.dtype)  # (R, K) -> (R / ranks, K)
    shard.add_(rows, alpha=-rate * _adjustment(weight.shape, group["adjust_lr_fn"]))


def _gathered(weight: Tensor, update: Tensor) -> Tensor:
    """All-gather an update's int8 codes: (R / ranks, K) float32 on each rank -> (R, K) bfloat16."""
    codes, scale = encode(update)
    message = torch.cat([codes, scale.view(torch.int8)], _COLUMNS)  # (R / ranks, K + 2 groups)
    whole: Any = with_data(weight, message, (weight.shape[0], message.shape[_COLUMNS]))
    # (R, K) and (R, 2 groups)
    codes, scale = whole.full_tensor().split([codes.shape[1], 2 * scale.shape[1]], _COLUMNS)
    return decode(LinearInt8(codes, scale.contiguous().view(torch.bfloat16))).bfloat16()


def _orthogonal(x: Tensor, group: dict[str, Any]) -> Tensor:
    """Run the Newton-Schulz iteration on (R, K) in BF16, as ``torch.optim.Muon`` does."""
    a, b, c = group["ns_coefficients"]
    tall = x.shape[0] > x.shape[1]
    y = x.T if tall else x  # wide, so that the Gram matrix is the smaller one
    y = y / y.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = y @ y.T
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.T if tall else y


def _adjustment(shape: torch.Size, name: str | None) -> float:
    """Return the learning rate factor for a matrix of this shape."""
    rows, cols = shape
    if name == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    return math.sqrt(max(1.0, rows / cols)) if name in (None, "original") else 1.0
