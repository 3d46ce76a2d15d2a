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

import torch
from torch import Tensor

from torch_fp8.optimizer_state import local

_SAMPLE = 256  # elements


_Signs = tuple[int, int, int, int]
"""Versions of a parameter and of its shard, the shard's address, uses of its ``.data``."""


@dataclass
class _Record:
    parameter: Tensor
    signs: _Signs
    place: tuple[int, int]
    """Size and offset of the sample in the weight's memory."""
    sample: Tensor
    rewritten: bool = False
    """Whether the weight was another one at the last step, too."""


class LastWrites:
    """What the weights of an optimizer were when it last wrote them. Copies start empty."""

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}  # by identity: a Tensor takes longer to hash

    @torch.no_grad()
    def note(self, parameters: Iterable[Tensor]) -> None:
        """Remember these weights as they are."""
        noted: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
        for parameter in parameters:
            signs, record = _signs(parameter), self._records.get(id(parameter))
            if record is None or record.signs[2] != signs[2]:
                place = _place(parameter)
                record = _Record(parameter, signs, place, _sample(parameter, place).clone())
                self._records[id(parameter)] = record
                continue
            record.signs = signs
            kept, samples = noted.setdefault(record.sample.device, ([], []))
            kept.append(record.sample)
            samples.append(_sample(parameter, record.place))
        for kept, samples in noted.values():
            torch._foreach_copy_(kept, samples)

    def forget(self, parameter: Tensor) -> None:
        """Take a weight for what belongs to its residual, whatever it is at the next step."""
        self._records.pop(id(parameter), None)

    def forget_all(self) -> None:
        """`forget` of every weight."""
        self._records.clear()

    @torch.no_grad()
    def changed(self, parameters: Iterable[Tensor], *, in_step: bool = False) -> list[Tensor]:
        """Which of these weights somebody else has written since; those never noted are none.

        Args:
            parameters: to look at.
            in_step: whether a step is about to begin.
        """
        suspects, differ = [], []
        for parameter in parameters:
            record = self._records.get(id(parameter))
            if record is None:
                continue
            if record.signs == _signs(parameter):
                record.rewritten = record.rewritten and not in_step
                continue
            record.place = _place(parameter)
            current = _sample(parameter, record.place)
            same_place = record.sample.shape == current.shape
            kept = record.sample.to(current.device) if same_place else -current
            suspects.append(record)
            differ.append((kept.view(torch.int16) != current.view(torch.int16)).any().cpu())
            record.sample = kept
        changed = []
        for record, different in zip(suspects, differ, strict=True):
            if not different:
                record.signs = _signs(record.parameter)
            elif not record.rewritten:
                changed.append(record.parameter)
            if in_step:
                record.rewritten = bool(different)
        return changed


def _signs(parameter: Tensor) -> _Signs:
    shard = local(parameter)
    uses = getattr(parameter, "uses", 0)
    return parameter._version, shard._version, shard.data_ptr(), uses


def _place(parameter: Tensor) -> tuple[int, int]:
    shard = local(parameter)
    size = min(shard.numel(), _SAMPLE)
    return size, shard.storage_offset() + (shard.numel() - size) // 2


def _sample(parameter: Tensor, place: tuple[int, int]) -> Tensor:
    """Elements from the middle of a weight's memory."""
    size, offset = place
    shard = local(parameter)
    if not _is_dense(shard):
        return shard.reshape(-1)[:size]
    return shard.as_strided((size,), (1,), offset)


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or torch._debug_has_internal_overlap(tensor) == 0
