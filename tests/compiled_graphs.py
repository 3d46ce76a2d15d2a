"""What torch.compile makes of a program: its graphs, and their number, breaks, recompilations."""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from torch_fp8.ops import registry


class Graphs(NamedTuple):
    """What `count_graphs` counts.

    Attributes:
        graphs: graphs handed to the backend.
        breaks: graph breaks; a dropped frame has none.
        recompilations: frames compiled once more because a guard failed.
        dropped: frames that Dynamo gave up, which then run eagerly.
    """

    graphs: int
    breaks: int
    recompilations: int
    dropped: int


def graphs_of(graphs: list[torch.fx.GraphModule]) -> Any:
    """Return a backend that runs the graphs of forwards and backwards, and adds them to a list."""

    def keep(module: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        graphs.append(module)
        return make_boxed_func(module.forward)

    return aot_autograd(fw_compiler=keep)


def count_graphs(program: Callable[[], object]) -> Graphs:
    """Run a program that compiles, and count."""
    torch.compiler.reset()
    counters.clear()
    clear_compilation_metrics()
    program()
    frames = get_compilation_metrics()
    return Graphs(
        counters["stats"]["unique_graphs"],
        sum(counters["graph_break"].values()),
        sum(bool(frame.recompile_reason) for frame in frames),
        sum(bool(frame.fail_type) for frame in frames),
    )


@contextlib.contextmanager
def traced_for_card() -> Iterator[None]:
    """Let our operators on CPU tensors become graphs for an H200."""
    target = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32))
    with (
        mock.patch.object(registry, "on_cuda", return_value=True),
        mock.patch.object(registry, "emulates_casts", return_value=False),
        mock.patch.object(driver, "_active", target),
    ):
        yield
