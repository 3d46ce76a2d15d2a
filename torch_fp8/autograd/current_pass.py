"""What kind of pass runs now: in FP8 or in high precision, and which of a checkpoint's two.

**High precision.** Our autograd functions save FP8 payloads, not their inputs. No graph leads back
from a payload, so most gradients cannot be differentiated again, and transforms of torch.func and
forward-mode AD find no rule for our operators. A program that torch exports or traces shall run
without this package. All of these get torch's own operators, by the classes that converted modules
had: the transforms and the tracers by themselves, a second differentiation of the gradients of
weights within `high_precision`.

**Checkpoints.** ``torch.utils.checkpoint`` runs a region twice: in forward, where it throws away
what autograd would save, and in backward, where it keeps that. With ``use_reentrant=False`` the
first pass runs with gradients enabled, and what a layer makes for backward alone is made in vain: a
stand-in takes its place, with the dtype, shape and device that checkpoint compares, and without
memory or a kernel.

Checkpoint offers no way to ask for the pass. It is told by the saved-tensor hooks that are
installed, which are known by name; where anything looks different, nothing is stood in for.
"""

import contextlib
import functools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace

_FIRST_PASS = ("torch.utils.checkpoint", "_checkpoint_hook.__init__.<locals>.pack_hook")


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
    """The part of a converted module that knows whether its forwards run in FP8.

    Attributes:
        fp8: state that conversion adds to the module and `torch_fp8.revert` deletes.
    """

    fp8: Any

    @property
    def fp8_config(self) -> Any:
        """The configuration with which the module was converted."""
        return self.fp8.config

    @property
    def fp8_weights(self) -> tuple[Tensor, ...]:
        """The weights that the module multiplies in FP8."""
        return ()

    @property
    def runs_fp8(self) -> bool:
        """Whether a forward runs in FP8 now, unless it is `is_transformed`."""
        if requested or torch.compiler.is_exporting():
            return False
        return self.training or bool(self.fp8_config.eval_fp8)


def in_high_precision() -> bool:
    """Return whether a module that is not converted takes weights as float32 in this forward.

    A converted one asks for both parts itself, see `RunsFP8.runs_fp8`.
    """
    if requested or torch.compiler.is_exporting():
        return True
    return not torch.compiler.is_compiling() and is_transformed()


def is_transformed() -> bool:
    """Return whether this eager forward is transformed, or traced, with torch's own operators.

    AOTAutograd, which traces and functionalizes, takes our operators.
    """
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        _warn_of_transforms()
        return True
    if _symbolic_trace._is_fx_tracing_flag:  # by make_fx, too
        return not is_traced()
    return torch.jit.is_tracing()


@functools.cache
def _warn_of_transforms() -> None:
    warnings.warn(
        "FP8: converted modules run in high precision under transforms of torch.func (grad, vjp, "
        "jvp, vmap) and forward-mode AD",
        stacklevel=2,
    )


def is_traced() -> bool:
    """Whether torch.compile traces: Dynamo this very code, or AOTAutograd what Dynamo has left."""
    return torch.compiler.is_compiling() or TracingContext.try_get() is not None


def saves_nothing() -> bool:
    """Return whether autograd drops what is saved now, as in the first pass of a checkpoint.

    Not where other saved-tensor hooks lie above those of the checkpoint, as of offloading, nor
    where it was given a ``context_fn``, which may keep results of operators for the second pass.
    """
    if torch.compiler.is_compiling():
        return False
    hooks = top_saved_tensor_hooks()
    if hooks is None or is_traced():
        return False
    pack = hooks[0]
    name = (getattr(pack, "__module__", None), getattr(pack, "__qualname__", None))
    if name != _FIRST_PASS:
        return False
    recompute = getattr(_enclosed(pack, "frame"), "recompute_fn", None)
    return isinstance(_enclosed(recompute, "recompute_context"), contextlib.nullcontext)


def top_saved_tensor_hooks() -> tuple[Any, Any] | None:
    """Return the pack and the unpack hook that would take what autograd saves now, if any do."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return None if top is None else top(False)


def is_of_checkpoint(hooks: tuple[Any, Any] | None) -> bool:
    """Return whether saved-tensor hooks are those of a checkpoint, in either of its passes."""
    return hooks is not None and getattr(hooks[0], "__module__", None) == _FIRST_PASS[0]


def _enclosed(function: Any, name: str) -> Any:
    """A variable that a function has from where it was defined, or None."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    if name not in names:
        return None
    return function.__closure__[names.index(name)].cell_contents


def stand_in(shape: Sequence[int], dtype: torch.dtype, like: Tensor) -> Tensor:
    """Return a placeholder for ``save_for_backward``, which nobody reads, where `saves_nothing`.

    Args:
        shape: sizes of the tensor that it stands for; it has one element, with strides of 0.
        dtype: dtype of that tensor.
        like: tensor on its device.
    """
    return like.new_empty(1, dtype=dtype).expand(tuple(shape))


PLAIN = (Tensor, FakeTensor)
"""Classes of tensors that are nothing else, or stand for one that is."""
