"""`Step`: one of the operators that make a view of a tensor without memory of its own."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Step:
    """One operator of the chain that makes a view; `index` where it returns several."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int | None = None

    def __call__(self, x: Tensor) -> Tensor:
        value = self.func(x, *self.args, **self.kwargs)
        result: Tensor = value if self.index is None else value[self.index]
        return result


@functools.cache
def makes_view(func: Any) -> bool:
    """Whether an operator returns views of its first argument and writes nothing."""
    schema = func._schema
    infos = [result.alias_info for result in schema.returns]
    if not infos or any(info is None or info.is_write for info in infos):
        return False
    first = schema.arguments[0].alias_info
    return first is not None and not first.is_write


def geometry_of(weight: Tensor) -> Tensor:
    """A tensor without data that lies as `weight` does."""
    size, stride, offset = weight.shape, weight.stride(), weight.storage_offset()
    whole = torch.empty_strided(size, stride, dtype=weight.dtype, device="meta")
    if not offset:
        return whole
    reach = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1
    return torch.empty(reach, dtype=weight.dtype, device="meta").as_strided(size, stride, offset)
