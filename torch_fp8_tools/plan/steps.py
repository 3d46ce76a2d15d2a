"""The bytes that exist only within a step, counted on tensors without memory.

A model with a few layers runs one step, which is followed storage by storage. Marks cut it before
and after the forward and the backward of a period of layers in its middle (usually one layer). What
these parts add is what each further period adds, so a deeper model needs no run of its own.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from torch_fp8.distributed.fsdp.connect import connect_fsdp
from torch_fp8.distributed.fsdp.split_weights import fsdp_params
from torch_fp8_tools.plan.layouts import blocks_of, period
from torch_fp8_tools.plan.memory_tracker import MemoryTracker, plain_parts
from torch_fp8_tools.plan.models import fake_ranks, make_model, prepare, shard, stages
from torch_fp8_tools.plan.setup import BF16, JUDGES, TRAINED, Setup

_MOST_FAKE_RANKS = 64
"""The maximum number of ranks for counting a step. The bytes of a larger ring differ by 1/64 at
most, and are scaled.
"""
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
    unit = period(setup.config)
    few = max(3, (3 if setup.fsdp > 1 else 2) * unit)
    if setup.fsdp > 1 and setup.checkpointing:  # what it scatters is freed one layer later
        few = max(4, few)
    layers = few if setup.layers_alike else 5 * unit
    step = run_step(setup, role, level, layers)
    return step.with_more((stages(setup)[0][1] - layers) / unit)


def run_step(setup: Setup, role: str, level: str, layers: int) -> "FollowedStep":
    """Run a step of a model with `layers` layers on fake tensors."""
    ranks = min(setup.fsdp, _MOST_FAKE_RANKS)
    model = make_model(setup, role, level, layers=layers)
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
            unit = period(setup.config)
            step = FollowedStep(model, unit)
            with step:
                tokens = torch.zeros((setup.micro_batch, setup.sequence), dtype=torch.long)
                labels = tokens[:, :1].float() if role in JUDGES else tokens
                autocast = torch.autocast("cpu", torch.bfloat16)
                with autocast, _GroupedInBF16(), torch.set_grad_enabled(trained):
                    loss = model(input_ids=tokens, labels=labels, use_cache=False).loss
                    step.mark()
                step.cast = step.parts[-1].live - step.live  # weights that autocast kept
                if trained:
                    loss.backward()
                step.mark()
    step.ring = (setup.fsdp - 1) / setup.fsdp
    return step


@dataclass(frozen=True)
class _Part:
    """A part of a step: bytes at its peak and at its end, and what was sent until its end."""

    peak: int
    saved_at_peak: int
    live: int
    saved: int
    gathered: int
    scattered: int


class FollowedStep(MemoryTracker):
    """Memory of a step and the bytes that FSDP2 sends in it, as rings send them, part by part.

    Attributes:
        parts: what precedes the layers, the forward of the layers before the period, that of the
            period, that of the last layer with the loss, the last layer's backward, and, if the
            model is trained, the backward of the period, that of the layers before it, and the rest
            (if the first layer's input needs a gradient).
        cast: the bytes that the end of autocast frees, a share of them for each layer.
        ring: the share of the gathered and of the unscattered bytes that a rank sends.
    """

    def __init__(self, model: nn.Module, unit: int) -> None:
        """Mark the parts; `unit` is the number of layers of the period."""
        super().__init__(model.parameters())
        for tensor in (*model.parameters(), *model.buffers()):
            self.assign(tensor, "weights")
        self.reset_peak()
        self.parts: list[_Part] = []
        self.ring, self.cast = 0.0, 0
        blocks = blocks_of(model)
        self._before, self._share = self.total, unit / len(blocks)
        self._repeated = blocks[-1 - unit : -1]
        self._unseen = {blocks[0], self._repeated[0], blocks[-1]}
        self._sent = {"gathered": 0, "scattered": 0}
        self._agreed = 0
        self._params, self._gathered = fsdp_params(model), list[Any]()
        for block in self._unseen:
            block.register_forward_pre_hook(self._enter, with_kwargs=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # half of all calls
        for storage in self._gathered:
            self.see_resized(storage)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace == "fsdp":  # it has allocated what it gathers into, and resizes it later
            outputs = (tensor for param in self._params for tensor in param.all_gather_outputs)
            self._gathered = [tensor.untyped_storage() for tensor in outputs]
        elif func.namespace == "c10d":
            self._count_sent(func._schema.name.rpartition("::")[2].lstrip("_"), args)
        return out

    def _count_sent(self, name: str, args: tuple[Any, ...]) -> None:
        if not name.startswith((*_GATHERS, *_SCATTERS)):
            return
        sent = max(map(_bytes_of, args))  # the gathered, or unscattered, buffer
        if name.startswith("allreduce"):
            self._agreed += sent
            sent *= 2
        self._sent["gathered" if name.startswith(_GATHERS) else "scattered"] += sent

    def _enter(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        if block not in self._unseen:
            return  # activation checkpointing runs it again
        self._unseen.remove(block)
        self.mark()
        hidden = args[0] if args else kwargs["hidden_states"]
        if hidden.requires_grad:
            hidden.register_hook(self.mark)

    @property
    def live(self) -> int:
        """The live bytes beyond the persistent ones."""
        return self.total - self._before

    def mark(self, _: Any = None) -> None:
        """End a part of the step."""
        name, peak = "saved activations", self.peak_total - self._before
        self.parts.append(_Part(peak, self.peak[name], self.live, self.current[name], **self._sent))
        self.reset_peak()

    def with_more(self, periods: float) -> StepBytes:
        """Return the bytes of the step of a model with so many more periods of layers."""
        start, first, forward, loss, last, *rest = self.parts
        # Before the first layer, ranks agree on the scales of all weights, and keep them.
        agreed = self._agreed * self._share
        held = (forward.live - first.live + agreed) * periods
        cast = self.cast * self._share * periods
        saved = (forward.saved - first.saved + agreed) * periods if rest else 0.0
        peaks = (
            *((part.peak, part.saved_at_peak) for part in (start, first)),
            *((part.peak + held, part.saved_at_peak + saved) for part in (forward, loss)),
            (last.peak + held - cast, last.saved_at_peak + saved),
        )
        gathered = forward.gathered - first.gathered + 2 * agreed
        scattered, peak_after = 0, 0.0
        if rest:
            gathered += rest[0].gathered - last.gathered
            scattered = rest[0].scattered - last.scattered
            # FSDP2 frees what it scattered one layer later, so the second layer of backward may
            # have the highest peak; the last one has it where gradients outweigh activations.
            added = (self._gradients() + agreed) * periods
            highest = max(part.peak for part in rest[:2])
            peak_after = max(highest + held - cast, max(part.peak for part in rest[1:]) + added)
        return StepBytes(
            *(max(peaks)[0], peak_after, max(peaks)[1]),
            gathered=self.ring * (self.parts[-1].gathered + gathered * periods),
            scattered=self.ring * (self.parts[-1].scattered + scattered * periods),
        )

    def _gradients(self) -> int:
        """Return the bytes of the period's gradients."""
        parameters = [p for block in self._repeated for p in block.parameters()]
        parts = [x for p in parameters if p.grad is not None for x in plain_parts(p.grad)]
        storages = [part.untyped_storage() for part in parts]
        return sum({id(storage): storage.nbytes() for storage in storages}.values())


class _GroupedInBF16(TorchFunctionMode):
    """Run grouped GEMMs in BF16, as autocast would if it supported them.

    With float32 weights stock experts compute in float32, which is no useful baseline for FP8.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") == "_grouped_mm":  # the operator behind F.grouped_mm
            args = tuple(
                a.bfloat16() if isinstance(a, Tensor) and a.dtype == torch.float32 else a
                for a in args
            )
        return func(*args, **(kwargs or {}))


def _bytes_of(argument: Any) -> int:
    if isinstance(argument, Tensor):
        return argument.numel() * argument.element_size()
    return sum(map(_bytes_of, argument)) if isinstance(argument, (list, tuple)) else 0
