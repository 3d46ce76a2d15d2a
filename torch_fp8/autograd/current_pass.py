"""The kind of pass that runs now: FP8 or high precision, and a checkpoint's first or second pass.

**High precision.** Our autograd functions save FP8 payloads instead of their inputs. A payload has
no graph behind it, so most gradients cannot be differentiated again. Our operators also have no
rules for the transforms of torch.func and for forward-mode AD, and a program that torch exports or
traces has to run without this package. In all these cases a converted module runs its original
class with torch's own operators: automatically under transforms and tracers, and inside
`high_precision` for second derivatives of the gradients of weights.

**Checkpoints.** ``torch.utils.checkpoint`` runs a region twice: in forward, where it drops what
autograd saves, and again in backward, where it keeps it. With ``use_reentrant=False`` the first
pass has gradients enabled, so a layer would compute payloads for backward in vain. It saves a
stand-in instead, with the dtype, shape and device that checkpoint compares, but without memory or a
kernel.

Checkpoint has no query for the current pass. This module recognizes the first pass by the names of
the installed saved-tensor hooks; if anything looks different, no stand-in is used.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

_FIRST_PASS = ("torch.utils.checkpoint", "_checkpoint_hook.__init__.<locals>.pack_hook")


@functools.cache
def warn_once(message: str) -> None:
    """Give a warning, unless this process has already given one with this message."""
    warnings.warn(message, stacklevel=3)


requested = 0
"""Number of `high_precision` blocks that are active now."""


@contextlib.contextmanager
def high_precision() -> Iterator[None]:
    """Run converted modules in high precision, so that their gradients can be differentiated.

    Use it for Hessian products, second-order MAML and penalties on the gradients of weights. Run
    forward and backward inside the ``with`` block. It affects all threads, and delayed scaling
    records no amaxes inside.
    """
    global requested
    requested += 1
    try:
        yield
    finally:
        requested -= 1


class RunsFP8(nn.Module):
    """Mixin of a converted module that decides whether its forwards run in FP8.

    Attributes:
        fp8: state that conversion adds to the module and `torch_fp8.revert` deletes.
        fp8_weight_names: names of the weights that run in FP8.
    """

    fp8: Any
    fp8_weight_names: tuple[str, ...] = ()

    @property
    def fp8_weights(self) -> tuple[Tensor, ...]:
        """Weights that the module multiplies in FP8."""
        weights = map(self._parameters.get, self.fp8_weight_names)
        return tuple([weight for weight in weights if weight is not None])

    @property
    def runs_fp8(self) -> bool:
        """Whether a forward would run in FP8 now; callers also check `is_transformed`."""
        if requested or is_exporting():
            return False
        return self.training or bool(self.fp8.config.eval_fp8)


def is_exporting() -> bool:
    """Return whether torch.export is running, also when called inside a graph.

    In Dynamo of torch 2.11 ``torch.compiler.is_exporting()`` is true in every graph.
    """
    return torch.compiler._is_exporting_flag


def in_high_precision() -> bool:
    """Return whether an unconverted module reads weights in float32 in this forward.

    A converted module checks both conditions itself; see `RunsFP8.runs_fp8`.
    """
    if requested or is_exporting():
        return True
    return not torch.compiler.is_compiling() and is_transformed()


def is_transformed() -> bool:
    """Return whether a transform or tracer runs this eager forward, and needs torch's operators.

    AOTAutograd also traces, but can trace our operators, so it does not count.
    """
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        warn_once(
            "FP8: converted modules run in high precision under transforms of torch.func (grad, "
            "vjp, jvp, vmap) and forward-mode AD"
        )
        return True
    if is_fx_symbolic_tracing():  # also in make_fx
        return not is_traced()
    return torch.jit.is_tracing()


@functools.cache
def _noted() -> bool:
    return True


before_traces: list[Callable[[], None]] = []
"""Functions that run before torch.compile traces a converted layer."""


@torch.compiler.assume_constant_result
def note_graph() -> bool:
    """Note for `ran_in_graph` that torch.compile traces an FP8 layer; Dynamo calls this."""
    for function in before_traces:
        function()
    return _noted()


def ran_in_graph() -> bool:
    """Return whether torch.compile has traced an FP8 layer in this process."""
    return _noted.cache_info().currsize > 0


def warn_of_decoding() -> None:
    """Warn once that a compiled forward of one token casts weights again and again."""
    warn_once(
        "FP8: a compiled forward of one token casts the weights of its FP8 layers for every token, "
        "because a graph cannot tell whether a weight has changed. Declare that they do not "
        "change, with torch_fp8.rollout(model, compiled=True); or generate without a graph, so "
        "they are cast once (transformers: generate(disable_compile=True), as TRL does); or store "
        "them in FP8 only, with torch_fp8.freeze(model)"
    )


def warn_of_disabled_autocast(name: str) -> None:
    """Warn once if the layer `name` runs where autocast was disabled within an enabled region.

    A layer cannot know the region's purpose: with weights in BF16 no loop uses autocast.
    """
    regions = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    if regions > 1:
        warn_once(
            f"FP8 layer '{name}' runs in FP8 within torch.autocast(enabled=False), where a stock "
            "layer multiplies in float32. For float32 write `with torch.autocast(..., enabled="
            "False), torch_fp8.high_precision():`, or name the layer in "
            f"FP8Config(skip=('{name}',))"
        )


def warn_of_halves_in_program() -> None:
    """Warn once if the current forward becomes a program that cannot store split weights.

    torch's tracers and exporters take a model's Parameters as they are, and their C++ code reads
    memory that a weight in two halves does not have.
    """
    if torch.compiler.is_dynamo_compiling():
        return
    if torch.jit.is_tracing() or is_exporting():
        warn_once(
            "FP8: this traced or exported program refers to weights that are stored in two halves. "
            "torch.onnx.export and run_decompositions() raise an error for it, and torch.jit.save "
            "crashes the process. To save the model, trace or export a stock copy: "
            "stock = copy.deepcopy(model); torch_fp8.revert(stock)"
        )


def is_traced() -> bool:
    """Return whether torch.compile traces now: Dynamo this code, or AOTAutograd Dynamo's graph."""
    return torch.compiler.is_compiling() or TracingContext.try_get() is not None


running_backward: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of the backward that runs this code, as in a checkpoint, or -1 if none."""

_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def saves_nothing() -> bool:
    """Return whether autograd drops what is saved now, as in the first pass of a checkpoint.

    False if other saved-tensor hooks, such as those of offloading, lie above the checkpoint's, and
    for a checkpoint with a ``context_fn``, which may keep operators' results for the second pass.
    """
    if torch.compiler.is_dynamo_compiling():
        return False
    hooks = None if _top_hooks is None else _top_hooks(False)
    if hooks is None or is_traced():
        return False
    pack = hooks[0]
    if (getattr(pack, "__module__", None), getattr(pack, "__qualname__", None)) != _FIRST_PASS:
        return False
    recompute = getattr(_enclosed(pack, "frame"), "recompute_fn", None)
    return isinstance(_enclosed(recompute, "recompute_context"), contextlib.nullcontext)


def _enclosed(function: Any, name: str) -> Any:
    """Return the value of a variable in a function's closure, or None if it has none."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    if name not in names:
        return None
    return function.__closure__[names.index(name)].cell_contents


def stand_in(shape: Sequence[int], dtype: torch.dtype, like: Tensor) -> Tensor:
    """Return a placeholder for ``save_for_backward`` that is never read, for `saves_nothing`.

    Args:
        shape: shape of the replaced tensor. The placeholder has it, too, by strides of 0 over a
            single element.
        dtype: dtype of the replaced tensor.
        like: any tensor on its device.
    """
    return like.new_empty(1, dtype=dtype).expand(tuple(shape))


def is_plain(x: Tensor) -> bool:
    """Return whether `x` is a plain tensor or Parameter, or a fake one in tracing, and dense."""
    usual = type(x) in (Tensor, FakeTensor, nn.Parameter)
    return usual and x.layout is torch.strided and not x.is_nested


def output_dtype(input: Tensor) -> torch.dtype:
    """Return the output dtype of a linear layer: autocast's if autocast is on, else the input's."""
    return autocast_dtype(input.device.type) or input.dtype


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype of autocast, or None if it is off or the device is meta."""
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None
