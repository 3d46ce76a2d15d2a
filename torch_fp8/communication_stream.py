"""The CUDA stream of an exchange, so that what computes never waits for other ranks."""

import contextlib
from typing import Any

import torch


class CommunicationStream:
    """A stream beside the one that computes, made when a CUDA tensor first comes; no state."""

    def __init__(self) -> None:
        self._stream: Any = None

    def beside(self, device: torch.device) -> Any:
        """Within, CUDA work is queued on this stream, behind what has been queued to compute."""
        if device.type != "cuda":
            return contextlib.nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(self._stream)

    def join(self) -> None:
        """Let what computes from now on come after what has been queued here."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
