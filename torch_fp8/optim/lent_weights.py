"""Temporary float32 copies of split weights for optimizers that run their own step.

The user's optimizer steps plain float32 tensors: it may call kernels that take addresses, exchange
``p.data``, or compile its arithmetic. So while it steps, its groups return a float32 copy of each
weight that is stored in two halves, with a float32 gradient. A copy is written back into the halves
as soon as nothing else refers to it. A loop over the weights therefore holds two copies at a time;
a step that first collects all weights in a list holds as many as it collects.

The optimizer's ``state`` accepts a copy as a key for the state of its weight.
"""

import contextlib
import sys
from collections import UserDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torch_fp8.optim.step import shard_origin
from torch_fp8.quantization.stochastic_rounding import stream_keys
from torch_fp8.tensor.dtensor import local, with_data
from torch_fp8.tensor.encoded import plain
from torch_fp8.tensor.exchange import attributes_of, stored_grad
from torch_fp8.tensor.halves import Halves
from torch_fp8.tensor.split_weight import halves_of

_LENT = "_fp8_lent"
_OWN_REFERENCES = 2  # getrefcount of a copy in Lending's dict only: the dict and the argument


class Lending:
    """The copies of one step.

    Args:
        seed, step: the optimizer's seed and step; with a weight's index they key the rounding.
        indices: the index of each weight.
    """

    def __init__(self, seed: int, step: int, indices: dict[Tensor, int]) -> None:
        self._seed, self._step, self._indices = seed, step, indices
        self._copies: dict[Tensor, nn.Parameter] = {}

    def lend(self, parameter: Tensor) -> Tensor:
        """Return a float32 copy of a split weight with a gradient; other parameters themselves."""
        self.take_back()
        halves = halves_of(parameter)
        if halves is None or stored_grad(parameter) is None:
            return parameter
        if parameter not in self._copies:
            self._copies[parameter] = _copy(parameter, halves)
        return self._copies[parameter]

    def take_back(self, *, everything: bool = False) -> None:
        """Write unused copies (or all: `everything`) back into the halves of their weights."""
        for parameter in list(self._copies):
            if everything or sys.getrefcount(self._copies[parameter]) <= _OWN_REFERENCES:
                self._put_back(parameter, self._copies.pop(parameter))

    def _put_back(self, parameter: Tensor, copy: nn.Parameter) -> None:
        halves, weight = halves_of(parameter), local(copy.detach())
        assert halves is not None
        if weight.shape != halves.high.shape:
            raise RuntimeError(
                f"the optimizer changed the shape of a weight from {tuple(halves.high.shape)} to "
                f"{tuple(weight.shape)}; leave its weights unsplit with "
                "FP8Config(split_weights=False)"
            )
        torch.autograd.graph.increment_version([parameter])
        halves.write(weight.to(halves.high.device, torch.float32).contiguous())
        keys = stream_keys(self._seed, self._step, self._indices[parameter])
        halves.settle(keys, shard_origin(parameter))
        if copy.grad is None:
            parameter.grad = None


class LentList(Sequence[Tensor]):
    """A group's list of parameters that returns float32 copies of split weights."""

    def __init__(self, parameters: list[Tensor], lending: Lending) -> None:
        self._parameters, self._lending = parameters, lending

    def __iter__(self) -> Iterator[Tensor]:
        return (self._lending.lend(parameter) for parameter in self._parameters)

    def __getitem__(self, index: Any) -> Any:
        chosen = self._parameters[index]
        if isinstance(index, slice):
            return LentList(chosen, self._lending)
        return self._lending.lend(chosen)

    def __len__(self) -> int:
        return len(self._parameters)

    def __add__(self, others: list[Tensor]) -> list[Tensor]:
        return [*self, *others]


class LentState(UserDict[Any, Any]):
    """The optimizer's ``state``, in which a copy is a key for its weight's state."""

    def __init__(self, state: Any) -> None:
        self.data = state

    def __getitem__(self, key: Any) -> Any:
        return self.data[_owner(key)]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.data[_owner(key)] = value

    def __delitem__(self, key: Any) -> None:
        del self.data[_owner(key)]

    def __contains__(self, key: object) -> bool:
        return _owner(key) in self.data


@contextlib.contextmanager
def lent(optimizer: Optimizer, lending: Lending, chosen: set[Tensor]) -> Iterator[None]:
    """Make an optimizer's groups return float32 copies of their split weights in this context.

    Args:
        optimizer: the optimizer, whose groups stay the same objects.
        lending: the copies.
        chosen: the parameters that the groups contain meanwhile.
    """
    groups, state = [(group, group["params"]) for group in optimizer.param_groups], optimizer.state
    optimizer.state = LentState(state)
    try:
        for group, parameters in groups:
            group["params"] = LentList([p for p in parameters if p in chosen], lending)
        yield
    finally:
        optimizer.state = state
        for group, parameters in groups:
            group["params"] = parameters
        lending.take_back(everything=True)


def _owner(key: Any) -> Any:
    return vars(key).get(_LENT, key) if isinstance(key, Tensor) else key


def _copy(parameter: Tensor, halves: Halves) -> nn.Parameter:
    copy = nn.Parameter(with_data(parameter, halves.join()), parameter.requires_grad)
    attributes = {k: v for k, v in attributes_of(parameter).items() if k not in vars(copy)}
    vars(copy).update({**attributes, _LENT: parameter})
    grad = stored_grad(parameter)
    assert grad is not None
    copy.grad = with_data(grad, plain(local(grad)).to(torch.float32))
    return copy
