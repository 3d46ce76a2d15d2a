"""Collectives that move messages, with one interface for all versions of torch.

Messages are uint8, because gloo has no float8 and no backend needs to understand them. The receiver
reduces them in float32 (`torch_fp8.ops.messages`).
"""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed both; the old names warn there.
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def all_gather(output: Tensor, input: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Gather every rank's `input` on every rank, in rank order.

    Args:
        output: contiguous, world size times as many elements as `input`.
        input: contiguous, the same number of elements on every rank.
        group: the process group; None: the default one.
        async_op: whether to return at once, with a ``Work`` to wait for.
    """
    return _all_gather(output.view(-1), input.view(-1), group=group, async_op=async_op)


def reduce_scatter(output: Tensor, input: Tensor, group: Any = None) -> Any:
    """Sum part r of every rank's `input` on rank r, in the tensors' dtype.

    Args:
        output: contiguous.
        input: contiguous, world size times as many elements as `output`.
        group: see `all_gather`.
    """
    return _reduce_scatter(output.view(-1), input.view(-1), group=group)


def all_to_all(output: Tensor, input: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Send part r of `input` to rank r, and receive part r of `output` from it.

    Args:
        output, input: contiguous, with the same number of elements on every rank, a multiple of the
            world size.
        group, async_op: see `all_gather`.
    """
    return dist.all_to_all_single(output.view(-1), input.view(-1), group=group, async_op=async_op)


class CommunicationStream:
    """A CUDA stream for communication, created when the first CUDA tensor arrives."""

    def __init__(self) -> None:
        self._stream: Any = None

    def beside(self, device: torch.device) -> Any:
        """Queue CUDA work on this stream in this context, after the computation so far."""
        if device.type != "cuda":
            return contextlib.nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(self._stream)

    def join(self) -> None:
        """Make later computation wait for the work that is queued on this stream."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
