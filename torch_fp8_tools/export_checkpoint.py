"""``torch-fp8 export``: write a checkpoint on disk to a folder that inference engines load.

The model is built without data and converted as in training. Each tensor is read from its file when
its turn comes, cast, written and freed. The weights are those of training's forward: a host saves
whole float32 weights, of which training multiplied by the upper half, BF16
(`torch_fp8.quantization.split_float`). FP8 weights with the recipe's blocks keep their bytes.
"""

import argparse
import dataclasses
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_fp8.checkpoint.adapters import AdapterFold
from torch_fp8.checkpoint.export import (
    ExportReport,
    write_folder,
    write_quantization,
)
from torch_fp8.checkpoint.exported_tensors import ModelTensors, exported_tensors
from torch_fp8.checkpoint.files import SafetensorsFiles, copy_tokenizer, parse_size, refuse_existing
from torch_fp8.checkpoint.formats import export_format
from torch_fp8.checkpoint.load import QuantizedFiles, built_without_data, check_keys
from torch_fp8.checkpoint.names import homes_of, stored_parts
from torch_fp8.config import FP8Config, config_or_default
from torch_fp8.conversion.convert import convert_to_float8
from torch_fp8.conversion.revert import load_scaling_state_dict
from torch_fp8.nn.layer_filter import expert_weights
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.nn.scale_buffers import BUFFERS
from torch_fp8.optim.state import MIN_NUMEL
from torch_fp8.quantization.split_float import RESIDUAL_BITS, split
from torch_fp8.tensor.frozen_payload import FP8Weight, freeze_tensor
from torch_fp8.tensor.frozen_weight import frozen_parameter
from torch_fp8_tools.env.machine import usable_device
from torch_fp8_tools.host_models import model_class, model_folder
from torch_fp8_tools.parsers import FORMATS

_HISTORY = "fp8_scaling_0.safetensors"
"""The file with delayed scaling's history that hosts write next to a checkpoint."""


def export(options: argparse.Namespace) -> int:
    """Run the sub-command ``torch-fp8 export``; returns the exit status."""
    if options.format is None:
        raise ValueError(f"name the format with --format: {FORMATS}")
    config = FP8Config() if options.config is None else FP8Config.from_json(options.config)
    if options.recipe is not None:
        config = dataclasses.replace(config, recipe=options.recipe)
    checkpoint = model_folder(options.checkpoint) or options.checkpoint
    written = (checkpoint, options.path, options.format, config)
    device, most = usable_device(options.device), options.max_shard_size
    cls = model_class(checkpoint)
    print(export_checkpoint(cls, *written, device=device, max_shard_size=most))
    return 0


def export_checkpoint(
    cls: Any,
    checkpoint: str | Path,
    path: str | Path,
    format: str,
    config: FP8Config | str,
    *,
    device: torch.device | str = "cpu",
    max_shard_size: int | str = "5GB",
) -> ExportReport:
    """Export a checkpoint to a folder that inference engines load, without holding the whole model.

    Args:
        cls: a transformers class, which builds the model that ``config.json`` describes.
        checkpoint: a folder with ``*.safetensors`` files and ``config.json``, as
            ``save_pretrained`` writes it: in 16 or 32 bits, or FP8 as `torch_fp8.load_frozen` reads
            it.
        path, format, max_shard_size: see `torch_fp8.export`.
        config: the training configuration, or the name of a recipe other than ``auto``. At levels
            O2 and O3 float32 matrices are rounded to BF16, as they are split for training; at O1
            they are cast directly.
        device: the device for the casts.
    Returns:
        A report on the written tensors.
    Raises:
        ValueError: see `torch_fp8.export`; the checkpoint belongs to another model, or is broken;
            the recipe is ``delayed`` and there is no history of amaxes next to the checkpoint.
        OSError: see `torch_fp8.export`.
    """
    config = config_or_default(config)
    if config.recipe == "auto":
        raise ValueError(
            "name the recipe that training used; recipe 'auto' chooses on the training card"
        )
    export_format(format, config.recipe)
    most, path = parse_size(max_shard_size), refuse_existing(path)
    source = Path(checkpoint)
    if not (source / "config.json").is_file():
        SafetensorsFiles(source)  # a folder without weights is refused for that
        if (source / "adapter_config.json").is_file():
            raise ValueError(
                f"{str(source)!r} is an adapter without its base; load both (PEFT's "
                "AutoPeftModelForCausalLM), then torch_fp8.export(model, ..., adapters='merge')"
            )
        raise ValueError(f"{str(source)!r} has no config.json, which engines read; add the model's")
    files = QuantizedFiles(source)
    model = built_without_data(cls, source)
    tensors = _Tensors(files, config, torch.device(device), model)
    history = _history(source) if config.recipe == "delayed" else {}
    for key, amaxes in history.items():
        if key.endswith(".amax_history"):
            config = dataclasses.replace(config, amax_history_len=amaxes.shape[1])
    convert_to_float8(model, config, device="cpu")
    if history:
        for layer in model.modules():
            for name in BUFFERS if isinstance(layer, Float8Layer) else ():
                setattr(layer, name, torch.zeros_like(getattr(layer, name), device="cpu"))
        load_scaling_state_dict(model, history)
    written = exported_tensors(model, format, AdapterFold(model, merge=False), tensors)

    def configure(folder: Path) -> None:
        for name in ("config.json", "generation_config.json"):
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        write_quantization(folder, written)
        copy_tokenizer(source, folder)

    return write_folder(model, written, path, most, configure)


class _Tensors(ModelTensors):
    """The tensors of a checkpoint, read when needed.

    Args:
        files: the checkpoint.
        config: the training configuration.
        device: the device for the values.
        model: the model; a tied tensor of it may be stored under any of its names.
    Raises:
        ValueError: names or shapes differ.
    """

    def __init__(
        self, files: QuantizedFiles, config: FP8Config, device: torch.device, model: nn.Module
    ) -> None:
        super().__init__()
        self._files, self._device = files, device
        self._splits = config.keeps_residuals
        tensors = {key: getattr(*owners[0]) for key, owners in homes_of(model).items()}
        shapes = {key: tensor.shape for key, tensor in tensors.items()}
        fused = [key for name, m in model.named_modules() for key in expert_weights(name, m)]
        parts = stored_parts(model, shapes, fused)
        expected = {
            part.name: part.of(tensors[key]) for key, of_key in parts.items() for part in of_key
        }
        check_keys(model, files, expected)
        stored = {id(expected[key]): key for key in files}
        self._places = {
            key: [stored[id(expected[part.name])] for part in of_key]
            for key, of_key in parts.items()
        }

    def dtype(self, key: str, tensor: Tensor) -> torch.dtype:
        return self._files.dtype(self._places[key][0])

    def values(self, key: str, tensor: Tensor, layer: Float8Layer | None) -> Tensor:
        values = [self._values(place, key, tensor, layer) for place in self._places[key]]
        return values[0] if len(values) == 1 else torch.cat(values).view(tensor.shape)

    def _values(self, place: str, key: str, tensor: Tensor, layer: Float8Layer | None) -> Tensor:
        read = self._files.read(place).to(self._device)
        if not isinstance(read, FP8Weight):
            is_matrix = isinstance(tensor, nn.Parameter) and tensor.ndim >= 2
            if self._splits and read.dtype == torch.float32 and is_matrix:
                return split(read, RESIDUAL_BITS)[0] if tensor.numel() >= MIN_NUMEL else read
            return read
        if layer is None:
            return read.dequantize(torch.bfloat16)
        spec = layer.fp8.recipe.weight
        keeps = spec.granularity in ("block_128x128", "tensorwise") and not spec.delayed
        if keeps and read.scale_for(spec) is not None:
            return frozen_parameter(freeze_tensor(read, spec, key))
        return read.dequantize()


def _history(source: Path) -> dict[str, Tensor]:
    """Return the history of the first model that has one; a criterion may come before it."""
    file = source / _HISTORY
    files: Any = SafetensorsFiles(file) if file.is_file() else {}
    if not any(key.endswith(".amax_history") for key in files):
        raise ValueError(
            f"{str(source)!r} has no {_HISTORY}, which the hosts write next to a checkpoint: "
            "recipe 'delayed' needs the amaxes of training for input_scale; export the trained "
            "model itself, or choose another recipe and format"
        )
    first = min((key.partition(".")[0] for key in files), key=int) + "."
    return {key.removeprefix(first): files[key] for key in files if key.startswith(first)}
