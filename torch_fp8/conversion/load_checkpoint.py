"""Models straight from a checkpoint, layer by layer: never a second copy of the weights.

The model is built without data; then each tensor is read from its file, becomes what the model
keeps of it, and is gone before the next one is read.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torch_fp8.config import FP8Config, config_or_default
from torch_fp8.conversion.checkpoint_format import check_scales, read_format, read_weight
from torch_fp8.conversion.fp8_weight import FP8Weight
from torch_fp8.conversion.safetensors_files import SafetensorsFiles
from torch_fp8.optim.pending_residual import split_parts

Place = Callable[[str, nn.Module, FP8Weight], Tensor]
"""What makes the Parameter of a layer of an FP8 weight: ``place(name, layer, weight)``."""


class _EmptyOnMeta(TorchFunctionMode):
    """Create what has no values yet on the meta device: parameters, but no computed buffers."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def load_trainable(
    cls: Any,
    path: str | Path,
    config: FP8Config | str | None = None,
    *,
    device: torch.device | str | None = None,
) -> nn.Module:
    """Load a model to be trained as a whole; FP8 weights become BF16 and residual.

    Both together are within a relative 2^-16 of the file's values, E4M3 times float32, with the
    default ``residual_bits=8`` (2^-12 with 4); BF16 alone, as transformers dequantizes, is within
    2^-9. The residuals wait for the optimizer, which `torch_fp8.convert_optimizer` converts; at
    level O1 there are none.

    Args:
        cls: a class of transformers (``AutoModelForCausalLM``, say), which builds the model that
            ``config.json`` describes, or a function without arguments that returns the model.
        path: the folder of a checkpoint of ``*.safetensors`` files, or one such file: FP8 (see
            `torch_fp8.conversion.checkpoint_format`), BF16 or others; what is not FP8 keeps its
            dtype.
        config: its `opt_level` and `residual_bits` count.
        device: where the model is put; None: the CPU.
    Returns:
        The model in evaluation mode, as ``from_pretrained`` returns it; all parameters require
        gradients.
    Raises:
        ValueError: a quantization that is not read here; scales that are broken; tensors that the
            model does not have, or lacks. Nothing was loaded then.
        TypeError: `cls` builds no model.
    """
    config = config_or_default(config)
    bits = None if config.opt_level == "O1" else config.residual_bits

    def place(name: str, layer: nn.Module, weight: FP8Weight) -> Tensor:
        if bits is None:
            return nn.Parameter(weight.dequantize(torch.bfloat16))
        empty = torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.qdata.device)
        parameter = nn.Parameter(empty)
        split_parts(parameter, weight.parts(), bits)
        return parameter

    return load(cls, path, device, place)


@torch.no_grad()
def load(cls: Any, path: str | Path, device: torch.device | str | None, place: Place) -> nn.Module:
    """Build a model and fill it from a checkpoint; `place` makes Parameters of FP8 weights."""
    target = torch.device("cpu") if device is None else torch.device(device)
    files = SafetensorsFiles(path)
    format = read_format(path)
    scales = {} if format is None else check_scales(files, format)
    model = _built(cls, Path(path))
    homes = _homes(model)
    companions = {scale for scale, _ in scales.values()}
    if format is not None:
        companions |= {key for key in files if key.endswith(("activation_scale", "input_scale"))}
    _check_keys(model, files, homes, companions)
    for key in files:
        if key in companions:
            continue
        owners = homes[key]
        module, name = owners[0]
        if key in scales:
            weight = read_weight(files, key, *scales[key]).to(target)
            value = place(key.rpartition(".")[0], module, weight)
        else:
            value = files[key].to(target)
        _assign(owners, name, value)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(target)
    return model.eval()


def _assign(owners: list[tuple[nn.Module, str]], name: str, value: Tensor) -> None:
    """Give a tensor to all modules that share it."""
    module, _ = owners[0]
    old = module._parameters.get(name)
    if old is not None and not isinstance(value, nn.Parameter):
        trained = old.requires_grad and value.is_floating_point()
        value = nn.Parameter(value, requires_grad=trained)
    for module, name in owners:
        members = module._buffers if name in module._buffers else module._parameters
        members[name] = value


def _built(cls: Any, path: Path) -> nn.Module:
    """Build the model that `cls` names with its parameters on the meta device."""
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
            f"{cls!r} builds no model; pass a class of transformers, such as AutoModelForCausalLM, "
            "or a function without arguments that returns the model"
        )
    if config is not None:
        model.config._name_or_path = model.name_or_path = str(path)
    if callable(getattr(model, "tie_weights", None)):
        model.tie_weights()
    return model


def _homes(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Map each name of the state dict to the modules that share its tensor, and their names."""
    sharing: dict[int, list[tuple[nn.Module, str]]] = {}
    homes = {}
    for prefix, module in model.named_modules():
        members: dict[str, Tensor | None] = {**module._parameters, **module._buffers}
        for name, tensor in members.items():
            if tensor is None or name in module._non_persistent_buffers_set:
                continue
            owners = sharing.setdefault(id(tensor), [])
            owners.append((module, name))
            homes[f"{prefix}.{name}".lstrip(".")] = owners
    return homes


def _check_keys(
    model: nn.Module,
    files: SafetensorsFiles,
    homes: dict[str, list[tuple[nn.Module, str]]],
    companions: set[str],
) -> None:
    """Compare names and shapes of file and model.

    Raises:
        ValueError: they differ, with the first that do.
    """
    what = f"the checkpoint {str(files.path)!r} does not fit {type(model).__name__}"
    why = "nothing was loaded; from_pretrained knows models whose checkpoints have other names"
    found = {id(homes[key]) for key in files if key in homes}
    missing = [name for name, owners in homes.items() if id(owners) not in found]
    unknown = [key for key in files if key not in homes and key not in companions]
    if missing or unknown:
        lacks = f"it lacks {missing[0]!r} and {len(missing) - 1} more" if missing else ""
        has = f"it has {unknown[0]!r} and {len(unknown) - 1} more" if unknown else ""
        raise ValueError(f"{what}: {' and '.join(filter(None, (lacks, has)))}; {why}")
    for key, stored in files.stored.items():
        if key in companions:
            continue
        module, name = homes[key][0]
        expected = tuple(getattr(module, name).shape)
        if stored.shape != expected:
            raise ValueError(f"{what}: {key!r} has shape {stored.shape}, not {expected}; {why}")
