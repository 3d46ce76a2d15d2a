"""The FP8 formats of checkpoints, read from and written to ``quantization_config`` in config.json.

In all of them a weight is ``E4M3 code * scale``, whatever the scale is called. What is read:

* Fine-grained FP8 (``quant_method: "fp8"``; DeepSeek-V3, Qwen3-FP8): ``X.weight`` in E4M3 and
  ``X.weight_scale_inv``, float32, one for each block of ``weight_block_size``, or one for the
  tensor if that is null.
* compressed-tensors (``quant_method: "compressed-tensors"``, ``format: "float-quantized"``):
  ``X.weight`` in E4M3 and ``X.weight_scale``; ``strategy`` is tensor, channel, block or group.
  ``mxfp8-quantized`` has groups of 32, whose scales are exponents.
* ModelOpt (``quant_method: "modelopt"``, ``quant_algo: "FP8"``): one ``X.weight_scale``.

Activation scales in the file (``activation_scale``, ``input_scale``, the schemes) are ignored; the
run's recipe determines how activations are quantized. What is written, for engines:

| format | recipe | weights | activations |
|---|---|---|---|
| ``fine-grained`` | blockwise | ``weight_scale_inv`` of 128 x 128, float32 | dynamic, 1 x 128 |
| ``compressed-tensors`` | tensorwise | strategy tensor | dynamic, one scale |
| | rowwise | channel | dynamic, token |
| | blockwise | block 128 x 128 | dynamic, group of 128 |
| | mxfp8 | group of 32, uint8 exponents (E8M0) | dynamic, group of 32 |
| ``modelopt`` | delayed | one scale | static, ``input_scale`` |

An `ExportFormat` writes its configuration first; names, shapes and dtypes of the scales are those
that `format_of` reads there, so what is written can be read.

Sources: the FP8 configurations of DeepSeek-V3 and of Qwen3-FP8; compressed-tensors 0.20, whose name
for weights in groups of 32 is ``mxfp8-quantized``; ModelOpt's ``hf_quant_config.json``.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_fp8._version import __version__
from torch_fp8.ops.quantize import QuantizedTensor
from torch_fp8.quantization.recipe import SAVE_FORMATS
from torch_fp8.quantization.wording import check_choice
from torch_fp8.tensor.frozen_payload import FROZEN_BLOCK, scale_grid

_PLAIN = ("float-quantized", "naive-quantized", "mxfp8-quantized")
"""The formats of compressed-tensors that store 8-bit weights unpacked, one per byte."""

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
        ue8m0: whether scales stored as uint8 are exponents, 2 ** (byte - 127).
    """

    name: str
    scale_suffix: str
    blocks: tuple[tuple[int, int], ...]
    ue8m0: bool = False

    def block_of(self, shape: tuple[int, ...], grid: tuple[int, ...]) -> tuple[int, int] | None:
        """Return the (rows, columns) that share a scale in a weight with a `grid` of scales.

        None if no declared block fits.
        """
        for rows, cols in self.blocks:
            block = (rows or shape[0], cols or shape[1])
            expected = scale_grid(shape, block)
            if grid == expected or (expected == (1, 1) and math.prod(grid) == 1):
                return block
        return None


def read_format(path: str | Path) -> CheckpointFormat | None:
    """Return the FP8 format of a checkpoint, or None if it is not quantized.

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
        return format_of(quantization, where)
    except (AttributeError, TypeError) as error:  # a list in place of an object, for example
        raise ValueError(
            f"{where} has a malformed quantization_config ({error}); {_WAY_OUT}"
        ) from error


def format_of(quantization: Mapping[str, Any], where: str) -> CheckpointFormat:
    """Return the format that a ``quantization_config`` describes; `where` names it in errors."""
    method = str(quantization.get("quant_method", "")).replace("_", "-").lower()
    if not method and quantization.get("load_in_4bit", quantization.get("load_in_8bit")):
        method = "bitsandbytes"
    if method == "fp8":
        return _fine_grained(quantization, where)
    if method == "compressed-tensors":
        return _compressed_tensors(quantization, where)
    if method == "modelopt" and quantization.get("quant_algo") == "FP8":
        return CheckpointFormat("ModelOpt FP8", "_scale", ((0, 0),))
    raise ValueError(f"{where} is quantized by {method or 'an unnamed method'}; {_WAY_OUT}")


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
        blocks.append(block_of_strategy(weights, where))
    if form not in _PLAIN or not blocks:
        raise ValueError(f"{where} is a compressed-tensors checkpoint of {form!r}; {_WAY_OUT}")
    name = f"compressed-tensors {form!r}"
    exponents = form == "mxfp8-quantized"
    return CheckpointFormat(name, "_scale", tuple(dict.fromkeys(blocks)), exponents)


def block_of_strategy(weights: Mapping[str, Any], where: str) -> tuple[int, int]:
    """Return the (rows, columns) that share a scale in compressed-tensors' weights; 0 for all."""
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


_GROUP_OF_32 = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
_STRATEGIES: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "tensorwise": ({"strategy": "tensor"}, {"strategy": "tensor"}),
    "rowwise": ({"strategy": "channel"}, {"strategy": "token"}),
    "blockwise": (
        {"strategy": "block", "block_structure": [*FROZEN_BLOCK]},
        {"strategy": "group", "group_size": FROZEN_BLOCK[1]},
    ),
    "mxfp8": (_GROUP_OF_32, _GROUP_OF_32),
}
"""compressed-tensors' description of the weights and activations of each recipe."""


@dataclass(frozen=True)
class ExportFormat:
    """A format, and the recipe that its files express.

    Args:
        name: ``fine-grained``, ``compressed-tensors`` or ``modelopt``.
        recipe: one of `SAVE_FORMATS`.
    Raises:
        ValueError: the format is unknown, or cannot express the recipe (the error names one that
            can).
    """

    name: str
    recipe: str

    def __post_init__(self) -> None:
        check_choice("format", self.name, tuple(SAVE_FORMATS))
        if self.recipe in SAVE_FORMATS[self.name]:
            return
        others = [name for name, recipes in SAVE_FORMATS.items() if self.recipe in recipes]
        raise ValueError(
            f"format {self.name!r} cannot express recipe {self.recipe!r}, only "
            f"{' and '.join(SAVE_FORMATS[self.name])}; use format={others[0]!r}"
        )

    @cached_property
    def reads_as(self) -> CheckpointFormat:
        """The format of the files for a reader."""
        return format_of(self.quantization_config(()), self.name)

    @property
    def block(self) -> tuple[int, int]:
        """The (rows, columns) that share a scale; 0 for all."""
        return self.reads_as.blocks[0]

    @property
    def is_static(self) -> bool:
        """Whether the file contains the scale of the activations."""
        return self.name == "modelopt"

    def refusal(self, rows: int, cols: int) -> str | None:
        """Return why a weight (rows, cols) cannot be stored in FP8, or None if it can.

        transformers derives the blocks from the shape of the scales, so blocks must divide the
        weight.
        """
        height, width = self.block
        if height > 1 and (rows % height or cols % width):
            return f"its sides, {rows} x {cols}, are not multiples of {height}"
        if height == 1 and width and cols % width:
            return f"its {cols} input features are not a multiple of {width}"
        return None

    def tensors(
        self, name: str, payload: QuantizedTensor, input_scale: Tensor | None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) in the file for a layer's weight.

        Args:
            name: the layer's name in the file.
            payload: the weight (N, K), quantized along its input features.
            input_scale: the scale () of the input if `is_static`, else None.
        """
        (rows, cols), (height, width) = payload.qdata.shape, self.block
        grid: tuple[int, ...] = () if self.is_static else (1,)
        if height:
            grid = scale_grid((rows, cols), (height, width or cols))
        scale = payload.scale
        if self.reads_as.ue8m0:
            scale = scale.contiguous().to(torch.float8_e8m0fnu).view(torch.uint8)
        yield f"{name}.weight", payload.qdata
        yield f"{name}.weight{self.reads_as.scale_suffix}", scale.reshape(grid)
        if input_scale is not None:
            yield f"{name}.input_scale", input_scale

    def quantization_config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """Return the ``quantization_config`` for config.json.

        Args:
            ignored: the qualified names of the linear layers that are not in FP8.
        """
        if self.name == "fine-grained":
            return {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "weight_block_size": [*FROZEN_BLOCK],
                "modules_to_not_convert": list(ignored),
            }
        method: dict[str, Any]
        numbers = {"num_bits": 8, "type": "float"}
        if self.is_static:
            weights = activations = {**numbers, "dynamic": False}
            method = {"quant_method": "modelopt", "quant_algo": "FP8", "producer": _producer()}
        else:
            strategies = _STRATEGIES[self.recipe]
            weights, activations = (
                {**numbers, "symmetric": True, "dynamic": dynamic, **strategy}
                for dynamic, strategy in zip((False, True), strategies, strict=True)
            )
            method = {
                "quant_method": "compressed-tensors",
                "format": "mxfp8-quantized" if self.recipe == "mxfp8" else "float-quantized",
                "quantization_status": "compressed",
                "kv_cache_scheme": None,
            }
        group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
        return {**method, "config_groups": {"group_0": group}, "ignore": list(ignored)}

    def other_files(self, ignored: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return the format's other JSON files by name."""
        if self.name != "modelopt":
            return {}
        quantization = {
            "quant_algo": "FP8",
            "kv_cache_quant_algo": None,
            "exclude_modules": list(ignored),
        }
        return {
            "hf_quant_config.json": {"producer": _producer(), "quantization": quantization},
        }


def _producer() -> dict[str, str]:
    # Engines check the name, which must be the format's; the version names the actual writer.
    return {"name": "modelopt", "version": f"torch-fp8 {__version__}"}
