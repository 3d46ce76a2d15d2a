"""Detection of writes to a weight since its optimizer last wrote it: `LastWrites`.

A residual (`torch_fp8.quantization.split_float`) belongs to the BF16 weight beside it. Where
somebody else has written the weight since (loaded a checkpoint, merged an adapter), it is of
another weight, and would move the new one by up to half a spacing of BF16.

A write shows in the Parameter's version, in its address, or in the uses of its ``.data``
(`torch_fp8.nn.weight_cache.WatchedParameter`). But so does much that leaves the weight as it was:
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

from torch_fp8.nn.weight_cache import WatchedParameter
from torch_fp8.tensor.dtensor import local

_SAMPLE = 256  # elements


_Signs = tuple[int, ...]


@dataclass
class _Record:
    parameter: Tensor
    signs: _Signs
    place: tuple[int, int] | None
    """The size and offset of the sample in the weight's memory; None where that has holes."""
    sample: Tensor
    sharded: bool
    rewritten: bool = False
    """Whether the weight had changed already at the last step."""


class LastWrites:
    """What the weights of an optimizer were when it last wrote them; a copy starts empty."""

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}  # by identity: a Tensor takes longer to hash

    @torch.no_grad()
    def note(self, parameters: Iterable[Tensor]) -> None:
        """Remember these weights as they are."""
        known = self._records
        records = [known.get(id(p)) or self._new(p) for p in parameters]
        for record in records:
            record.signs = _signs(record.parameter)
        for device in {record.sample.device for record in records}:
            here = [record for record in records if record.sample.device == device]
            samples = [
                _sample(record.parameter, record.place)
                if record.place is None or record.sharded
                else record.parameter.as_strided(record.place[:1], (1,), record.place[1])
                for record in here
            ]
            torch._foreach_copy_([record.sample for record in here], samples)

    def _new(self, parameter: Tensor) -> _Record:
        place = _place(parameter)
        sharded = local(parameter) is not parameter
        record = _Record(parameter, (), place, _sample(parameter, place).clone(), sharded)
        self._records[id(parameter)] = record
        return record

    def forget(self, parameter: Tensor) -> None:
        """Accept a weight, whatever it is at the next step, as the one its residual belongs to."""
        self._records.pop(id(parameter), None)

    @torch.no_grad()
    def changed(self, parameters: Iterable[Tensor], *, in_step: bool = False) -> list[Tensor]:
        """Return the weights that somebody else has written since; weights never noted do not
        count.

        Args:
            parameters: the weights to look at.
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
    """Return versions of a parameter and its shard, and the shard's address; or uses of
    ``.data``.
    """
    if parameter.__class__ is WatchedParameter:
        return parameter._version, parameter.uses
    shard = local(parameter)
    return parameter._version, shard._version, shard.data_ptr()


def _place(parameter: Tensor) -> tuple[int, int] | None:
    shard = local(parameter)
    size = min(shard.numel(), _SAMPLE)
    if not (shard.is_contiguous() or torch._debug_has_internal_overlap(shard) == 0):
        return None
    return size, shard.storage_offset() + (shard.numel() - size) // 2


def _sample(parameter: Tensor, place: tuple[int, int] | None) -> Tensor:
    """Return elements from the middle of a weight's memory."""
    shard = local(parameter)
    if place is None:
        return shard.reshape(-1)[:_SAMPLE]
    size, offset = place
    return shard.as_strided((size,), (1,), offset)
