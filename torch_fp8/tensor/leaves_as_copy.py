"""`LeavesAsCopy`: tensors that lists, NumPy arrays and DLPack receive as a decoded copy."""

from typing import Any

from torch import Tensor


class LeavesAsCopy(Tensor):
    """A tensor without plain memory that code outside torch could read."""

    def dequantize(self) -> Tensor:
        """Return a plain tensor of this shape and dtype."""
        raise NotImplementedError

    def tolist(self) -> Any:
        return self.dequantize().tolist()

    def __dlpack__(self, **options: Any) -> Any:
        if self.requires_grad:
            raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
        return self.dequantize().__dlpack__(**options)  # a copy, which does not write through

    def __format__(self, spec: str) -> str:
        return format(self.dequantize(), spec) if spec else str(self)

    def numpy(self, **options: Any) -> Any:
        array = self.dequantize().numpy(**options)
        array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None, **options: Any) -> Any:
        return self.numpy().__array__(dtype, **options)
