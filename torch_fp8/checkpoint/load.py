"""Load a model directly from a checkpoint, layer by layer, without a second copy of the weights.

The model is built without data. Each tensor is then read from its file (`QuantizedFiles`),
converted to the form that the model keeps, and freed before the next one is read.
"""

import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torch_fp8.checkpoint.files import SafetensorsFiles
from torch_fp8.checkpoint.formats import Block, FileFormat, decoded, parse_format
from torch_fp8.checkpoint.names import homes_of
from torch_fp8.config import FP8Config, config_or_default
from torch_fp8.conversion.convert import convert
from torch_fp8.conversion.freeze import refuse_kept
from torch_fp8.conversion.frozen_layers import FreezeReport, freeze_weights, frozen_recipe
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.optim.residual import split_parts
from torch_fp8.quantization.argument_types import check_arguments
from torch_fp8.tensor.frozen_payload import FP8Weight, freeze_tensor
from torch_fp8.tensor.frozen_weight import frozen_parameter

Read: TypeAlias = Tensor | FP8Weight
Place = Callable[[str, nn.Module, Read], Tensor]
"""The function that creates a layer's tensor from what was read:
``place(qualified name, layer, read)``.
"""


class _EmptyOnMeta(TorchFunctionMode):
    """Creates parameters without values, on the meta device; computed buffers have theirs."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


class QuantizedFiles(SafetensorsFiles):
    """The tensors of a checkpoint in 16 or 32 bits, or in one of the FP8 formats.

    The keys are those of weights and other tensors, without scales and other companions of weights.

    Args:
        path: see `SafetensorsFiles`.
    Attributes:
        format: the FP8 format, or None if the configuration names no quantization.
        fp8: the block that shares a scale, by the key of each FP8 weight.
    Raises:
        ValueError: see `SafetensorsFiles` and `read_format`; an FP8 weight has no scales; scales
            have no FP8 weight; scales have another shape or dtype, or are not finite, zero or
            negative (the error names the key); there are FP8 weights, but no configuration explains
            their scales.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.format = read_format(self.path)
        self.fp8: dict[str, Block] = dict(self._checked())

    def __iter__(self) -> Iterator[str]:
        format = self.format
        scales = set() if format is None else {format.scale_key(key) for key in self.fp8}
        others = () if format is None else ("activation_scale", "input_scale")
        return (key for key in self.stored if key not in scales and not key.endswith(others))

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype in which a tensor is used: BF16 for FP8 weights."""
        return torch.bfloat16 if key in self.fp8 else self.stored[key].dtype

    def read(self, key: str) -> Tensor | FP8Weight:
        """Read a tensor, or an FP8 weight with its scales."""
        if key not in self.fp8:
            return self[key]
        assert self.format is not None
        return self.format.weight(self[key], self[self.format.scale_key(key)], self.fp8[key])

    def _checked(self) -> Iterator[tuple[str, Block]]:
        """Check all scales before anything is loaded, and yield the entries of `fp8`."""
        codes = torch.float8_e4m3fn, torch.float8_e5m2
        for key, tensor in self.stored.items():
            if self.format is None and tensor.dtype in codes:
                raise ValueError(
                    f"{key!r} in {str(self.path)!r} holds FP8 codes, but there is no config.json "
                    "next to it with a quantization_config that describes their scales; copy the "
                    "config.json that was exported with it. Nothing was loaded"
                )
            if tensor.dtype == torch.float8_e5m2:
                raise self._broken(f"{key!r} is E5M2; weights must be E4M3")
        if self.format is None:
            return
        suffix = self.format.scale_key("")
        for key, weight in self.stored.items():
            if key.endswith(f".weight{suffix}"):
                owner = self.stored.get(key.removesuffix(suffix))
                if owner is None or owner.dtype != torch.float8_e4m3fn:
                    raise self._broken(f"{key!r} has no E4M3 weight to scale")
            if weight.dtype == torch.float8_e4m3fn:
                yield key, self._checked_block(self.format, key)

    def _checked_block(self, format: FileFormat, key: str) -> Block:
        scale_key = format.scale_key(key)
        if scale_key not in self.stored:
            raise self._broken(f"{scale_key!r}, the scales of {key!r}, is missing")
        try:
            block = format.block_of(key, self.stored[key], self.stored[scale_key])
        except ValueError as error:
            raise self._broken(str(error)) from None
        value = decoded(self[scale_key])
        if not bool(value.isfinite().all()):
            raise self._broken(f"{scale_key!r} holds an Inf or NaN")
        if not bool((value > 0).all()):
            raise self._broken(f"{scale_key!r} holds a scale of zero or below")
        return block

    def _broken(self, what: str) -> ValueError:
        assert self.format is not None
        return ValueError(
            f"{what}: {str(self.path)!r} is not a complete {self.format.title} checkpoint; nothing "
            "was loaded"
        )


def read_format(path: Path) -> FileFormat | None:
    """Return the FP8 format of a checkpoint, or None if it is not quantized.

    Args:
        path: the folder of the checkpoint, or one of its files.
    Raises:
        ValueError: ``config.json`` cannot be read; see `torch_fp8.checkpoint.formats.parse_format`.
    """
    file = (path if path.is_dir() else path.parent) / "config.json"
    if not file.is_file():
        return None
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    quantization = config.get("quantization_config") if isinstance(config, dict) else None
    return parse_format(quantization, f"the checkpoint {str(path)!r}") if quantization else None


@torch.inference_mode(False)
def load_trainable(
    cls: Any,
    path: str | Path,
    config: FP8Config | str | None = None,
    *,
    device: torch.device | str | None = None,
) -> nn.Module:
    """Load a model for full training; FP8 weights become BF16 with a residual.

    Weight and residual together are within a relative 2^-16 of the file's values, E4M3 times
    float32. BF16 alone, as transformers dequantizes, is within 2^-9. The residuals are kept for the
    optimizer, which `torch_fp8.convert_optimizer` converts; level O1 has none.

    Args:
        cls: a transformers class (for example ``AutoModelForCausalLM``) that builds the model
            described by ``config.json``, or a function without arguments that returns the model.
        path: a folder with ``*.safetensors`` files, or one such file, in FP8 (see
            `torch_fp8.checkpoint.formats`), BF16 or another dtype. Tensors that are not
            FP8 keep their dtype.
        config: the configuration; only `opt_level` and `split_weights` matter here.
        device: the model's device, or None for the CPU.
    Returns:
        The model in evaluation mode, as from ``from_pretrained``; all parameters require gradients.
    Raises:
        ValueError: the quantization is not supported; scales are broken; tensors are missing from
            the model or from the file. Nothing is loaded then.
        TypeError: `cls` does not build a model.
    """
    config = config_or_default(config)
    check_arguments(load_trainable, locals())

    def place(name: str, layer: nn.Module, read: Read) -> Tensor:
        if isinstance(read, Tensor):
            return read
        if not config.keeps_residuals:
            return read.dequantize(torch.bfloat16)
        parameter = nn.Parameter(torch.empty_like(read.qdata, dtype=torch.bfloat16))
        split_parts(parameter, read.parts())
        return parameter

    model, files = _built(cls, path)
    return _fill(model, files, torch.device("cpu" if device is None else device), place)


@torch.inference_mode(False)
def load_frozen(
    cls: Any,
    path: str | Path,
    config: FP8Config | str | None = None,
    *,
    device: torch.device | str | None = None,
) -> nn.Module:
    """Load a frozen model whose FP8 layers store their weights only in FP8.

    The model equals one after `torch_fp8.freeze`, but its weights never exist in 16 bits: each
    weight is quantized as soon as it is read. The bytes of an FP8 checkpoint are kept if its scales
    belong to blocks of 128 x 128 elements (and the device has GEMMs for these) or to whole tensors;
    other weights are quantized again. You can add adapters to the model and prepare it like any
    other.

    Args:
        cls, path: see `load_trainable`.
        config: the configuration for the layers, or None as in `torch_fp8.convert_to_float8`.
        device: the model's device, or None for the CPU.
    Returns:
        The model in evaluation mode; no parameter requires gradients.
    Raises:
        ValueError: see `load_trainable`, `torch_fp8.convert_to_float8` and `torch_fp8.freeze`.
        TypeError: `cls` does not build a model.
    """
    config = config_or_default(config)
    check_arguments(load_frozen, locals())
    refuse_kept(config, "load_frozen")
    target = torch.device("cpu" if device is None else device)
    spec = frozen_recipe(config, target)[0].weight

    def place(name: str, layer: nn.Module, read: Read) -> Tensor:
        if not isinstance(layer, Float8Layer) or not name.endswith("weight"):
            return _plain(read)
        return frozen_parameter(freeze_tensor(read, spec, name, torch.bfloat16))

    def fill(model: nn.Module, config: FP8Config, device: torch.device) -> FreezeReport:
        _fill(model, files, device, place)
        for layer in model.modules():
            if isinstance(layer, Float8Layer) and layer.frozen_weight is None:
                layer.restart()  # the layer was created on the meta device
        return freeze_weights(model, config, device, lambda _: False)  # those placed here

    model, files = _built(cls, path)
    convert(model, config, target, fill)
    return model.requires_grad_(False)


def _plain(read: Read) -> Tensor:
    return read if isinstance(read, Tensor) else read.dequantize(torch.bfloat16)


def _built(cls: Any, path: str | Path) -> tuple[nn.Module, QuantizedFiles]:
    """Return a model without data, and the checkpoint that fits it."""
    files = QuantizedFiles(path)
    model = built_without_data(cls, files.path.parent if files.path.is_file() else files.path)
    homes = homes_of(model)
    check_keys(model, files, {key: getattr(*owners[0]) for key, owners in homes.items()})
    return model, files


@torch.no_grad()
def _fill(model: nn.Module, files: QuantizedFiles, target: torch.device, place: Place) -> nn.Module:
    """Fill a model without data, which may be converted, from a checkpoint."""
    homes = homes_of(model)
    for key in files:
        owners, read = homes[key], files.read(key).to(target)
        _assign(owners, place(key, owners[0][0], read) if len(owners) == 1 else _plain(read))
    for module in model.modules():
        # Histories of FP8 layers have no data yet: they restart once their weights are loaded.
        buffers = () if isinstance(module, Float8Layer) else module.named_buffers(recurse=False)
        for name, buffer in [*buffers]:
            setattr(module, name, buffer.to(target))
    return model.eval()


def _assign(owners: list[tuple[nn.Module, str]], value: Tensor) -> None:
    """Set a tensor in all modules that share it."""
    module, name = owners[0]
    old = module._parameters.get(name)
    if old is not None and not isinstance(value, nn.Parameter):
        value = nn.Parameter(value, requires_grad=old.requires_grad and value.is_floating_point())
    for module, name in owners:
        setattr(module, name, value)


def built_without_data(cls: Any, path: Path) -> nn.Module:
    """Build the model of `cls` with its parameters on the meta device."""
    config = None
    if hasattr(cls, "from_config"):  # an AutoModel of transformers
        package = importlib.import_module(cls.__module__.partition(".")[0])
        config = package.AutoConfig.from_pretrained(path)
    elif getattr(cls, "config_class", None) is not None:
        config = cls.config_class.from_pretrained(path)
    with _EmptyOnMeta():
        if config is None:
            model = cls() if callable(cls) else None
        else:
            if hasattr(config, "quantization_config"):
                del config.quantization_config
            model = getattr(cls, "from_config", getattr(cls, "_from_config", cls))(config)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{cls!r} does not build a model; pass a transformers class, such as "
            "AutoModelForCausalLM, or a function without arguments that returns the model"
        )
    if config is not None:
        model.config.name_or_path = model.name_or_path = str(path)
    if callable(getattr(model, "tie_weights", None)):
        model.tie_weights()
    return model


def check_keys(model: nn.Module, files: QuantizedFiles, expected: Mapping[str, Tensor]) -> None:
    """Compare the names and shapes of file and model.

    Args:
        model: the model.
        files: the checkpoint.
        expected: the model's tensors by name; tied ones are the same object.
    Raises:
        ValueError: they differ; the error names the first differences.
    """
    what = f"the checkpoint {str(files.path)!r} does not fit {type(model).__name__}"
    why = "nothing was loaded; use from_pretrained for models whose checkpoints have other names"
    present = {id(expected[key]) for key in files if key in expected}
    missing = [name for name, tensor in expected.items() if id(tensor) not in present]
    unknown = [key for key in files if key not in expected]
    if missing or unknown:
        lacks = f"it is missing {missing[0]!r} and {len(missing) - 1} more" if missing else ""
        has = f"it has unexpected {unknown[0]!r} and {len(unknown) - 1} more" if unknown else ""
        raise ValueError(f"{what}: {' and '.join(filter(None, (lacks, has)))}; {why}")
    for key in files:
        shape, fitting = tuple(files.stored[key].shape), tuple(expected[key].shape)
        if shape != fitting:
            raise ValueError(f"{what}: {key!r} has shape {shape}, not {fitting}; {why}")
