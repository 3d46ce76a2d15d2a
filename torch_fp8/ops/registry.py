"""The registry of this package's operators, in ``torch.library`` and as eager code calls them.

torch's dispatcher takes 5 to 7 us of the host's time for an operator whose implementation is
Python, and a Llama block calls 28. If tensors are plain ones on CUDA, no dispatch mode is on and
nothing is compiled, nobody needs to see the call, and it goes straight to the implementation.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _len_torch_dispatch_stack

operators: Any = SimpleNamespace()
"""Functions that call the operators, by name; they take positional arguments only, as
``torch.ops.torch_fp8``.
"""

_LIBRARY = torch.library.Library("torch_fp8", "DEF")


def define(
    schema: str,
    cpu: Callable[..., Any],
    cuda: Callable[..., Any],
    fake: Callable[..., Any],
    eager: Callable[..., Any] | None = None,
) -> None:
    """Define ``torch.ops.torch_fp8.<name>`` and ``operators.<name>``.

    Args:
        schema: as for `torch.library.Library.define`; the first argument is a tensor.
        cpu, cuda, fake: take and return what it says.
        eager: instead of `cuda` where the dispatcher is not asked, which alone minds what is
            returned; `operators.<name>` may then return that, too.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, cpu, "CPU")
    _LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"torch_fp8::{name}", fake, lib=_LIBRARY)
    operator = getattr(torch.ops.torch_fp8, name).default
    shortcut = eager or cuda

    def call(x: Tensor, *args: Any) -> Any:
        if torch.compiler.is_compiling() or is_watched(x):
            return operator(x, *args)
        return shortcut(x, *args)

    setattr(operators, name, call)


def is_watched(x: Tensor) -> bool:
    """Return whether the dispatcher must see an operator on x: a mode, a subclass, autograd or the
    CPU.
    """
    return (
        not _on_cuda(x)
        or _len_torch_dispatch_stack() > 0
        or type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__
        or (x.requires_grad and torch.is_grad_enabled())
    )


def _on_cuda(x: Tensor) -> bool:
    return x.is_cuda
