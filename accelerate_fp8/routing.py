"""Routing replay: train with the experts that a rollout chose.

Two precisions, or two engines, choose different experts for some tokens. The policy gradient then
belongs to another model than the one that sampled. `record_routing` records the choices of a model,
and `routing_replay` makes its routers repeat given ones. The scores still come from the router's
logits, gathered at the replayed experts, so that gradients reach the router's weights.

Every router of transformers chooses by one ``torch.topk`` over the scores of all experts. This
module intercepts that call while a router's forward runs, and changes nothing else.

Legend: T tokens, k experts per token, E experts, L routers.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from torch_fp8.nn.class_swap import unwrapped_name
from torch_fp8.nn.layer_filter import ROUTER_NAMES, expert_weights
from torch_fp8.quantization.argument_types import check_arguments

_LEVELS = 6
"""Levels above the experts at which a router is searched, because adapters of PEFT nest."""
_TOPK = (torch.topk, torch.Tensor.topk)
_NOT_FOUND = (
    "routing replay found no router beside '{}' ({}): it looks for a module named "
    + ", ".join(map(repr, ROUTER_NAMES))
    + " with a weight that has a row for each expert"
)


class Router(NamedTuple):
    """A router and its experts.

    Attributes:
        name: qualified name of the router.
        module: router module.
        experts: module of the experts.
        num_experts: E, the number of experts on all ranks together.
    """

    name: str
    module: nn.Module
    experts: nn.Module
    num_experts: int


def find_routers(model: nn.Module) -> list[Router]:
    """Return the routers of a model's fused experts, in module order.

    Raises:
        ValueError: no router is found beside some experts, or the model has no fused experts.
    """
    model = model.module if isinstance(model, DistributedDataParallel) else model
    routers = []
    for name, module in model.named_modules():
        weights = expert_weights("", module)
        if not weights:
            continue
        count = module.get_parameter(weights[0]).shape[0]
        place = _router_beside(model, name, count)
        if place is None:
            raise ValueError(_NOT_FOUND.format(unwrapped_name(name), type(module).__name__))
        routers.append(Router(unwrapped_name(place), model.get_submodule(place), module, count))
    if not routers:
        raise ValueError(
            f"{type(model).__name__} has no fused experts, so there is no routing to replay"
        )
    return routers


def _router_beside(model: nn.Module, name: str, num_experts: int) -> str | None:
    """Return the name of the router next to the experts, or next to the adapters around them."""
    for _ in range(_LEVELS):
        name = name.rpartition(".")[0]
        for key, module in model.get_submodule(name).named_children():
            if key not in ROUTER_NAMES:
                continue
            if any(p.ndim == 2 and p.shape[0] == num_experts for p in module.parameters()):
                return f"{name}.{key}".lstrip(".")
    return None


class RoutingRecord:
    """Experts that the routers of a model chose, in the order of its forwards.

    Attributes:
        choices: list of integer tensors (T, k), one for each forward, by the router's qualified
            name.
    """

    def __init__(self, names: list[str]) -> None:
        self.choices: dict[str, list[Tensor]] = {name: [] for name in names}

    def keep(self, name: str, own: Tensor) -> Tensor:
        """Record a router's own choice (T, k), and return it."""
        self.choices[name].append(own.detach().clone())
        return own

    def indices(self, batch_size: int = 1) -> Tensor:
        """Return all choices (batch, tokens, L, k), the argument of `routing_replay`.

        Args:
            batch_size: number of sequences in each forward. Later forwards continue these
                sequences, as those of ``generate`` do.
        """
        of_routers = [
            torch.cat([t.unflatten(0, (batch_size, -1)) for t in choices], 1)
            for choices in self.choices.values()
        ]
        return torch.stack(of_routers, 2)


class RoutingReplay:
    """Comparison of a replay with the experts that the routers would have chosen.

    Attributes:
        differing: number of choices that differ, a () tensor on the device, by the router's
            qualified name.
        decisions: number of all choices, in the same form.
    """

    def __init__(self) -> None:
        self.differing: dict[str, Tensor] = {}
        self.decisions: dict[str, Tensor] = {}

    def choose(self, router: Router, indices: Tensor, own: Tensor) -> Tensor:
        """Replace a router's own choice by the given experts (T, k), and count the differences."""
        name, shape = router.name, tuple(indices.shape)
        if shape != tuple(own.shape):
            raise ValueError(
                f"routing_replay has experts of (tokens, k) = {shape} for the router '{name}', "
                f"which chooses {tuple(own.shape)}"
            )
        given = indices.to(own.device, torch.long)
        replayed = (given >= 0).all(1, keepdim=True)  # (T, 1)
        taken = torch.where(replayed, given, own)
        if torch._C._current_graph_task_id() == -1:  # a checkpoint's recomputation counts nothing
            new = (own[:, :, None] != taken[:, None, :]).all(2)  # (T, k)
            differing, decisions = new.sum(), replayed.sum() * own.shape[1]
            self.differing[name] = self.differing.get(name, 0) + differing
            self.decisions[name] = self.decisions.get(name, 0) + decisions
            counter = getattr(getattr(router.experts, "fp8", None), "tokens", None)
            if counter is not None:  # a monitor watches these experts
                counter.add_decisions(differing, decisions)
        return taken

    def share(self, name: str | None = None) -> float:
        """Return the share (0 to 1) of choices that differ; this synchronizes with the device.

        Args:
            name: qualified name of a router, or None for all routers.
        """
        names = list(self.differing) if name is None else [name]
        different, of_all = (
            sum(float(counts[n]) for n in names) for counts in (self.differing, self.decisions)
        )
        return different / of_all if of_all else 0.0


class _Watched(TorchFunctionMode):
    """Hooks on a router that replace its choice while its forward runs.

    Args:
        router: router to hook.
        choose: function that maps the router's own choice (T, k) to the indices (T, k) to use.
    """

    def __init__(self, router: Router, choose: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.router, self.choose = router, choose
        self.ended = self.runs = self.chosen = False
        self._handles = [
            router.module.register_forward_pre_hook(self._before),
            router.module.register_forward_hook(self._after, always_call=True),
        ]

    def _before(self, module: nn.Module, args: Any) -> None:
        if self.ended:
            if torch._C._current_graph_task_id() != -1:
                raise RuntimeError(
                    f"a checkpoint runs the router '{self.router.name}' again after its "
                    "routing_replay ended and would choose other experts: run backward within it"
                )
            self.remove()  # a new forward, after the replay has ended
            return
        self.runs, self.chosen = True, False
        self.__enter__()

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self.runs:
            return
        self.runs = False
        self.__exit__(None, None, None)
        if output is not None and not self.chosen:
            raise ValueError(
                f"the router '{self.router.name}' ({type(module).__name__}) chooses its experts "
                "without torch.topk over all of them: its choices are neither recorded nor replayed"
            )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _TOPK:
            return result
        scores = args[0] if args else (kwargs or {})["input"]
        if scores.ndim != 2 or scores.shape[1] != self.router.num_experts:
            return result  # a choice among groups of experts
        self.chosen = True
        taken = self.choose(result.indices)
        if taken is result.indices:
            return result
        return torch.return_types.topk((scores.gather(1, taken), taken))  # (T, k) each

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def __reduce__(self) -> Any:
        return type(None), ()


@contextlib.contextmanager
def record_routing(model: nn.Module) -> Iterator[RoutingRecord]:
    """Record the experts that routers choose inside the ``with`` block.

    Args:
        model: model with fused experts, converted or not, wrapped or not.
    Returns:
        The record, which grows with each forward.
    Raises:
        ValueError: a router cannot be found, or chooses without ``torch.topk``; the message names
            it.
    """
    check_arguments(record_routing, locals())
    routers = find_routers(model)
    record = RoutingRecord([router.name for router in routers])

    watched = [_Watched(router, partial(record.keep, router.name)) for router in routers]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield record
    finally:
        for each in watched:
            each.remove()


@contextlib.contextmanager
def routing_replay(
    model: nn.Module, indices: Tensor | Mapping[str, Tensor]
) -> Iterator[RoutingReplay]:
    """Make routers use given experts, for one forward and its backward.

    Args:
        model: model with fused experts, converted or not, wrapped or not.
        indices: experts of each token: one integer tensor (..., L, k) with the routers in model
            order, as `RoutingRecord.indices` and engines return it; or a mapping from a router's
            qualified name to (..., k), where routers without an entry choose themselves. The
            leading dimensions are those of the forward's tokens. For a token with a negative index,
            such as padding, the router chooses.
    Returns:
        The number of choices that differ from the routers' own ones.
    Raises:
        ValueError: a router cannot be found, or indices do not fit; the message names the router.
        TypeError: indices are not integers.
        RuntimeError: a checkpoint runs a router again after the ``with`` block has ended.
    """
    check_arguments(routing_replay, locals())
    routers = find_routers(model)
    replay = RoutingReplay()
    given = _by_router(routers, indices)
    watched = [
        _Watched(router, partial(replay.choose, router, given[router.name]))
        for router in routers
        if router.name in given
    ]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield replay
    finally:
        for each in watched:
            each.ended = True


def _by_router(routers: list[Router], indices: Tensor | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the indices (T, k) of each router."""
    if isinstance(indices, Mapping):
        unknown = [name for name in indices if name not in {router.name for router in routers}]
        if unknown:
            known = ", ".join(repr(router.name) for router in routers[:3])
            raise ValueError(
                f"routing_replay: {unknown[0]!r} is not a router of this model; its routers are "
                f"{known}, ..."
            )
        named = dict(indices)
    else:
        if indices.ndim < 3 or indices.shape[-2] != len(routers):
            raise ValueError(
                f"routing_replay takes experts of (..., {len(routers)} routers, k), got "
                f"{tuple(indices.shape)}"
            )
        named = {router.name: indices[..., i, :] for i, router in enumerate(routers)}
    for router in routers:
        given = named.get(router.name)
        if given is None:
            continue
        if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
            raise TypeError(f"routing_replay takes integers for '{router.name}', got {given.dtype}")
        if not given.is_cuda and given.numel() and int(given.max()) >= router.num_experts:
            raise ValueError(
                f"routing_replay: '{router.name}' has {router.num_experts} experts, but got index "
                f"{int(given.max())}"
            )
        named[router.name] = given.reshape(-1, given.shape[-1])
    return named
