"""Passes in which converted modules compute in high precision, by the classes that they had.

Our autograd functions save FP8 payloads, not their inputs. No graph leads back from a payload, so
most gradients cannot be differentiated again, and transforms of torch.func and forward-mode AD find
no rule for our operators. A program that torch exports or traces shall run without this package.
All of these get torch's own operators: the transforms and the tracers by themselves, a second
differentiation of the gradients of weights within `high_precision`.
"""

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace

requested = 0
"""The number of `high_precision` blocks that run now."""


@contextlib.contextmanager
def high_precision() -> Iterator[None]:
    """Run converted modules in high precision within, with gradients that can be differentiated.

    Hessian products, second-order MAML and penalties on the gradients of weights need it. Forward
    and backward belong inside, and all threads notice. Histories of delayed scaling stand still.
    """
    global requested
    requested += 1
    try:
        yield
    finally:
        requested -= 1


class RunsFP8(nn.Module):
    """The part of a converted module that knows whether its forwards run in FP8."""

    fp8_config: Any

    @property
    def runs_fp8(self) -> bool:
        """Whether a forward runs in FP8 now, unless it is `is_transformed`."""
        if requested or torch.compiler._is_exporting_flag:
            return False
        return self.training or bool(self.fp8_config.eval_fp8)


def is_transformed() -> bool:
    """Return whether this eager forward is transformed, or traced, with torch's own operators.

    AOTAutograd, which traces and functionalizes, takes our operators.
    """
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        _warn_of_transforms()
        return True
    if _symbolic_trace._is_fx_tracing_flag:  # by make_fx, too
        functional = torch._C._TorchDispatchModeKey.FUNCTIONAL
        return torch._C._get_dispatch_mode(functional) is None
    return torch._C._get_tracing_state() is not None


@functools.cache
def _warn_of_transforms() -> None:
    warnings.warn(
        "FP8: converted modules run in high precision under transforms of torch.func (grad, vjp, "
        "jvp, vmap) and forward-mode AD",
        stacklevel=2,
    )
