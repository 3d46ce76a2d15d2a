"""`SplitShard`: the shard of a float32 weight under FSDP2, stored in two halves.

It is the local tensor of the DTensor that user code, optimizers and checkpoints see. Like
`torch_fp8.tensor.split_weight.SplitWeight`, it reads and writes as the float32 shard that it
replaces. FSDP2 asks it what to gather: the BF16 half if the policy computes in BF16, else the
joined shard in the policy's dtype, or in float32 if it has none.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_fp8.quantization.split_float import RESIDUAL_BITS
from torch_fp8.tensor.encoded import check_address
from torch_fp8.tensor.halves import Halves, split_matrix
from torch_fp8.tensor.split_weight import SplitWeight


class SplitShard(SplitWeight):
    """A float32 shard over `Halves`.

    Attributes:
        padded: bfloat16 memory of the BF16 half, with the rows that FSDP2 adds as padding.
    """

    padded: Tensor

    @staticmethod
    def __new__(cls: Any, halves: Halves, padded: Tensor) -> Any:
        self = SplitWeight.__new__(cls, halves)
        self.padded = padded
        return self

    @staticmethod
    @torch.no_grad()
    def of(shard: Tensor, padded: Tensor) -> "SplitShard":
        """Split a plain float32 shard, rounded to nearest.

        Args:
            shard: rows, or columns, of this rank.
            padded: bfloat16 tensor of the shard's shape with FSDP2's padding; it is overwritten.
        """
        high, residual = split_matrix(shard, RESIDUAL_BITS)
        rows = padded[: shard.shape[0]]
        rows.copy_(high)
        return SplitShard(Halves(rows, residual, RESIDUAL_BITS), padded)

    def alias(self) -> SplitWeight:
        return SplitWeight(self.halves)

    def take(self, x: Tensor) -> None:
        self.store(x)  # in place, into the memory that FSDP2 padded

    # FSDP2 compares addresses to check whether this is still the shard that it padded.
    def data_ptr(self) -> int:
        check_address()
        return self.padded.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.padded.untyped_storage()

    def is_pinned(self, *args: Any) -> bool:
        return self.padded.is_pinned(*args)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor], None]:
        """Return the tensor that this rank sends, of the padded shape."""
        dtype = mp_policy.param_dtype or torch.float32
        if dtype == torch.bfloat16:
            return (self.padded,), None
        missing = self.padded.shape[0] - self.shape[0]
        whole = F.pad(self.dequantize().flatten(1), (0, 0, 0, missing)).view(self.padded.shape)
        return (whole.to(dtype),), None

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        metadata: None,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[()]] | None:
        """Return the gathered weight. FSDP2 reuses its memory for the next gather."""
        return (outputs[0], ()) if out is None else None


def _to_copy(shard: SplitShard, *, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    if dtype not in (None, torch.float32) or device is None:
        return NotImplemented
    padded = shard.padded.to(device, non_blocking=bool(options.get("non_blocking")))
    old = shard.halves
    high = padded[: old.high.shape[0]]
    return SplitShard(Halves(high, old.residual, old.bits), padded)


SplitShard.handlers = {**SplitWeight.handlers, torch.ops.aten._to_copy.default: _to_copy}
