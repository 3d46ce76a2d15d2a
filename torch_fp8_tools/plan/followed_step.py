"""`FollowedStep`: a step that is followed storage by storage, part by part.

Marks cut it before and after the forward and the backward of each layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from torch_fp8.distributed.fsdp.split_weights import fsdp_groups
from torch_fp8_tools.plan.layouts import blocks_of
from torch_fp8_tools.plan.memory_tracker import MemoryTracker

_DEVICE = torch.ops.prim.device.default
_GATHERS, _SCATTERS = ("allgather", "allreduce"), ("reduce_scatter", "alltoall")


@dataclass(frozen=True)
class StepBytes:
    """The bytes of a GPU's micro-batch that exist only within its step.

    Attributes:
        forward: the peak beyond the persistent bytes until the last layer's backward ends.
        backward: the peak after that, including gradients.
        saved: the part of `forward` that is saved for backward.
        gathered, scattered: the bytes that FSDP2 sends for weights and for gradients.
    """

    forward: float
    backward: float
    saved: float
    gathered: float
    scattered: float


class TooManyOperators(ValueError):
    """A step calls so many operators that its layers must loop over the sequence."""


MOST_OPERATORS = 500_000
"""The maximum number of operators of a step. Qwen3-Next, which loops over chunks, has 53,589 with
4,096 tokens; Jamba, which loops over tokens, has more.
"""
Moment = tuple[int, int]
"""The live bytes, and those of them that were saved for backward."""


@dataclass
class Part:
    """A part of a step, with bytes beyond those that its start held and had sent.

    Attributes:
        peak: the moment with the most bytes.
        live, saved: the same at its end.
        gathered, scattered: the bytes that FSDP2 sent for weights and for gradients.
        cast: the bytes of `live` that the end of autocast frees: weights that it has cast.
    """

    peak: Moment
    live: int
    saved: int
    gathered: int
    scattered: int
    cast: int = 0


class FollowedStep(MemoryTracker):
    """Memory of a step and the bytes that FSDP2 sends in it, as rings send them, part by part.

    Attributes:
        parts: what precedes the layers, the forward of each layer, the last one with the loss, and
            the backward of each layer, the last layer's first; then the rest. The rest includes the
            first layer's backward if its input needs no gradient.
        ring: the share of the gathered and of the unscattered bytes that a rank sends.

    Raises:
        TooManyOperators: more than MOST_OPERATORS operators run.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters())
        self._born: dict[int, int] = {}
        self._highest: Moment = (0, 0)
        for tensor in (*model.parameters(), *model.buffers()):
            self.assign(tensor, "weights")
        self.parts: list[Part] = []
        self.ring = 0.0
        self._blocks = blocks_of(model)
        self._unseen = {*self._blocks}
        self._sent = {"gathered": 0, "scattered": 0}
        self._agreed = 0
        self._groups = fsdp_groups(model)
        self._calls = 0
        self._start()
        for block in self._blocks:  # before FSDP2 gathers its weights
            block.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled, and the check at each call takes as long as a view

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _DEVICE:  # most calls; torch aborts the process if this raises
            first = args[0]
            return first.fake_device if type(first) is FakeTensor else func(*args)
        out = func(*args, **(kwargs or {}))
        self._calls += 1
        if self._calls > MOST_OPERATORS:
            raise TooManyOperators(
                f"a step of the model has more than {MOST_OPERATORS:,} operators, because layers "
                "loop over the sequence in Python where a run has a kernel (mamba_ssm, for "
                "example), which holds other tensors. Plan a shorter sequence: weights, gradients "
                "and states do not depend on it"
            )
        if not func.is_view:
            self.created(func, args, out)
        if func.namespace == "fsdp":  # it has allocated what it gathers into, and resizes it later
            gathered = (
                [t for p in g.fsdp_params for t in p.all_gather_outputs] for g in self._groups
            )
            of_group = (sorted(tensors, key=torch.numel, reverse=True) for tensors in gathered)
            self.resizable = [
                [t.untyped_storage() for t in tensors] for tensors in of_group if tensors
            ]
            self.see_resized()
        elif func.namespace == "c10d":
            self._count_sent(func._schema.name.rpartition("::")[2].lstrip("_"), args)
        return out

    @property
    def now(self) -> Moment:
        """The live bytes, and those of them that are saved for backward."""
        return self.total, self.current["saved activations"]

    def _see_peak(self) -> None:
        self._highest = max(self._highest, self.now)

    def _count_sent(self, name: str, args: tuple[Any, ...]) -> None:
        if not name.startswith((*_GATHERS, *_SCATTERS)):
            return
        sent = max(map(_bytes_of, args))  # the gathered, or unscattered, buffer
        if name.startswith("allreduce"):
            self._agreed += sent
            sent *= 2
        self._sent["gathered" if name.startswith(_GATHERS) else "scattered"] += sent

    def _enter(self, block: nn.Module, args: Any, kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        if block not in self._unseen:  # the model, or activation checkpointing, runs it again
            return None
        self._unseen.remove(block)
        self.mark()
        if not hidden.requires_grad:
            return None
        # Its hook runs after FSDP2 has scattered this block's gradients, and before it gathers the
        # weights of the block that precedes.
        hidden = hidden.view_as(hidden)
        hidden.register_hook(self.mark)
        return ((hidden, *args[1:]), kwargs) if args else ((), {**kwargs, "hidden_states": hidden})

    def _start(self) -> None:
        live, saved = self._highest = self.now
        self._begin = {"live": live, "saved": saved, **self._sent}

    def mark(self, _: Any = None) -> None:
        """End a part of the step."""
        self.see_resized()
        for key in self._known:
            self._born.setdefault(key, len(self.parts))
        live, saved = self._begin["live"], self._begin["saved"]
        now = dict(zip(("live", "saved"), self.now, strict=True)) | self._sent
        peak = self._highest[0] - live, self._highest[1] - saved
        self.parts.append(Part(peak, **{name: now[name] - self._begin[name] for name in now}))
        self._start()

    def living(self) -> dict[int, tuple[int, int]]:
        """Return the part that allocated each living storage, and its bytes."""
        return {key: (self._born[key], size) for key, (_, size) in self._known.items()}

    def release(self, before: dict[int, tuple[int, int]]) -> None:
        """Record in each part the bytes that the end of autocast has freed.

        Args:
            before: the result of `living` before that.
        """
        for part, size in (before[key] for key in before.keys() - self._known.keys()):
            self.parts[part].cast += size
        self._start()

    def _free(self, key: int) -> None:
        self._born.pop(key, None)
        super()._free(key)

    def with_layers(self, twins: Sequence[int]) -> StepBytes:
        """Return the bytes of the step of a deeper model.

        Args:
            twins: for each of its layers, the place of the layer here that does the same.
        """
        number = len(self._blocks)
        start, forwards, rest = self.parts[0], self.parts[1 : 1 + number], self.parts[1 + number :]
        backwards = dict(zip(reversed(range(number)), rest, strict=False))
        # Before the first layer, ranks agree on the scales of all weights, and keep them.
        linears = [sum(isinstance(m, nn.Linear) for m in b.modules()) for b in self._blocks]
        more = sum(linears[i] for i in twins) / max(sum(linears), 1) - 1 if self._agreed else 0.0
        agreed = self._agreed * more
        before = [start, *(forwards[i] for i in twins)]
        after = [backwards[i] for i in reversed(twins) if i in backwards]
        after += rest[len(backwards) :]
        live = saved = gathered = scattered = 0.0
        peaks = []
        for place, part in enumerate((*before, *after)):
            if place == len(before):
                live -= sum(each.cast for each in before)
            peak, saved_at_peak = part.peak
            peaks.append((live + peak, saved + saved_at_peak))
            live, saved = live + part.live, saved + part.saved
            gathered, scattered = gathered + part.gathered, scattered + part.scattered
            if place == 0:
                live += agreed
        return StepBytes(
            *(max(peaks[: len(before) + 1])[0], max(peaks[len(before) + 1 :], default=(0.0,))[0]),
            saved=max(peaks[: len(before) + 1])[1],
            gathered=self.ring * (gathered + 2 * agreed),
            scattered=self.ring * scattered,
        )


def _bytes_of(argument: Any) -> int:
    if isinstance(argument, Tensor):
        return argument.numel() * argument.element_size()
    return sum(map(_bytes_of, argument)) if isinstance(argument, (list, tuple)) else 0
