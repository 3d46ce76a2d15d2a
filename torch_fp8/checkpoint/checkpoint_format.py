"""The FP8 formats of published checkpoints, identified by ``quantization_config`` in config.json.

* Fine-grained FP8 (``quant_method: "fp8"``; DeepSeek-V3, Qwen3-FP8): ``X.weight`` in E4M3 and
  ``X.weight_scale_inv``, float32, one for each block of ``weight_block_size``, or one for the
  tensor if that is null.
* compressed-tensors (``quant_method: "compressed-tensors"``, ``format: "float-quantized"``):
  ``X.weight`` in E4M3 and ``X.weight_scale``; ``strategy`` is tensor, channel, block or group.
  ``mxfp8-quantized`` has groups of 32, whose scales are exponents.
* ModelOpt (``quant_method: "modelopt"``, ``quant_algo: "FP8"``): one ``X.weight_scale``.

Activation scales in the file (``activation_scale``, ``input_scale``, the schemes) are ignored; the
run's recipe determines how activations are quantized.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_fp8.checkpoint.safetensors_files import SafetensorsFiles, StoredTensor
from torch_fp8.conversion.fp8_weight import FP8Weight

_E4M3 = "F8_E4M3"
_FLOATS = ("F32", "F16", "BF16", "F8_E8M0")
_PLAIN = ("float-quantized", "naive-quantized", "mxfp8-quantized")
"""The formats of compressed-tensors that store 8-bit weights unpacked, one per byte."""

_OTHERS = {
    "bitsandbytes": "bitsandbytes (NF4 or INT8)",
    "awq": "AWQ",
    "gptq": "GPTQ",
    "mxfp4": "MXFP4",
    "torchao": "torchao",
    "modelopt": "ModelOpt",
}
_WAY_OUT = (
    "torch_fp8 reads BF16, fine-grained FP8 (quant_method 'fp8'), compressed-tensors "
    "'float-quantized' and 'mxfp8-quantized', and ModelOpt 'FP8' checkpoints. Use one of these, or "
    "load this one with its own library's from_pretrained: its layers are then left unchanged, and "
    "other layers run in FP8"
)


@dataclass(frozen=True)
class CheckpointFormat:
    """An FP8 format of checkpoints.

    Attributes:
        name: the name in messages.
        scale_suffix: the text after ``X.weight`` in the key of its scales.
        blocks: the blocks (R, C) that may share a scale, as declared; 0 for all rows or columns.
    """

    name: str
    scale_suffix: str
    blocks: tuple[tuple[int, int], ...]
    ue8m0: bool = False
    """Whether scales stored as uint8 are exponents, 2 ** (byte - 127)."""

    def block_of(self, shape: tuple[int, ...], grid: tuple[int, ...]) -> tuple[int, int] | None:
        """Return the (rows, columns) that share a scale in a weight with a `grid` of scales.

        None if no declared block fits.
        """
        for rows, cols in self.blocks:
            block = (rows or shape[0], cols or shape[1])
            expected = tuple(math.ceil(n / b) for n, b in zip(shape, block, strict=True))
            if grid == expected or (expected == (1, 1) and math.prod(grid) == 1):
                return block
        return None


def read_format(path: str | Path) -> CheckpointFormat | None:
    """Return the FP8 format of a checkpoint; None if it is not quantized.

    Args:
        path: the folder of the checkpoint.
    Raises:
        ValueError: the quantization is not supported (the error names it and a way out), or is an
            unknown form of FP8.
    """
    quantization = _config(Path(path)).get("quantization_config")
    if not quantization:
        return None
    where = f"the checkpoint {str(path)!r}"
    try:
        return _format_of(quantization, where)
    except (AttributeError, TypeError) as error:  # a list in place of an object, for example
        raise ValueError(
            f"{where} has a malformed quantization_config ({error}); {_WAY_OUT}"
        ) from error


def _format_of(quantization: Mapping[str, Any], where: str) -> CheckpointFormat:
    method = str(quantization.get("quant_method", "")).replace("_", "-").lower()
    if not method and quantization.get("load_in_4bit", quantization.get("load_in_8bit")):
        method = "bitsandbytes"
    if method == "fp8":
        return _fine_grained(quantization, where)
    if method == "compressed-tensors":
        return _compressed_tensors(quantization, where)
    if method == "modelopt" and quantization.get("quant_algo") == "FP8":
        return CheckpointFormat("ModelOpt FP8", "_scale", ((0, 0),))
    name = _OTHERS.get(method.partition("-")[0], method or "an unnamed method")
    raise ValueError(f"{where} is quantized by {name}; {_WAY_OUT}")


def check_scales(
    files: SafetensorsFiles, format: CheckpointFormat | None
) -> dict[str, tuple[str, tuple[int, int]]]:
    """Check the scales of every FP8 weight, before anything is loaded.

    Args:
        files: the checkpoint.
        format: its format; None: the configuration names no quantization.
    Returns:
        For the key of each FP8 weight, the key of its scales and the block that shares one.
    Raises:
        ValueError: an FP8 weight has no scales; scales have no FP8 weight; scales have another
            shape or dtype, or are not finite, zero or negative (the error names the key); there are
            FP8 weights, but no configuration explains their scales.
    """
    if format is None:
        return _refuse_unexplained(files)
    checked = {}
    stored = files.stored
    for key in (key for key, tensor in stored.items() if tensor.dtype == "F8_E5M2"):
        raise ValueError(f"{key!r} is E5M2; weights must be E4M3: {_where(files, format)}")
    for key, weight in stored.items():
        if key.endswith(f".weight{format.scale_suffix}"):
            owner = stored.get(key.removesuffix(format.scale_suffix))
            if owner is None or owner.dtype != _E4M3:
                raise ValueError(f"{key!r} has no E4M3 weight beside it: {_where(files, format)}")
        if weight.dtype != _E4M3:
            continue
        scale_key = f"{key}{format.scale_suffix}"
        checked[key] = (scale_key, _checked_block(files, format, key, weight, scale_key))
    return checked


def read_scales(
    files: SafetensorsFiles,
) -> tuple[dict[str, tuple[str, tuple[int, int]]], set[str]]:
    """Return `check_scales` of a checkpoint in its own format, and the companion keys.

    Companion keys are those of tensors that only belong to a weight: its scales, and those of its
    input.
    """
    format = read_format(files.path)
    scales = check_scales(files, format)
    companions = {scale for scale, _ in scales.values()}
    if format is not None:
        companions |= {key for key in files if key.endswith(("activation_scale", "input_scale"))}
    return scales, companions


def read_weight(
    files: SafetensorsFiles, key: str, scale_key: str, block: tuple[int, int]
) -> FP8Weight:
    """Read one FP8 weight; `scale_key` and `block` are from `check_scales`."""
    scale = read_scale(files, scale_key, block, files.stored[key].shape)
    return FP8Weight(files[key], scale, block)


def read_scale(
    files: SafetensorsFiles, key: str, block: tuple[int, int], shape: tuple[int, ...]
) -> Tensor:
    """Read the scales of a weight of this shape as a float32 grid, from any stored dtype."""
    rows, cols = (math.ceil(n / b) for n, b in zip(shape, block, strict=True))
    return _float32(files[key]).reshape(rows, cols)


def _refuse_unexplained(files: SafetensorsFiles) -> dict[str, tuple[str, tuple[int, int]]]:
    for key, tensor in files.stored.items():
        if tensor.dtype in (_E4M3, "F8_E5M2"):
            raise ValueError(
                f"{key!r} in {str(files.path)!r} holds FP8 codes, but there is no config.json "
                "beside it with a quantization_config that describes their scales; copy the "
                "config.json that was exported with it. Nothing was loaded"
            )
    return {}


def _checked_block(
    files: SafetensorsFiles,
    format: CheckpointFormat,
    key: str,
    weight: StoredTensor,
    scale_key: str,
) -> tuple[int, int]:
    where = _where(files, format)
    if scale_key not in files.stored:
        raise ValueError(f"{scale_key!r}, the scales of {key!r}, is missing: {where}")
    scale = files.stored[scale_key]
    if len(weight.shape) != 2:
        raise ValueError(f"{key!r} has shape {weight.shape}; FP8 weights must be matrices: {where}")
    block = format.block_of(weight.shape, scale.shape)
    if block is None:
        declared = " or ".join(f"{r or 'all'} x {c or 'all'}" for r, c in format.blocks)
        raise ValueError(
            f"{scale_key!r} has shape {scale.shape}, which does not match a weight {weight.shape} "
            f"in blocks of {declared}: {where}"
        )
    if scale.dtype not in (*_FLOATS, *(["U8"] if format.ue8m0 else [])):
        raise ValueError(f"{scale_key!r} has dtype {scale.dtype}; scales must be floats: {where}")
    value = _float32(files[scale_key])
    if not bool(value.isfinite().all()):
        raise ValueError(f"{scale_key!r} holds an Inf or NaN: {where}")
    if not bool((value > 0).all()):
        raise ValueError(f"{scale_key!r} holds a scale of zero or below: {where}")
    return block


def _float32(scale: Tensor) -> Tensor:
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    return scale.to(torch.float32)


def _where(files: SafetensorsFiles, format: CheckpointFormat) -> str:
    return f"{str(files.path)!r} is not a complete {format.name} checkpoint; nothing was loaded"


def _config(path: Path) -> dict[str, Any]:
    file = (path if path.is_dir() else path.parent) / "config.json"
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    return config if isinstance(config, dict) else {}


def _fine_grained(quantization: Mapping[str, Any], where: str) -> CheckpointFormat:
    if quantization.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise ValueError(f"{where} has FP8 weights of fmt {quantization['fmt']!r}; supported: E4M3")
    block = quantization.get("weight_block_size", (128, 128))
    blocks = ((0, 0) if block is None else _pair(block, where),)
    exponents = quantization.get("scale_fmt") == "ue8m0"
    return CheckpointFormat("fine-grained FP8", "_scale_inv", blocks, exponents)


def _compressed_tensors(quantization: Mapping[str, Any], where: str) -> CheckpointFormat:
    form = quantization.get("format", "an unnamed format")
    blocks = []
    for group in quantization.get("config_groups", {}).values():
        weights = group.get("weights") or {}
        own = group.get("format") or form
        is_fp8 = weights.get("type") == "float" and weights.get("num_bits") == 8
        if own not in _PLAIN or not is_fp8:
            raise ValueError(f"{where} is a compressed-tensors checkpoint of {own!r}; {_WAY_OUT}")
        blocks.append(_strategy(weights, where))
    if form not in _PLAIN or not blocks:
        raise ValueError(f"{where} is a compressed-tensors checkpoint of {form!r}; {_WAY_OUT}")
    name = f"compressed-tensors {form!r}"
    exponents = form == "mxfp8-quantized"
    return CheckpointFormat(name, "_scale", tuple(dict.fromkeys(blocks)), exponents)


def _strategy(weights: Mapping[str, Any], where: str) -> tuple[int, int]:
    strategy = weights.get("strategy")
    if strategy == "tensor":
        return 0, 0
    if strategy == "channel":
        return 1, 0
    if strategy == "block":
        return _pair(weights.get("block_structure"), where)
    if strategy == "group":
        return 1, _pair((1, weights.get("group_size")), where)[1]
    raise ValueError(
        f"{where} has weights of strategy {strategy!r}; supported: tensor, channel, block and group"
    )


def _pair(block: Any, where: str) -> tuple[int, int]:
    if isinstance(block, str):  # older compressed-tensors wrote "128x128"
        block = [int(side) if side.isdigit() else 0 for side in block.lower().split("x")]
    sides = tuple(block) if isinstance(block, (list, tuple)) else ()
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise ValueError(f"{where} has weights in blocks of {block!r}; two sizes are expected")
    return sides[0], sides[1]
