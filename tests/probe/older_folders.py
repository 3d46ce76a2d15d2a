"""Checkpoints as they were written while residuals were in the optimizer's state."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from torch_fp8.optim.state import is_large
from torch_fp8.tensor.halves import split_matrix


def as_written_before(path: Path, bits: int = 8) -> None:
    """Rewrite a checkpoint with weights in BF16, and their residuals in the optimizer's state.

    One process does it, alone.

    Args:
        path: a whole file, a folder of shards, or a folder with such files and folders in it.
        bits: residual bits of large weights.
    """
    states = _read(path)
    optimizer = next(part for part in _dicts(states) if "param_groups" in part)
    entries = optimizer["state"]
    weights = next(part for part in _dicts(states) if _are_weights(part))
    names = list(weights)
    for key, entry in entries.items():
        name = names[key] if isinstance(key, int) else key
        weights[name], entry["residual"] = _halves(weights[name], bits)
    for group in optimizer["param_groups"]:
        group["torch_fp8"] = {"version": 1, "residual_bits": bits, "seed": 0}
    for part, state in states.items():
        if part.is_file():
            torch.save(state, part)
        else:
            dcp.save(state, storage_writer=dcp.FileSystemWriter(part), no_dist=True)


def _read(path: Path) -> dict[Path, Any]:
    whole = [path, path / "pytorch_model_fsdp.bin", path / "optimizer.bin"]
    states: dict[Path, Any] = {
        file: torch.load(file, weights_only=False) for file in whole if file.is_file()
    }
    for metadata in path.rglob(".metadata"):
        reader, planner = dcp.FileSystemReader(metadata.parent), _EmptyStateDictLoadPlanner()
        states[metadata.parent] = {}
        _load_state_dict(
            states[metadata.parent], storage_reader=reader, planner=planner, no_dist=True
        )
    return states


def _are_weights(part: dict[Any, Any]) -> bool:
    return len(part) > 3 and all(isinstance(value, Tensor) for value in part.values())


def _dicts(value: Any) -> Iterator[dict[Any, Any]]:
    if isinstance(value, dict):
        yield value
    for part in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        yield from _dicts(part)


def _halves(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    high, residual = split_matrix(weight, bits if is_large(weight) else 16)
    assert residual is not None
    return high, residual.view(torch.int8).reshape(weight.shape[0], -1)
