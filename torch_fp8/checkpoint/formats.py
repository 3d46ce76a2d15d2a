"""The FP8 formats of checkpoints: a table whose rows write and read ``quantization_config``.

In all of them a weight is ``E4M3 code * scale``, whatever the scale is called:

| format | ``quant_method`` | scales | read | written for recipe |
|---|---|---|---|---|
| ``fine-grained`` | ``fp8`` | ``X.weight_scale_inv`` | any block, one scale | blockwise |
| ``compressed-tensors`` | the same | ``X.weight_scale`` | strategy tensor | tensorwise |
| | | | channel | rowwise |
| | | | block of any size | blockwise |
| | | | group of any size; of 32 with uint8 exponents (E8M0) | mxfp8 |
| ``modelopt`` | the same | ``X.weight_scale`` | ``quant_algo: "FP8"`` | delayed |

A row of `METHODS` has two halves, ``describe`` and its inverse ``parse``, and a `FileFormat` has
two, `FileFormat.tensors` and `FileFormat.weight`. `export_format` returns what `parse_format`
reads in the description that it writes. So a format that cannot be read cannot be written.

Activation scales in a file (``activation_scale``, ``input_scale``, the schemes) are ignored when it
is read; the run's recipe determines how activations are quantized. For engines they are written as
dynamic, with the strategy of the weight's rows; ``modelopt`` has one static ``input_scale``.

Sources: the FP8 configurations of DeepSeek-V3 and of Qwen3-FP8; compressed-tensors 0.20, whose name
for weights in groups of 32 is ``mxfp8-quantized``; ModelOpt's ``hf_quant_config.json``.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_fp8._version import __version__
from torch_fp8.ops.quantize import QuantizedTensor
from torch_fp8.quantization.payload_shape import GRANULARITIES
from torch_fp8.quantization.recipe import SAVE_FORMATS, make_recipe
from torch_fp8.quantization.wording import check_choice
from torch_fp8.tensor.frozen_payload import FP8Weight, scale_grid

Block = tuple[int, int]
"""Numbers of rows and columns that share a scale; 0 for all."""
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e8m0fnu)
_PLAIN = ("float-quantized", "naive-quantized", "mxfp8-quantized")
"""The formats of compressed-tensors that store 8-bit weights unpacked, one per byte."""

_WAY_OUT = (
    "torch_fp8 reads BF16, fine-grained FP8 (quant_method 'fp8'), compressed-tensors "
    "'float-quantized' and 'mxfp8-quantized', and ModelOpt 'FP8' checkpoints. Use one of these, or "
    "load this one with its own library's from_pretrained: its layers are then left unchanged, and "
    "other layers run in FP8"
)


@dataclass(frozen=True)
class FileFormat:
    """An FP8 format of files: the names, shapes and dtypes of a weight and its scales.

    Attributes:
        name: the format's key in `METHODS`.
        blocks: the blocks that may share a scale, as declared.
        exponents: whether scales stored as uint8 are exponents, 2 ** (byte - 127).
        title: the name in messages about a file.
        recipe: the recipe whose weights are written; empty for a file that was read.
    """

    name: str
    blocks: tuple[Block, ...]
    exponents: bool = False
    title: str = field(default="", compare=False)
    recipe: str = field(default="", compare=False)

    @property
    def block(self) -> Block:
        """The only block of a format that an export writes."""
        return self.blocks[0]

    @property
    def is_static(self) -> bool:
        """Whether the file contains the scale of the activations."""
        return self.name == "modelopt"

    def scale_key(self, key: str) -> str:
        """Return the key of the scales of the weight with this key."""
        return key + METHODS[self.name].scale_suffix

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
        if self.exponents:
            scale = scale.contiguous().to(torch.float8_e8m0fnu).view(torch.uint8)
        key = f"{name}.weight"
        yield key, payload.qdata
        yield self.scale_key(key), scale.reshape(grid)
        if input_scale is not None:
            yield f"{name}.input_scale", input_scale

    def weight(self, qdata: Tensor, scale: Tensor, block: Block) -> FP8Weight:
        """Return the weight of the tensors in a file: the inverse of `tensors`.

        Args:
            qdata: (N, K) E4M3.
            scale: the scales, as stored.
            block: the result of `block_of`.
        """
        return FP8Weight(qdata, decoded(scale).reshape(scale_grid(qdata.shape, block)), block)

    def block_of(self, key: str, weight: Tensor, scale: Tensor) -> Block:
        """Return the (rows, columns) that share a scale in a weight of a file.

        Args:
            key: the weight's key.
            weight, scale: the two tensors, which may be on the meta device.
        Raises:
            ValueError: no declared block fits; the weight is no matrix, or scales are not floats.
        """
        shape, grid = tuple(weight.shape), tuple(scale.shape)
        if len(shape) != 2:
            raise ValueError(f"{key!r} has shape {shape}; FP8 weights must be matrices")
        blocks = [(r or shape[0], c or shape[1]) for r, c in reversed(self.blocks)]
        by_grid = {scale_grid(shape, block): block for block in blocks}
        block = by_grid.get((1, 1) if math.prod(grid) == 1 else grid)
        if block is None:
            declared = " or ".join(f"{r or 'all'} x {c or 'all'}" for r, c in self.blocks)
            raise ValueError(
                f"{self.scale_key(key)!r} has shape {grid}, which does not match a weight {shape} "
                f"in blocks of {declared}"
            )
        if scale.dtype not in (*_FLOATS, *[torch.uint8] * self.exponents):
            what = f"{self.scale_key(key)!r} has dtype {scale.dtype}"
            raise ValueError(f"{what}; scales must be floats")
        return block

    def quantization_config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """Return the ``quantization_config`` for config.json.

        Args:
            ignored: the qualified names of the linear layers that are not in FP8.
        """
        row = METHODS[self.name]
        return {**row.describe(self), row.ignored: list(ignored)}

    def other_files(self, ignored: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return the format's other JSON files by name."""
        if self.name != "modelopt":
            return {}
        excluded = {"exclude_modules": list(ignored)}
        quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": None, **excluded}
        return {"hf_quant_config.json": {"producer": _PRODUCER, "quantization": quantization}}


def decoded(scale: Tensor) -> Tensor:
    """Return the float32 values of the scales in a file."""
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    return scale.to(torch.float32)


def export_format(name: str, recipe: str) -> FileFormat:
    """Return the format whose files express a recipe.

    Args:
        name: ``fine-grained``, ``compressed-tensors`` or ``modelopt``.
        recipe: one of `SAVE_FORMATS`.
    Raises:
        ValueError: the format is unknown, or cannot express the recipe (the error names one that
            can).
    """
    check_choice("format", name, tuple(SAVE_FORMATS))
    if recipe not in SAVE_FORMATS[name]:
        others = [other for other, recipes in SAVE_FORMATS.items() if recipe in recipes]
        raise ValueError(
            f"format {name!r} cannot express recipe {recipe!r}, only "
            f"{' and '.join(SAVE_FORMATS[name])}; use format={others[0]!r}"
        )
    granularity = make_recipe(recipe).weight.granularity
    block, exponents = GRANULARITIES[granularity].block, granularity == "block_1x32"
    format = FileFormat(name, (block,), exponents=exponents)
    return replace(parse_format(format.quantization_config(()), name), recipe=recipe)


def parse_format(quantization: Mapping[str, Any], where: str) -> FileFormat:
    """Return the format that a ``quantization_config`` describes.

    Args:
        quantization: the entry in config.json.
        where: the name of the file in errors.
    Raises:
        ValueError: the quantization is not supported (the error names it and a way out), or is an
            unknown form of FP8.
    """
    try:
        method = str(quantization.get("quant_method", "")).replace("_", "-").lower()
        if not method and quantization.get("load_in_4bit", quantization.get("load_in_8bit")):
            method = "bitsandbytes"
        row = METHODS.get("fine-grained" if method == "fp8" else method)
        format = None if row is None else row.parse(quantization, where)
    except (AttributeError, TypeError) as error:  # a list in place of an object, for example
        raise ValueError(
            f"{where} has a malformed quantization_config ({error}); {_WAY_OUT}"
        ) from error
    if format is None:
        raise ValueError(f"{where} is quantized by {method or 'an unnamed method'}; {_WAY_OUT}")
    return format


def _describe_fine_grained(format: FileFormat) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [*format.block] if any(format.block) else None,
    } | ({"scale_fmt": "ue8m0"} if format.exponents else {})


def _parse_fine_grained(quantization: Mapping[str, Any], where: str) -> FileFormat:
    if quantization.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise ValueError(f"{where} has FP8 weights of fmt {quantization['fmt']!r}; supported: E4M3")
    block = quantization.get("weight_block_size", (128, 128))
    blocks = ((0, 0) if block is None else _pair(block, where),)
    exponents = quantization.get("scale_fmt") == "ue8m0"
    return FileFormat("fine-grained", blocks, exponents, "fine-grained FP8")


_NUMBERS = {"num_bits": 8, "type": "float"}
_PRODUCER = {"name": "modelopt", "version": f"torch-fp8 {__version__}"}
"""Engines check the name, which must be the format's; the version names the actual writer."""


def _describe_compressed_tensors(format: FileFormat) -> dict[str, Any]:
    form = {**_NUMBERS, "symmetric": True}
    form |= {"scale_dtype": "torch.uint8"} if format.exponents else {}
    groups = {}
    for i, (rows, cols) in enumerate(format.blocks):
        weights = {**form, "dynamic": False, **_strategy_of_block(rows, cols, "channel")}
        inputs = {**form, "dynamic": True, **_strategy_of_block(min(rows, 1), cols, "token")}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        groups[f"group_{i}"] = group
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp8-quantized" if format.exponents else "float-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": groups,
    }


def _parse_compressed_tensors(quantization: Mapping[str, Any], where: str) -> FileFormat:
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
    exponents, title = form == "mxfp8-quantized", f"compressed-tensors {form!r}"
    return FileFormat("compressed-tensors", tuple(dict.fromkeys(blocks)), exponents, title)


def _strategy_of_block(rows: int, cols: int, of_rows: str) -> dict[str, Any]:
    """Return compressed-tensors' description of a block; it calls a scale for a row `of_rows`."""
    if not cols:
        return {"strategy": of_rows if rows else "tensor"}
    if rows == 1:
        return {"strategy": "group", "group_size": cols}
    return {"strategy": "block", "block_structure": [rows, cols]}


def block_of_strategy(weights: Mapping[str, Any], where: str) -> Block:
    """Return the block that compressed-tensors describes: the inverse of `_strategy_of_block`."""
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


def _pair(block: Any, where: str) -> Block:
    if isinstance(block, str):  # older compressed-tensors wrote "128x128"
        block = [int(side) if side.isdigit() else 0 for side in block.lower().split("x")]
    sides = tuple(block) if isinstance(block, (list, tuple)) else ()
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise ValueError(f"{where} has weights in blocks of {block!r}; two sizes are expected")
    return sides[0], sides[1]


def _describe_modelopt(format: FileFormat) -> dict[str, Any]:
    numbers = {**_NUMBERS, "dynamic": False}
    group = {"targets": ["Linear"], "weights": numbers, "input_activations": numbers}
    return {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "producer": _PRODUCER,
        "config_groups": {"group_0": group},
    }


def _parse_modelopt(quantization: Mapping[str, Any], where: str) -> FileFormat | None:
    is_fp8 = quantization.get("quant_algo") == "FP8"
    return FileFormat("modelopt", ((0, 0),), title="ModelOpt FP8") if is_fp8 else None


class Method(NamedTuple):
    """A row of the table: a quantization method, written to config.json and read from it.

    Attributes:
        describe: the function from a format to its entry, without the layers that are not in FP8.
        parse: its inverse, which returns None for other algorithms; its text names the file.
        scale_suffix: the text after ``X.weight`` in the key of the scales.
        ignored: the key of the entry that names the layers that are not in FP8.
    """

    describe: Callable[[FileFormat], dict[str, Any]]
    parse: Callable[[Mapping[str, Any], str], FileFormat | None]
    scale_suffix: str
    ignored: str


METHODS: Mapping[str, Method] = {
    "fine-grained": Method(
        _describe_fine_grained, _parse_fine_grained, "_scale_inv", "modules_to_not_convert"
    ),
    "compressed-tensors": Method(
        _describe_compressed_tensors, _parse_compressed_tensors, "_scale", "ignore"
    ),
    "modelopt": Method(_describe_modelopt, _parse_modelopt, "_scale", "ignore"),
}
