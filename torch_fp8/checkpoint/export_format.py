"""The FP8 formats that inference engines load, as they are written.

| format | recipe | weights | activations |
|---|---|---|---|
| ``fine-grained`` | blockwise | ``weight_scale_inv`` of 128 x 128, float32 | dynamic, 1 x 128 |
| ``compressed-tensors`` | tensorwise | strategy tensor | dynamic, one scale |
| | rowwise | channel | dynamic, token |
| | blockwise | block 128 x 128 | dynamic, group of 128 |
| | mxfp8 | group of 32, uint8 exponents (E8M0) | dynamic, group of 32 |
| ``modelopt`` | delayed | one scale | static, ``input_scale`` |

In all of them a weight is ``E4M3 code * scale``, whatever the scale is called. Sources: the FP8
configurations of DeepSeek-V3 and of Qwen3-FP8; compressed-tensors 0.20, whose name for weights in
groups of 32 is ``mxfp8-quantized``; ModelOpt's ``hf_quant_config.json``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_fp8._version import __version__
from torch_fp8.checkpoint.safetensors_files import PlannedTensor
from torch_fp8.ops.quantize import QuantizedTensor
from torch_fp8.quantization.payload_shape import scale_shape
from torch_fp8.quantization.recipe import SAVE_FORMATS, make_recipe

BLOCKS = "block_128x128"
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
_STRATEGIES: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "tensorwise": ({"strategy": "tensor"}, {"strategy": "tensor"}),
    "rowwise": ({"strategy": "channel"}, {"strategy": "token"}),
    "blockwise": (
        {"strategy": "block", "block_structure": [128, 128]},
        {"strategy": "group", "group_size": 128},
    ),
    "mxfp8": (
        {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
    ),
}


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
        check_format(self.name)
        if self.recipe in SAVE_FORMATS[self.name]:
            return
        others = [name for name, recipes in SAVE_FORMATS.items() if self.recipe in recipes]
        raise ValueError(
            f"format {self.name!r} cannot express recipe {self.recipe!r}, only "
            f"{' and '.join(SAVE_FORMATS[self.name])}; use format={others[0]!r}"
        )

    @property
    def granularity(self) -> str:
        """The granularity of the weights."""
        return make_recipe(self.recipe).weight.granularity

    @property
    def scale_suffix(self) -> str:
        """The text after ``X.weight`` in the name of the scales."""
        return "_scale_inv" if self.name == "fine-grained" else "_scale"

    @property
    def is_static(self) -> bool:
        """Whether the file contains the scale of the activations."""
        return self.name == "modelopt"

    def refusal(self, rows: int, cols: int) -> str | None:
        """Return why a weight (rows, cols) cannot be stored in FP8; None if it can.

        transformers derives the blocks from the shape of the scales, so blocks must divide the
        weight.
        """
        if self.granularity == BLOCKS and (rows % 128 or cols % 128):
            return f"its sides, {rows} x {cols}, are not multiples of 128"
        if self.granularity == "block_1x32" and cols % 32:
            return f"its {cols} input features are not a multiple of 32"
        return None

    def planned(self, name: str, rows: int, cols: int) -> tuple[PlannedTensor, ...]:
        """Return the tensors in the file for a layer's weight (rows, cols)."""
        grid: tuple[int, ...] = () if self.name == "modelopt" else (1,)
        if self.granularity != "tensorwise":
            grid = scale_shape(rows, cols, self.granularity)
        dtype = torch.uint8 if self.recipe == "mxfp8" else torch.float32
        weight = PlannedTensor(f"{name}.weight", torch.float8_e4m3fn, (rows, cols))
        scale = PlannedTensor(f"{name}.weight{self.scale_suffix}", dtype, grid)
        if not self.is_static:
            return weight, scale
        return weight, scale, PlannedTensor(f"{name}.input_scale", torch.float32, ())

    def tensors(self, payload: QuantizedTensor, input_scale: Tensor | None) -> Sequence[Tensor]:
        """Return the tensors that `planned` describes.

        Args:
            payload: the weight, quantized along its input features.
            input_scale: the scale () of the input if `is_static`, else None.
        """
        scale = payload.scale
        if self.recipe == "mxfp8":
            scale = scale.contiguous().to(torch.float8_e8m0fnu).view(torch.uint8)
        elif self.name == "compressed-tensors" and scale.ndim == 0:
            scale = scale.reshape(1)  # () -> (1,)
        if not self.is_static:
            return payload.qdata, scale
        assert input_scale is not None
        return payload.qdata, scale, input_scale

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
                "weight_block_size": [128, 128],
                "modules_to_not_convert": list(ignored),
            }
        if self.name == "modelopt":
            static = {"num_bits": 8, "type": "float", "dynamic": False}
            group = {"targets": ["Linear"], "weights": static, "input_activations": static}
            return {
                "quant_method": "modelopt",
                "quant_algo": "FP8",
                "config_groups": {"group_0": group},
                "ignore": list(ignored),
                "producer": _producer(),
            }
        weights, activations = _STRATEGIES[self.recipe]
        group = {
            "targets": ["Linear"],
            "weights": {**_FP8, "dynamic": False, **weights},
            "input_activations": {**_FP8, "dynamic": True, **activations},
        }
        form = "mxfp8-quantized" if self.recipe == "mxfp8" else "float-quantized"
        return {
            "quant_method": "compressed-tensors",
            "format": form,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(ignored),
            "kv_cache_scheme": None,
        }

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


def check_format(name: str) -> None:
    """Check the name of a format.

    Raises:
        ValueError: the name is unknown.
    """
    if not isinstance(name, str) or name not in SAVE_FORMATS:
        known = ", ".join(map(repr, SAVE_FORMATS))
        raise ValueError(f"format {name!r} is unknown; the formats are {known}")


def _producer() -> dict[str, str]:
    # Engines check the name, which must be the format's; the version names the actual writer.
    return {"name": "modelopt", "version": f"torch-fp8 {__version__}"}
