"""Whether a weight is still what its optimizer last wrote: `LastWrites`.

A residual (`torch_fp8.residual`) belongs to the BF16 weight beside it. Where somebody else has
written the weight since (loaded a checkpoint, merged an adapter), it is of another weight, and
would move the new one by up to half a spacing of BF16.

A write shows in the Parameter's version, in its address, or in the uses of its ``.data``
(`torch_fp8.weight_cache.WatchedParameter`). But so does much that leaves the weight as it was:
reading through ``.data``, or average weights that were swapped in and out again. Without its
residual a weight loses what updates have added below BF16's spacing; so these signs are only a
reason to look. What decides is a sample of each weight, 256 elements from its middle, that is kept
from the last write. It takes 512 bytes and a copy for each weight and step, and is compared, which
waits for the device, only after such a sign. A write of a few elements, past the sample, is not
seen; their residuals are wrong by half a spacing at most, as are those of writes past torch.

A loop that writes its weights anew before every step (to normalize them, say) makes that a part of
its update, to which the residuals belong: from the second step in a row on they are kept.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torch_fp8.optimizer_state import local

_SAMPLE = 256  # elements


class _Signs(NamedTuple):
    versions: tuple[int, int]
    address: int
    uses: int


@dataclass
class _Record:
    signs: _Signs
    sample: Tensor
    rewritten: bool = False
    """Whether the weight was another one at the last step, too."""


class LastWrites:
    """What the weights of an optimizer were when it last wrote them. Copies start empty."""

    def __init__(self) -> None:
        self._records: dict[Tensor, _Record] = {}

    def note(self, parameters: Iterable[Tensor]) -> None:
        """Remember these weights as they are."""
        kept, samples = [], []
        for parameter in parameters:
            current = _sample(parameter)
            record = self._records.get(parameter)
            if record is None or record.sample.device != current.device:
                record = _Record(_signs(parameter), torch.empty_like(current))
                self._records[parameter] = record
            record.signs = _signs(parameter)
            kept.append(record.sample)
            samples.append(current)
        for device in dict.fromkeys(sample.device for sample in samples):
            here = [i for i, sample in enumerate(samples) if sample.device == device]
            torch._foreach_copy_([kept[i] for i in here], [samples[i] for i in here])

    def forget(self, parameter: Tensor) -> None:
        """Take a weight for what belongs to its residual, whatever it is at the next step."""
        self._records.pop(parameter, None)

    def forget_all(self) -> None:
        """`forget` of every weight."""
        self._records.clear()

    def changed(self, parameters: Iterable[Tensor], *, in_step: bool = False) -> list[Tensor]:
        """Which of these weights somebody else has written since; those never noted are none.

        Args:
            parameters: to look at.
            in_step: whether a step is about to begin.
        """
        suspects, differ = [], []
        for parameter in parameters:
            record = self._records.get(parameter)
            if record is None:
                continue
            if record.signs == _signs(parameter):
                record.rewritten = record.rewritten and not in_step
                continue
            current = _sample(parameter)
            same_place = record.sample.shape == current.shape
            moved = record.sample.to(current.device) if same_place else current + 1
            suspects.append(parameter)
            differ.append((moved != current).any().cpu())
        changed = []
        for parameter, different in zip(suspects, differ, strict=True):
            record = self._records[parameter]
            if not different:
                record.signs = _signs(parameter)
            elif not record.rewritten:
                changed.append(parameter)
            if in_step:
                record.rewritten = bool(different)
        return changed


def _signs(parameter: Tensor) -> _Signs:
    shard = local(parameter)
    versions = (parameter._version, shard._version)
    return _Signs(versions, shard.data_ptr(), getattr(parameter, "uses", 0))


def _sample(parameter: Tensor) -> Tensor:
    """Elements from the middle of a weight's memory, as integers that compare bit for bit."""
    shard = local(parameter).detach()
    size = min(shard.numel(), _SAMPLE)
    if not _is_dense(shard):
        return shard.reshape(-1)[:size].view(torch.int16)
    offset = shard.storage_offset() + (shard.numel() - size) // 2
    return torch.as_strided(shard, (size,), (1,), offset).view(torch.int16)


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or torch._debug_has_internal_overlap(tensor) == 0
