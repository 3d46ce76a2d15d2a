"""`selective_checkpoint_contexts`: activation checkpointing that keeps FP8 and recomputes 16 bits.

``torch.utils.checkpoint`` keeps nothing of a region and runs all of it again in backward. Given
these contexts it keeps the FP8 tensors that backward needs, and what attention returns, and runs
again only what leads to 16-bit tensors that backward needs. Of a Llama block these are the GEMMs of
q, k and v with the norm in front of them, and the rotation; o_proj, the second norm, gate, up, the
product and down are not computed a second time.

In the first pass every operator is noted (`torch_fp8.autograd.recompute_plan`). The second pass
runs the same code, and each operator runs, returns what was kept, or returns an `Unavailable`
tensor: one without memory that nobody is going to read. That the code issues the same operators is
checked.

Kernels that are launched past torch's operators are seen by what they write: a tensor that was
allocated and is read, but written by no operator. All that comes before is then computed again. One
that writes over a tensor that an operator made is not seen, and if it reads what was not computed,
it gets an error where it asks for its address.

What torch.compile traces keeps FP8 by a policy for torch's own selective checkpointing. In eager
code that runs every operator again whose result was not kept, needed or not
(benchmarks/checkpoint_policies.py).
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from torch_fp8.autograd.current_pass import Replay, SelectivePass, Unavailable, repeats_forward
from torch_fp8.autograd.recompute_plan import Kind, Operation, Plan, Result, Signature, make_plan
from torch_fp8.autograd.recompute_trace import (
    ATTENTION,
    CASTS,
    HISTORY,
    OF_METADATA,
    Recorder,
    argument_of,
    is_unrecorded,
    operator_name,
    signature_of,
    tensors_of,
)

_WAY_OUT = "checkpoint this region without torch_fp8.selective_checkpoint_contexts"


def selective_checkpoint_contexts() -> tuple[Any, Any]:
    """Contexts of the two passes, for ``checkpoint(..., use_reentrant=False, context_fn=...)``.

    Given as it is, not called: ``context_fn=torch_fp8.selective_checkpoint_contexts``; likewise in
    Hugging Face's ``gradient_checkpointing_kwargs``. Gradients are those without checkpointing, bit
    for bit, if the region computes the same in both passes, as under any checkpointing.

    The second pass raises RuntimeError, naming operator and place, if it issues other operators
    than the first, if what was kept was written to in between, or if a kernel asks for the address
    of what was not computed.
    """
    if _is_traced():
        from torch.utils.checkpoint import create_selective_checkpoint_contexts

        contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(_compiled_policy)
        return contexts
    region = _Region()
    return _FirstPass(region), _SecondPass(region)


class _Region:
    """What the first pass leaves to the second.

    Attributes:
        operations: of the first pass.
        plan: what to do with each; None before the first pass has ended.
        kept: results by operation and position, with their versions.
        first_in_backward: whether the first pass ran inside a backward.
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.plan: Plan | None = None
        self.kept: dict[tuple[int, int], tuple[Tensor, int]] = {}
        self.first_in_backward = False

    def close(self, recorder: Recorder) -> None:
        """The first pass is over: decide, and drop what nothing needs."""
        self.operations = recorder.trace.operations
        written = {i for (i, _), (t, version) in recorder.kept.items() if t._version != version}
        for i in written:
            if operator_name(self.operations[i].func) in HISTORY:
                raise RuntimeError(
                    f"a result of {self.operations[i].func} was modified in place, which a "
                    f"selective checkpoint cannot take back; {_WAY_OUT}"
                )
            self.operations[i].kind = Kind.PLAIN
        self.plan = make_plan(recorder.trace)
        self.kept = {where: t for where, t in recorder.kept.items() if where in self.plan.keeps}


class _FirstPass:
    """Notes the operators of a region, and what autograd saves, for checkpoint to drop."""

    def __init__(self, region: _Region) -> None:
        self.region = region
        self._recorder: Recorder | None = None
        self._contexts = contextlib.ExitStack()

    def __enter__(self) -> None:
        if any(isinstance(m, Replay) for m in _get_current_dispatch_mode_stack()):
            self._contexts.enter_context(SelectivePass())  # for the sake of a region around it
            return
        region = self.region
        region.first_in_backward = repeats_forward()
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is None:
            raise RuntimeError(
                "torch_fp8.selective_checkpoint_contexts is for torch.utils.checkpoint.checkpoint("
                "..., use_reentrant=False, context_fn=torch_fp8.selective_checkpoint_contexts)"
            )
        self._recorder = recorder = Recorder()

        def pack(x: Tensor, checkpoint_pack: Callable[[Tensor], Any] = hooks[0]) -> Any:
            recorder.note_saved(x)
            return checkpoint_pack(x)

        with contextlib.ExitStack() as stack:
            stack.enter_context(_no_cached_casts())
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, hooks[1]))
            stack.enter_context(recorder)
            self._contexts = stack.pop_all()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._contexts.close()
        if self._recorder is None:
            return
        if kind is None:
            self.region.close(self._recorder)
        self._recorder.forget()  # autograd holds the hook as long as the graph


class _SecondPass(Replay):
    """Runs of the region what has to run; see the module."""

    supports_higher_order_operators = True

    def __init__(self, region: _Region) -> None:
        super().__init__()
        self.region, self.next = region, 0
        self._contexts = contextlib.ExitStack()

    @property
    def first_in_backward(self) -> bool:  # type: ignore[override]
        return self.region.first_in_backward

    @property
    def upcoming(self) -> str:  # type: ignore[override]
        names = (operator_name(o.func) for o in self.region.operations[self.next :])
        return next((name for name in names if name in CASTS), "")

    @property
    def kept(self) -> list[Tensor]:
        """What is kept until backward."""
        return [t for t, _ in self.region.kept.values()]

    def __enter__(self) -> Any:
        self.next = 0
        self.forms.clear()
        if self.region.plan is None:
            raise RuntimeError(
                "a selective checkpoint that runs in the recomputation of another is itself "
                f"recomputed there; {_WAY_OUT}"
            )
        self._contexts.enter_context(_no_cached_casts())
        return super().__enter__()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)
        self._contexts.close()
        self.forms.clear()
        unread = ("data pointer", "tensor subclasses")  # what torch says of an address, or of NumPy
        if isinstance(error, RuntimeError) and any(part in str(error) for part in unread):
            raise RuntimeError(
                "what is no operator of torch, a kernel or NumPy, reads what a selective "
                f"checkpoint did not compute again; {_WAY_OUT}"
            ) from error

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.pauses or is_unrecorded(func):
            if Unavailable in types:
                return _stands_for(args[0])
            return func(*args, **kwargs)
        if any(t is not Unavailable for t in types):
            return NotImplemented
        arguments = list(tensors_of(args, kwargs))
        index, operation = self.next, self._expected(func, arguments)
        self.next += 1
        assert self.region.plan is not None
        missing = Unavailable in types
        if operation.kind is Kind.VIEW and not missing:
            return func(*args, **kwargs)
        if not self.region.plan.runs[index]:
            return self._without_running(index, operation, arguments)
        if operation.kind is Kind.HISTORY:
            return self._cast_again(index, operator_name(func), args)
        if operator_name(func) in OF_METADATA:
            args = tuple(_with_memory(a) for a in args)
        elif missing:
            raise RuntimeError(
                f"{func} runs again in a selective checkpoint, {self._place()}, but one of its "
                f"arguments was not computed; {_WAY_OUT}"
            )
        return func(*args, **kwargs)

    def _expected(self, func: Any, arguments: list[Tensor]) -> Operation:
        operations = self.region.operations
        expected = operations[self.next] if self.next < len(operations) else None
        signature = signature_of(arguments)
        if expected is None or expected.func != func or expected.signature != signature:
            was = "nothing more" if expected is None else _call(expected.func, expected.signature)
            raise RuntimeError(
                f"the recomputation of a selective checkpoint differs from its forward: operator "
                f"{self.next}, {self._place()}, is {_call(func, signature)}, and was {was}. "
                "The region has to compute the same both times; if it depends on state that "
                f"changes in between, {_WAY_OUT}"
            )
        return expected

    def _without_running(self, index: int, operation: Operation, arguments: list[Tensor]) -> Any:
        made = [self._given(index, j, r, arguments) for j, r in enumerate(operation.results)]
        return made[0] if operation.container is None else operation.container(made)

    def _given(self, index: int, j: int, result: Result | None, arguments: list[Tensor]) -> Any:
        if result is None:
            return None
        if result.argument is not None:
            return arguments[result.argument]
        if (index, j) not in self.region.kept:
            return Unavailable(result.size, result.stride, result.dtype, result.device)
        kept, version = self.region.kept[index, j]
        if kept._version != version:
            raise RuntimeError(
                f"a result of {self.region.operations[index].func}, {self._place()}, which a "
                "selective checkpoint kept for backward, was modified in place after its region; "
                f"use the operation that returns a new tensor, or {_WAY_OUT}"
            )
        return kept.detach()

    def _cast_again(self, index: int, name: str, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """What cast with a delayed scale, with the scale that it had, and no other effect."""
        ops, (scale, amax) = torch.ops.torch_fp8, self._scale_and_amax(index)
        if name == "quantize_2d_delayed":
            x, (_, _, dtype, _, _, *layouts) = args[0], args[1:8]
            cast = (dtype, "tensorwise", False, *layouts, scale, None)
            q, _, qt, _ = ops.quantize_2d(x, *cast)
            return q, scale, qt, x.new_empty(0, dtype=torch.float32)
        _, _, dtype, _, _, *layouts, save = args[-8:]
        cast = (dtype, "tensorwise", False, *layouts, scale, None)
        with_scale = name.replace("norm_quantize_delayed", "norm_quantize_once")
        func = getattr(ops, with_scale.replace("swiglu_quantize_delayed", "swiglu_quantize"))
        q, _, *others, _ = func(*args[:-8], *cast, save)
        return q, scale, *others, amax

    def _scale_and_amax(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the second and the last result of a cast with a delayed scale."""
        results = self.region.operations[index].results
        scale, amax = (self._given(index, j % len(results), results[j], []) for j in (1, -1))
        return scale, amax

    def _place(self) -> str:
        """Tell where the code is that issues the operator at hand."""
        frame = sys._getframe(1)
        while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
            frame = frame.f_back
        return f"at {frame.f_code.co_filename}:{frame.f_lineno}"


def _is_traced() -> bool:
    """Whether torch.compile's tracing runs the region, first without recording a graph."""
    keys = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(k) is not None for k in (keys.PROXY, keys.FUNCTIONAL))


def _compiled_policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    kept = operator_name(func) in CASTS or operator_name(func) in ATTENTION
    if argument_of(func, "columnwise", args, kwargs) is False:  # a weight's, or of a frozen layer
        kept = False
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@contextlib.contextmanager
def _no_cached_casts() -> Iterator[None]:
    """Autocast casts a weight where it is used: from its cache the passes would differ."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


def _stands_for(x: Tensor) -> Unavailable:
    return Unavailable(x.shape, x.stride(), x.dtype, x.device)


def _with_memory(x: Any) -> Any:
    if not isinstance(x, Unavailable):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in ("torch", "torch_fp8", "contextlib")


def _call(func: Any, signature: Signature) -> str:
    arguments = ", ".join(f"{str(dtype)[6:]}{list(shape)}" for shape, dtype in signature)
    return f"{func}({arguments})"
