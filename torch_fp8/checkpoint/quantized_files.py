"""`QuantizedFiles`: a checkpoint whose FP8 weights are read together with their scales."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from torch_fp8.checkpoint.formats import read_format
from torch_fp8.checkpoint.safetensors_files import DTYPES, SafetensorsFiles
from torch_fp8.conversion.fp8_weight import FP8Weight, scale_grid

_E4M3 = "F8_E4M3"
_FLOATS = ("F32", "F16", "BF16", "F8_E8M0")


class QuantizedFiles(SafetensorsFiles):
    """The tensors of a checkpoint in 16 or 32 bits, or in one of the FP8 formats.

    The keys are those of weights and other tensors, without scales and other companions of weights.

    Args:
        path: see `SafetensorsFiles`.
    Attributes:
        format: the FP8 format, or None if the configuration names no quantization.
        fp8: the key of its scales and the block that shares one, for the key of each FP8 weight.
    Raises:
        ValueError: see `SafetensorsFiles` and `torch_fp8.checkpoint.formats.read_format`; an FP8
            weight has no scales; scales have no FP8 weight; scales have another shape or dtype, or
            are not finite, zero or negative (the error names the key); there are FP8 weights, but
            no configuration explains their scales.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.format = read_format(self.path)
        self.fp8 = dict(self._checked())

    def __iter__(self) -> Iterator[str]:
        scales = {key for key, _ in self.fp8.values()}
        others = () if self.format is None else ("activation_scale", "input_scale")
        return (key for key in self.stored if key not in scales and not key.endswith(others))

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self.stored[key].shape

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype in which a tensor is used: BF16 for FP8 weights."""
        return torch.bfloat16 if key in self.fp8 else DTYPES[self.stored[key].dtype]

    def read(self, key: str) -> Tensor | FP8Weight:
        """Read a tensor, or an FP8 weight with its scales."""
        if key not in self.fp8:
            return self[key]
        return FP8Weight(self[key], self.scale(key), self.fp8[key][1])

    def scale(self, key: str) -> Tensor:
        """Read the scales of an FP8 weight as a float32 grid, from any stored dtype."""
        scale_key, block = self.fp8[key]
        return _float32(self[scale_key]).reshape(scale_grid(self.shape(key), block))

    def _checked(self) -> Iterator[tuple[str, tuple[str, tuple[int, int]]]]:
        """Check all scales before anything is loaded, and yield the entries of `fp8`."""
        if self.format is None:
            for key, tensor in self.stored.items():
                if tensor.dtype in (_E4M3, "F8_E5M2"):
                    raise ValueError(
                        f"{key!r} in {str(self.path)!r} holds FP8 codes, but there is no "
                        "config.json beside it with a quantization_config that describes their "
                        "scales; copy the config.json that was exported with it. Nothing was loaded"
                    )
            return
        for key, tensor in self.stored.items():
            if tensor.dtype == "F8_E5M2":
                raise self._broken(f"{key!r} is E5M2; weights must be E4M3")
        for key, weight in self.stored.items():
            if key.endswith(f".weight{self.format.scale_suffix}"):
                owner = self.stored.get(key.removesuffix(self.format.scale_suffix))
                if owner is None or owner.dtype != _E4M3:
                    raise self._broken(f"{key!r} has no E4M3 weight beside it")
            if weight.dtype == _E4M3:
                scale_key = f"{key}{self.format.scale_suffix}"
                yield key, (scale_key, self._checked_block(key, scale_key))

    def _checked_block(self, key: str, scale_key: str) -> tuple[int, int]:
        assert self.format is not None
        if scale_key not in self.stored:
            raise self._broken(f"{scale_key!r}, the scales of {key!r}, is missing")
        shape, scale = self.shape(key), self.stored[scale_key]
        if len(shape) != 2:
            raise self._broken(f"{key!r} has shape {shape}; FP8 weights must be matrices")
        block = self.format.block_of(shape, scale.shape)
        if block is None:
            declared = " or ".join(f"{r or 'all'} x {c or 'all'}" for r, c in self.format.blocks)
            raise self._broken(
                f"{scale_key!r} has shape {scale.shape}, which does not match a weight {shape} in "
                f"blocks of {declared}"
            )
        if scale.dtype not in (*_FLOATS, *(["U8"] if self.format.ue8m0 else [])):
            raise self._broken(f"{scale_key!r} has dtype {scale.dtype}; scales must be floats")
        value = _float32(self[scale_key])
        if not bool(value.isfinite().all()):
            raise self._broken(f"{scale_key!r} holds an Inf or NaN")
        if not bool((value > 0).all()):
            raise self._broken(f"{scale_key!r} holds a scale of zero or below")
        return block

    def _broken(self, what: str) -> ValueError:
        assert self.format is not None
        return ValueError(
            f"{what}: {str(self.path)!r} is not a complete {self.format.name} checkpoint; nothing "
            "was loaded"
        )


def _float32(scale: Tensor) -> Tensor:
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    return scale.to(torch.float32)
