"""Fused experts in an exported checkpoint: a matrix for each expert and projection.

Experts run with a scale for each row, whatever the recipe of other layers
(`torch_fp8.nn.experts.expert_recipe`). Formats with a scale for each row get exactly the bytes that
training multiplies by. For formats with blocks of 128 x 128 the weights are cast again in these
blocks. The values differ from training's, but are as close to the weights, and the report says so.
Other formats get BF16, which holds training's values exactly, because the scales are powers of two.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from torch_fp8.checkpoint.export_format import ExportFormat
from torch_fp8.checkpoint.export_refusals import check_finite, refuse_unsplit
from torch_fp8.checkpoint.plain_dtype import PLAIN
from torch_fp8.checkpoint.safetensors_writer import PlannedTensor, TensorGroup
from torch_fp8.checkpoint.stored_names import StoredPart
from torch_fp8.nn.experts import Float8Experts
from torch_fp8.nn.layer_filter import ROUTER_NAMES, expert_weights
from torch_fp8.ops.quantize import QuantizedTensor, dequantize, quantize
from torch_fp8.quantization.recipe import make_recipe
from torch_fp8.tensor.base import dequantized
from torch_fp8.tensor.frozen_weight import Float8FrozenWeight

BLOCKS = "block_128x128"


class ExpertExport:
    """The export of the fused weights in one module of experts.

    Args:
        name: the module's qualified name.
        module: the experts, in FP8 or in high precision.
        parts: the checkpoint's tensors for each fused weight (E, R, C), by the weight's name.
        format: the format of the checkpoint.
    Attributes:
        is_fp8: whether the module runs in FP8.
        reason: the reason why the weights are written in BF16; empty if they are in FP8.
    Raises:
        ValueError: the experts run in FP8, but checkpoints do not split them by expert.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        parts: dict[str, list[StoredPart]],
        format: ExportFormat,
    ) -> None:
        self._module, self._format, self._parts = module, format, parts
        self.reason = ""
        self.is_fp8 = isinstance(module, Float8Experts)
        if not self.is_fp8:
            self.reason = "not in FP8"
            return
        refuse_unsplit(name, parts)
        if format.granularity not in ("rowwise", BLOCKS):
            self.reason = (
                f"experts run with one scale per row, which {format.recipe} cannot express; recipe "
                "'rowwise' or 'blockwise' writes them in FP8"
            )
        for key, of_key in parts.items():
            cols = module.get_parameter(key.rpartition(".")[2]).shape[2]
            refusals = (format.refusal(part.end - part.begin, cols) for part in of_key)
            self.reason = self.reason or next(filter(None, refusals), "")

    @property
    def recast(self) -> bool:
        """Whether the FP8 values differ from those of training."""
        return not self.reason and self._format.granularity == BLOCKS

    @property
    def ignored(self) -> list[str]:
        """The names that tell an engine that the experts are not in FP8."""
        first = next(iter(self._parts.values()))[0]
        if not self.reason or first.expert is None:
            return []
        prefix = first.name.rpartition(f".{first.expert}.")[0]
        of_each = [f"re:{re.escape(prefix)}[.].*"] * (self._format.name == "compressed-tensors")
        return [prefix, *of_each]

    def group(self, key: str, shape: torch.Size, get: Callable[[], Tensor]) -> TensorGroup:
        """Return a fused weight's tensors in the checkpoint.

        Args:
            key: the weight's name.
            shape: the weight's shape, (E, R, C).
            get: a function that returns the weight as it is stored.
        """
        planned: list[PlannedTensor] = []
        for part in self._parts[key]:
            rows = part.end - part.begin
            if self.reason:
                of_part = tuple(shape) if part.expert is None else (rows, shape[2])
                planned.append(PlannedTensor(part.name, PLAIN, of_part))
            else:
                planned += self._format.planned(part.name.removesuffix(".weight"), rows, shape[2])

        def make() -> Sequence[Tensor]:
            weight = get()
            return [t for part in self._parts[key] for t in self._tensors(part, weight)]

        return TensorGroup(tuple(planned), make)

    @torch.no_grad()
    def _tensors(self, part: StoredPart, weight: Tensor) -> Sequence[Tensor]:
        if not self.is_fp8:
            plain = part.of(dequantized(weight)).to(PLAIN)
            check_finite(part.name, plain)
            return (plain,)
        if self.recast:
            values = part.of(dequantized(weight))
            payload = quantize(values, make_recipe("blockwise").weight)
        else:
            payload = self.rows(part, weight)
        check_finite(part.name, payload)
        if self.reason:
            return (dequantize(payload, PLAIN),)
        return self._format.tensors(payload, None)

    def rows(self, part: StoredPart, weight: Tensor) -> QuantizedTensor:
        """Return a part (R, C) as training multiplies by it, with a scale (R, 1)."""
        if isinstance(weight, Float8FrozenWeight):
            fused = weight.payload.quantized
            return fused._replace(qdata=part.of(fused.qdata), scale=part.of(fused.scale))
        assert isinstance(self._module, Float8Experts)
        return quantize(part.of(weight), self._module.fp8.recipe.weight)


def with_routers(
    ignored: Iterable[str],
    places: Iterable[tuple[str, nn.Module]],
    parts: Mapping[str, Sequence[StoredPart]],
) -> list[str]:
    """Return the names of modules that are not in FP8, including the routers of experts.

    A router that is not a linear layer in transformers is one in engines. A module also appears
    under its name in checkpoints if that differs.

    Args:
        ignored: the names of linear layers that are not in FP8.
        places: all modules by name.
        parts: the checkpoint's tensors for each tensor of the model.
    """
    names = list(ignored)
    for name, module in places:
        if any(expert_weights(name, module)):
            parent = name.rpartition(".")[0]
            beside = (f"{parent}.{router}".lstrip(".") for router in ROUTER_NAMES)
            names += [router for router in beside if f"{router}.weight" in parts]
    stored = [
        parts[f"{n}.weight"][0].name.removesuffix(".weight")
        for n in names
        if f"{n}.weight" in parts
    ]
    return list(dict.fromkeys([*names, *stored]))
