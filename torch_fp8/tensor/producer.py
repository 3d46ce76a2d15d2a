"""`Producer`: what computes the result of a norm or an activation function, as it is asked for."""

from collections.abc import Callable

from torch import Tensor

from torch_fp8.kernels.arguments import CastOptions
from torch_fp8.tensor.base import Payloads


class Producer:
    """Computes a result, (R, C), in the forms that readers ask for, from what it holds.

    It must not hold the `torch_fp8.tensor.lazy_quantized.LazySource` that it is given to: a cycle
    would keep all of it until it is collected.

    Attributes:
        channel_amax: returns the largest magnitude of each channel, (C,) float32; None: it is found
            in the plain tensor.
        smoothed: casts the channels times factors, (C,) float32; None: the plain tensor's.
    """

    channel_amax: Callable[[], Tensor] | None = None
    smoothed: Callable[[Tensor, CastOptions], Payloads] | None = None

    def dense(self) -> Tensor:
        """Return the plain tensor (R, C)."""
        raise NotImplementedError

    def layouts(self, options: CastOptions) -> Payloads:
        """Cast as told, as `quantize_layouts` does."""
        raise NotImplementedError

    def amax(self) -> Tensor:
        """Return the largest magnitude of the plain tensor, () float32, as `tensor_amax`."""
        raise NotImplementedError
