"""The bytes that exist only within a step, counted on tensors without memory.

A model with a few layers runs one step, which is followed storage by storage. Marks cut it before
and after the forward and the backward of each layer. The step of a deeper model is put together
from these parts: each of its layers has a twin among the few (`torch_fp8_tools.plan.layers`).
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)

from torch_fp8.distributed.fsdp.connect import connect_fsdp
from torch_fp8.distributed.fsdp.split_weights import fsdp_groups
from torch_fp8.tensor.base import map_tensors
from torch_fp8_tools.plan.known_results import KnownResults
from torch_fp8_tools.plan.layouts import blocks_of
from torch_fp8_tools.plan.memory_tracker import MemoryTracker
from torch_fp8_tools.plan.models import (
    GroupedInBF16,
    fake_ranks,
    make_model,
    prepare,
    shard,
    stages,
)
from torch_fp8_tools.plan.setup import BF16, JUDGES, TRAINED, Setup

_MOST_FAKE_RANKS = 64
"""The maximum number of ranks for counting a step. The bytes of a larger ring differ by 1/64 at
most, and are scaled.
"""
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
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


def step_bytes(setup: Setup, role: str, level: str) -> StepBytes:
    """Count the bytes that a model's step holds and sends beyond the persistent ones."""
    few, twins = setup.layers.shortest(stages(setup)[0][1], sharded=setup.fsdp > 1)
    return run_step(setup, role, level, few).with_layers(twins)


def run_step(setup: Setup, role: str, level: str, layers: Sequence[int]) -> "FollowedStep":
    """Run a step of a model with only these layers on fake tensors."""
    ranks = min(setup.fsdp, _MOST_FAKE_RANKS)
    model = make_model(setup, role, level, layers)
    trained = role in TRAINED
    prepare(model, setup, role, level, None)  # makes weights BF16 that training splits: under
    if ranks > 1 and level not in (BF16, "O1"):  # FSDP2 all that are trained
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)
    with warnings.catch_warnings(), fake_ranks(ranks) as mesh:
        warnings.simplefilter("ignore")
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            if hasattr(model, "tie_weights"):
                model.tie_weights()
            if mesh is not None:
                shard(model, mesh)
                if level != BF16:
                    connect_fsdp(model, setup.fp8_config(level))
                if not trained:
                    model.unshard()  # without a backward, FSDP2 keeps what the root gathers
            step = FollowedStep(model, trained)
            with step, GroupedInBF16(), torch.set_grad_enabled(trained):
                tokens = torch.zeros((setup.micro_batch, setup.sequence), dtype=torch.long)
                labels = tokens[:, :1].float() if role in JUDGES else tokens
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(input_ids=tokens, labels=labels, use_cache=False).loss
                    step.mark()
                    living = step.living()
                step.release(living)
                if trained:
                    loss.backward()
                step.mark()
    step.ring = (setup.fsdp - 1) / setup.fsdp
    return step


@dataclass
class _Part:
    """A part of a step, with bytes beyond those that its start held and had sent.

    Attributes:
        peak, saved_at_peak: the highest bytes, and what was saved for backward of them.
        live, saved: the same at its end.
        gathered, scattered: the bytes that FSDP2 sent for weights and for gradients.
        cast: the bytes of `live` that the end of autocast frees: weights that it has cast.
    """

    peak: int
    saved_at_peak: int
    live: int
    saved: int
    gathered: int
    scattered: int
    cast: int = 0


class FollowedStep(MemoryTracker):
    """Memory of a step and the bytes that FSDP2 sends in it, as rings send them, part by part.

    Attributes:
        parts: what precedes the layers, the forward of each layer, the last one with the loss, and,
            if the model is trained, the backward of each layer, the last layer's first; then the
            rest. The rest includes the first layer's backward if its input needs no gradient.
        ring: the share of the gathered and of the unscattered bytes that a rank sends.
    """

    def __init__(self, model: nn.Module, trained: bool) -> None:
        super().__init__(model.parameters())
        self._born: dict[int, int] = {}
        self._trained = trained
        for tensor in (*model.parameters(), *model.buffers()):
            self.assign(tensor, "weights")
        self.parts: list[_Part] = []
        self.ring = 0.0
        self._blocks = blocks_of(model)
        self._unseen = {*self._blocks}
        self._sent = {"gathered": 0, "scattered": 0}
        self._agreed = 0
        self._groups = fsdp_groups(model)
        self._results = KnownResults()
        self._start()
        for block in self._blocks:  # before FSDP2 gathers its weights
            block.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the check at each call takes as long as a view

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        first = args[0] if args else None
        if isinstance(first, FakeTensor):
            if func is torch.ops.prim.device.default:
                return first.fake_device  # most calls
            if func is torch.ops.aten.copy_.default and first.constant is None:
                return first  # there are no values
            if (func.is_view or func is _UNSAFE_VIEW) and not kwargs and first.constant is None:
                return self._view(func, first, args)
            out = self._results.call(func, first, args, kwargs or {})
            self.created(func, args, out)
        else:
            out = super().__torch_dispatch__(func, types, args, kwargs)
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

    def _view(self, func: Any, base: FakeTensor, args: tuple[Any, ...]) -> Any:
        """Return views as FakeTensorMode does, without its cache, whose keys take longer."""
        with in_kernel_invocation_manager(base.fake_mode):
            out = func(*args)
        out = map_tensors(out, lambda view: FakeTensor(base.fake_mode, view, base.fake_device))
        map_tensors(out, self._created)
        return out

    def _count_sent(self, name: str, args: tuple[Any, ...]) -> None:
        if not name.startswith((*_GATHERS, *_SCATTERS)):
            return
        sent = max(map(_bytes_of, args))  # the gathered, or unscattered, buffer
        if name.startswith("allreduce"):
            self._agreed += sent
            sent *= 2
        self._sent["gathered" if name.startswith(_GATHERS) else "scattered"] += sent

    def _enter(self, block: nn.Module, args: Any, kwargs: Any) -> Any:
        if block not in self._unseen:
            return None  # activation checkpointing runs it again
        self._unseen.remove(block)
        self.mark()
        hidden = args[0] if args else kwargs["hidden_states"]
        if not hidden.requires_grad:
            return None
        # Its hook runs after FSDP2 has scattered this block's gradients, and before it gathers the
        # weights of the block that precedes.
        hidden = hidden.view_as(hidden)
        hidden.register_hook(self.mark)
        return ((hidden, *args[1:]), kwargs) if args else ((), {**kwargs, "hidden_states": hidden})

    def _start(self) -> None:
        self.reset_peak()
        saved = self.current["saved activations"]
        self._begin = {"live": self.total, "saved": saved, **self._sent}

    def mark(self, _: Any = None) -> None:
        """End a part of the step."""
        self.see_resized()
        for key in self._known:
            self._born.setdefault(key, len(self.parts))
        begin, name = self._begin, "saved activations"
        peak, saved_at_peak = self.peak_total - begin["live"], self.peak[name] - begin["saved"]
        now = {"live": self.total, "saved": self.current[name], **self._sent}
        self.parts.append(_Part(peak, saved_at_peak, **{n: now[n] - begin[n] for n in now}))
        self._start()

    def living(self) -> dict[int, tuple[int, int]]:
        """Return the part that allocated each living storage, and its bytes."""
        return {key: (self._born[key], size) for key, (_, size) in self._known.items()}

    def release(self, before: dict[int, tuple[int, int]]) -> None:
        """Tell the parts what the end of autocast has freed of the storages that lived before."""
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
        backwards = dict(zip(reversed(range(number)), rest, strict=False)) if self._trained else {}
        # Before the first layer, ranks agree on the scales of all weights, and keep them.
        linears = [sum(isinstance(m, nn.Linear) for m in b.modules()) for b in self._blocks]
        more = sum(linears[i] for i in twins) / sum(linears) - 1 if self._agreed else 0.0
        agreed = self._agreed * more
        before = [start, *(forwards[i] for i in twins)]
        after = [backwards[i] for i in reversed(twins) if i in backwards]
        after += rest[len(backwards) :]
        live = saved = gathered = scattered = 0.0
        peaks = []
        for place, part in enumerate((*before, *after)):
            if place == len(before):
                live -= sum(each.cast for each in before)
            peaks.append((live + part.peak, saved + part.saved_at_peak))
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
