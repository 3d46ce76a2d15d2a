"""The choice of what each kind of exchange between ranks sends: 8 bits, or the tensors' dtype.

``communication="auto"`` chooses 8 bits if they measure faster than NCCL's BF16 on the links of this
job. Casts take time, and links within a node may be faster than the casts that would save bytes.
When a model is wrapped or sharded, all ranks time one bucket in both forms, for each kind of
exchange that the model has, and use the slowest rank's times, so they all decide alike. A process
group is measured once. Checkpoints store the choice, and a resumed run adopts it.

Nothing is measured at level O3, because its gradients exist only in 8 bits, or on backends other
than NCCL. Gradients and weights travel in 8 bits there.
"""

import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_fp8.config import FP8Config
from torch_fp8.distributed.averaging import (
    Run,
    all_gather,
    all_to_all,
    average_runs,
    reduce_scatter,
)
from torch_fp8.ops import messages

KINDS = ("average", "gather", "scatter", "replicas")
"""DDP's gradients; FSDP2's weights and its gradients; FSDP2's gradients among replicas."""
NUMEL = 13 << 20
"""The number of elements that are timed: a DDP bucket in BF16, 26 MB."""
MARGIN = 0.02
"""The share of time by which 8 bits must beat BF16, which is more exact: noise must not decide."""
STATE_KEY = "fp8_communication"
"""The key of the choice in `torch_fp8.scaling_state_dict`."""

_MEASURED_BACKENDS = ("nccl",)
_RUNS, _WARM_UP = 5, 3
_NOT_CHOSEN = 2
_times: "weakref.WeakKeyDictionary[Any, dict[str, Times]]" = weakref.WeakKeyDictionary()
_exchanges: "weakref.WeakKeyDictionary[nn.Module, Exchanges]" = weakref.WeakKeyDictionary()
_saved: "weakref.WeakKeyDictionary[nn.Module, dict[str, bool]]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Times:
    """The seconds of one exchange of `NUMEL` elements on the slowest rank.

    Attributes:
        eight_bits: the time in 8 bits, with casts.
        plain: the time in BF16.
    """

    eight_bits: float
    plain: float

    @property
    def in_8_bits(self) -> bool:
        """Whether 8 bits are faster."""
        return self.eight_bits < (1 - MARGIN) * self.plain

    def __str__(self) -> str:
        return f"{1e3 * self.eight_bits:.2f} ms in 8 bits, {1e3 * self.plain:.2f} in BF16"


@dataclass
class Exchanges:
    """The choice for one model; its collectives read it when they start.

    Attributes:
        in_8_bits: whether each kind of exchange travels in 8 bits; kinds that are not listed do.
        times: measured times by kind; empty if nothing was measured.
        origin: the summary's note on the choice; empty if the user made it.
    """

    in_8_bits: dict[str, bool] = field(default_factory=dict)
    times: Mapping[str, Times] = field(default_factory=dict)
    origin: str = ""

    def __getitem__(self, kind: str) -> bool:
        return self.in_8_bits.get(kind, True)

    def adopt(self, choice: Mapping[str, bool]) -> None:
        """Adopt the choice of a checkpoint, if this run would measure."""
        if self.origin:
            self.in_8_bits = {**self.in_8_bits, **choice}
            self.origin = "as in the checkpoint"

    def note(self, *kinds: str) -> str:
        """Describe how the choice for these kinds was made; empty if the user made it."""
        if not self.origin:
            return ""
        timed = [f"{kind} {self.times[kind]}" for kind in kinds if kind in self.times]
        told = f" ({'; '.join(timed)}, {NUMEL >> 20} million elements)" if timed else ""
        return f"{self.origin}{told}"


def choose_exchanges(
    model: nn.Module, config: FP8Config, groups: Mapping[str, Any], device: torch.device
) -> Exchanges:
    """Choose the form of a model's exchanges; this is a collective if something must be measured.

    Args:
        model: the model; it keeps the choice until it is chosen again.
        config: the configuration, equal on all ranks.
        groups: the process group of each kind of exchange.
        device: the device of the tensors that are sent.
    """
    groups = measured_groups(config, groups, device)
    if not groups:
        exchanges = Exchanges(dict.fromkeys(KINDS, config.communication != "off"))
    elif (saved := _first_of(model, _saved)) is not None:
        exchanges = Exchanges(dict(saved), {}, "as in the checkpoint")
    else:
        times = _measured(groups, device)
        exchanges = Exchanges({kind: times[kind].in_8_bits for kind in groups}, times, "measured")
    _exchanges[model] = exchanges
    return exchanges


def measured_groups(
    config: FP8Config, groups: Mapping[str, Any], device: torch.device
) -> dict[str, Any]:
    """Return the groups in which `choose_exchanges` measures or adopts a measurement."""
    if config.communication != "auto" or config.opt_level == "O3":
        return {}
    return {kind: group for kind, group in groups.items() if _is_measured(group, device)}


def exchanges_state(model: nn.Module) -> Tensor | None:
    """Return the measured choice for a checkpoint, one uint8 for each of `KINDS`, or None."""
    exchanges = _first_of(model, _exchanges)
    if exchanges is None or not exchanges.origin:
        return None
    values = [exchanges.in_8_bits.get(kind, _NOT_CHOSEN) for kind in KINDS]
    return torch.tensor([int(value) for value in values], dtype=torch.uint8, device="cpu")


def load_exchanges_state(model: nn.Module, state: Tensor) -> None:
    """Adopt the result of `exchanges_state`, now or when `model` is connected."""
    values = dict(zip(KINDS, state.tolist(), strict=False))
    choice = {kind: bool(value) for kind, value in values.items() if value != _NOT_CHOSEN}
    _saved[model] = choice
    exchanges = _first_of(model, _exchanges)
    if exchanges is not None:
        exchanges.adopt(choice)


def _first_of(model: nn.Module, values: Mapping[nn.Module, Any]) -> Any:
    """Return the value of the model or of a module in it, because hosts wrap and unwrap models."""
    return next((values[module] for module in model.modules() if module in values), None)


def _is_measured(group: Any, device: torch.device) -> bool:
    if group is None or dist.get_world_size(group) == 1:
        return False
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    return backends.get(device.type) in _MEASURED_BACKENDS


def _measured(groups: Mapping[str, Any], device: torch.device) -> dict[str, Times]:
    """Return the times of each kind, equal on all ranks that share a group."""
    missing = [kind for kind, group in groups.items() if kind not in _times.get(group, {})]
    if missing:
        own = [seconds_of(run, device) for k in missing for run in _runs(k, groups[k], device)]
        slowest = torch.tensor(own, dtype=torch.float32, device=device)
        for group in dict.fromkeys(groups.values()):
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
        for kind, pair in zip(missing, slowest.view(-1, 2).tolist(), strict=True):
            _times.setdefault(groups[kind], {})[kind] = Times(*pair)
    return {kind: _times[group][kind] for kind, group in groups.items()}


def seconds_of(run: Callable[[], Any], device: torch.device) -> float:
    """Return the median time of `run`, which all ranks of a group run together."""
    seconds = []
    for _ in range(_WARM_UP + _RUNS):
        _wait_for(device)
        begin = time.perf_counter()
        run()
        _wait_for(device)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[_WARM_UP:])


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _runs(kind: str, group: Any, device: torch.device) -> Iterable[Callable[[], Any]]:
    """Return functions that run an exchange in 8 bits, and the same exchange in BF16."""
    ranks = dist.get_world_size(group)
    part = -(-NUMEL // (ranks * 32)) * 32
    whole = torch.zeros(ranks, part, dtype=torch.bfloat16, device=device)  # (N, E)
    if kind == "gather":
        return _gathers(whole, group)
    if kind == "scatter":
        return _scatters(whole, group)
    buffer = whole.view(-1)

    def average() -> None:
        for _ in average_runs(buffer, [Run(0, buffer.numel(), True)], group, 1 / ranks):
            pass

    return average, lambda: dist.all_reduce(buffer, group=group)


def _gathers(whole: Tensor, group: Any) -> Iterable[Callable[[], Any]]:
    codes = torch.empty_like(whole, dtype=torch.uint8)

    def gather() -> None:
        all_gather(codes, whole[0].to(torch.float8_e4m3fn).view(torch.uint8), group)

    return gather, lambda: all_gather(torch.empty_like(whole), whole[0], group)


def _scatters(whole: Tensor, group: Any) -> Iterable[Callable[[], Any]]:
    output = torch.empty_like(whole[0])
    layout = messages.Layout(output.numel() // 32)

    def scatter() -> None:
        sent = messages.pack_flat(whole.view(-1), None, layout, len(whole))
        received = torch.empty_like(sent)
        all_to_all(received, sent, group)
        messages.unpack_sum(received, layout, output, None)

    return scatter, lambda: reduce_scatter(output, whole, group=group)
