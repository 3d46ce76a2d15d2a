"""Recovery of an FP8 checkpoint's exact values in a model that its host has dequantized.

Without a GPU, or with ``dequantize=True``, transformers dequantizes such a checkpoint to BF16 and
rounds every weight to 8 significant bits. The codes can still be recovered: BF16 is precise enough
to identify them, given the scales (`torch_fp8.conversion.fp8_weight.bytes_behind`), which are a few
kilobytes in the files. So nothing has to be stored between loading and training. A trained weight
becomes BF16 and a residual that waits for its optimizer. A frozen weight gets the file's scales,
with which `torch_fp8.conversion.fp8_weight.known_bytes` returns the file's bytes when it is stored
only in FP8. A weight that was changed after loading stays as it is.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torch_fp8.checkpoint.formats import read_format
from torch_fp8.checkpoint.host_layers import take_over_layers
from torch_fp8.checkpoint.quantized_files import QuantizedFiles
from torch_fp8.checkpoint.safetensors_files import SafetensorsFiles
from torch_fp8.checkpoint.stored_names import stored_parts
from torch_fp8.config import FP8Config
from torch_fp8.conversion.fp8_weight import FP8Weight, bytes_behind, remember_scales
from torch_fp8.conversion.frozen_layers import frozen_recipe
from torch_fp8.nn.class_swap import unwrapped_name
from torch_fp8.nn.layer_filter import expert_weights
from torch_fp8.optim.residual import known_residual, split_parts

_ADAPTED = ("base_layer", "original_module")
"""The names under which PEFT stores a wrapped module."""


@dataclass(frozen=True)
class AdoptedCheckpoint:
    """A report on a model's weights that came from an FP8 checkpoint.

    Attributes:
        path: the checkpoint's folder.
        format: the checkpoint's format.
        num_exact: the number of trained weights whose residual waits for the optimizer.
        num_frozen: the number of untrained weights for which frozen weights can hold the file's
            bytes.
        num_changed: the number of weights that were changed after loading.
        num_fused: the number of the files' weights that no layer has separately, because the host
            has fused them: those of frozen experts, and of blocks that experts share.
    """

    path: str
    format: str
    num_exact: int
    num_frozen: int
    num_changed: int
    num_fused: int = 0

    def __str__(self) -> str:
        text = f"of the {self.format} checkpoint {self.path!r} "
        trained = "trained weights continue from their exact values, as BF16 and residual"
        changed = "weights were changed after loading and are left unchanged"
        fused = "are fused (experts) and keep the values the host loaded, rounded to their dtype"
        parts = {
            f"{self.num_exact} {trained}": self.num_exact,
            f"{self.num_frozen} frozen weights can keep the bytes of the files": self.num_frozen,
            f"{self.num_changed} {changed}": self.num_changed,
            f"{self.num_fused} weights {fused}": self.num_fused,
        }
        return text + "; ".join(part for part, count in parts.items() if count)


@dataclass(frozen=True)
class _Source:
    """The FP8 weights of one checkpoint, and the part of the model that was loaded from it."""

    module: nn.Module
    files: QuantizedFiles
    format: str

    def layers(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield (key in the checkpoint, layer) for every layer."""
        base = getattr(self.module, "base_model_prefix", "")
        for name, layer in self.module.named_modules():
            weight = layer._parameters.get("weight")
            if weight is None:
                continue
            parts = [part for part in unwrapped_name(name).split(".") if part not in _ADAPTED]
            key = ".".join([*parts, "weight"])
            for candidate in (key, f"{base}.{key}", key.removeprefix(f"{base}.")):
                if candidate in self.files.fp8:
                    if self.files.shape(candidate) == tuple(weight.shape):
                        yield candidate, layer
                    break

    def weights(self) -> Iterator[tuple[tuple[str, ...], Any]]:
        """Yield (keys of its matrices in the checkpoint, weight) for every weight.

        Experts share a weight (E, R, C) with one matrix each; the weight of a layer has one matrix.
        """
        for key, layer in self.layers():
            yield (key,), layer.weight
        modules = self.module.named_modules()
        names = [full for name, module in modules for full in expert_weights(name, module)]
        weights = {name: self.module.get_parameter(name) for name in names}
        shapes = {name: weight.shape for name, weight in weights.items()}
        try:
            of_weights = stored_parts(self.module, shapes, names)
        except ValueError:  # it is unknown how they were fused
            return
        for name, parts in of_weights.items():
            if all(part.name in self.files.fp8 for part in parts):
                yield tuple(part.name for part in parts), weights[name]

    def weight_behind(self, keys: tuple[str, ...], weight: Tensor) -> FP8Weight | None:
        """Return the codes that a weight was dequantized from, as one matrix.

        None if the weight has changed since, or if its matrices do not consist of whole blocks.
        """
        files = self.files
        blocks = {files.fp8[key][1] for key in keys}
        block = blocks.pop()
        if blocks or (len(keys) > 1 and any(files.shape(key)[0] % block[0] for key in keys)):
            return None
        scales = [files.scale(key) for key in keys]
        # (E, R, C) -> (E * R, C); the scales of all matrices one after another
        return bytes_behind(weight.reshape(-1, weight.shape[-1]), torch.cat(scales), block)


def take_over(
    model: nn.Module,
    config: FP8Config,
    device: torch.device | None = None,
    *,
    trained: bool = True,
    sharded: bool = False,
) -> list[str]:
    """Prepare a model that its host loaded from an FP8 checkpoint for training and saving.

    It calls `torch_fp8.checkpoint.host_layers`, `adopt_checkpoints` and `save_dequantized`.

    Args:
        model, config: see `adopt_checkpoints`.
        device: the device on which the model will run, or None for its present device.
        trained: whether an optimizer will use residuals; a model for evaluation needs none.
        sharded: whether ``fully_shard`` comes next. It replaces the Parameters to which residuals
            are attached, so none are created; a model that is already sharded gets none either.
    Returns:
        Lines on what was done and what was not; none for other models, and on a second call.
    """
    saved = save_dequantized(model)  # before `stored_parts` reads how the model is saved
    if device is None:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
    spec = frozen_recipe(config, device)[0].weight
    already = any(isinstance(p, DTensor) for p in model.parameters())
    sharded = sharded or already
    lines = take_over_layers(
        model, config, spec, _scales_of_files(model), trained=trained, residuals=not sharded
    )
    if not (already or (trained and sharded)):
        lines += [str(report) for report in adopt_checkpoints(model, config, trained=trained)]
    elif config.keeps_residuals:
        formats = {(source.format, str(source.files.path)) for source in _sources(model)}
        lines += [
            f"weights of the {name} checkpoint {path!r} continue from their dequantized values, "
            "and frozen ones are quantized again: the bits below BF16 are lost for sharded weights "
            "(FSDP2, tensor parallelism)"
            for name, path in sorted(formats)
        ]
    return [*lines, SAVED_DEQUANTIZED] if saved else lines


@torch.no_grad()
def adopt_checkpoints(
    model: nn.Module, config: FP8Config, *, trained: bool = True
) -> list[AdoptedCheckpoint]:
    """Give trained BF16 weights their FP8 checkpoint's exact values, others its scales.

    Call it before the optimizer is converted, and before DistributedDataParallel or ``fully_shard``
    wraps the model. Without residuals (level O1, or ``split_weights=False``) it does nothing.

    Args:
        model: any model. Parts with a ``config.name_or_path``, as transformers sets it, are
            checked: a folder, or a model in the hub's local cache.
        config: the configuration; `opt_level` and `split_weights` matter here.
        trained: whether an optimizer will use residuals; if not, all weights count as frozen.
    Returns:
        A report for each FP8 checkpoint with exact values.
    Raises:
        ValueError: the scales of the checkpoint are incomplete or invalid; see
            `torch_fp8.checkpoint.quantized_files.QuantizedFiles`.
    """
    if not config.keeps_residuals:
        return []
    reports = []
    seen: set[Tensor] = set()
    for source in _sources(model):
        exact = frozen = changed = 0
        found_keys: set[str] = set()
        for keys, weight in source.weights():
            is_trained = trained and weight.requires_grad
            if weight.ndim == 3 and not is_trained:  # frozen experts have their own scales
                continue
            found_keys.update(keys)
            if weight in seen:
                continue
            seen.add(weight)
            if type(weight) is not nn.Parameter:  # for example sharded
                continue
            if weight.dtype != torch.bfloat16 or known_residual(weight) is not None:
                continue
            stored = source.weight_behind(keys, weight.detach())
            if stored is None:
                changed += 1
            elif is_trained:
                split_parts(weight, stored.parts())
                exact += 1
            elif stored.has_frozen_blocks():
                remember_scales(weight, stored)
                frozen += 1
        if exact or frozen:
            path, fused = str(source.files.path), len(source.files.fp8.keys() - found_keys)
            reports.append(AdoptedCheckpoint(path, source.format, exact, frozen, changed, fused))
    return reports


def _scales_of_files(model: nn.Module) -> Callable[[nn.Module], Tensor | None]:
    """Return a function from a layer to its scales in files, which it opens when it is called."""

    @functools.cache
    def places() -> dict[nn.Module, tuple[QuantizedFiles, str]]:
        sources = _sources(model)
        return {layer: (s.files, key) for s in sources for key, layer in s.layers()}

    def scale_of(layer: nn.Module) -> Tensor | None:
        files, key = places().get(layer, (None, ""))
        return None if files is None else files.scale(key)

    return scale_of


def _sources(model: nn.Module) -> Iterator[_Source]:
    """Yield the FP8 checkpoints that parts of the model were loaded from, larger parts first.

    A part may appear again inside a larger one, such as PEFT's model around it, in which its layers
    have other names.
    """
    known: dict[Path, _Source | None] = {}
    for module in model.modules():
        if not isinstance(getattr(module, "base_model_prefix", None), str):
            continue  # layers also have their model's configuration
        folder = folder_of(getattr(module, "config", None))
        if folder is None:
            continue
        if folder not in known:
            known[folder] = _opened(module, folder)
        source = known[folder]
        if source is not None:
            yield replace(source, module=module)


def _opened(module: nn.Module, folder: Path) -> _Source | None:
    try:
        format = read_format(folder)
        if format is None:
            return None
        SafetensorsFiles(folder)
    except ValueError:  # another quantization, which its own library handles
        return None
    return _Source(module, QuantizedFiles(folder), format.name)


def folder_of(config: Any) -> Path | None:
    """Return the local folder that a host's model was loaded from; None if there is none."""
    name = getattr(config, "name_or_path", None)
    if not isinstance(name, str) or not name:
        return None
    if Path(name).is_dir():
        return Path(name)
    hub = sys.modules.get("huggingface_hub")  # imported if the model came from the hub
    if hub is None or Path(name).is_absolute():
        return None
    revision = getattr(config, "_commit_hash", None)
    try:
        cached = hub.try_to_load_from_cache(name, "config.json", revision=revision)
    except ValueError:  # not a name on the hub
        return None
    return Path(cached).parent if isinstance(cached, str) else None


_DEQUANTIZERS = ("Fp8Dequantize",)
"""transformers' operations whose reverse quantizes tensors when a model is saved."""

SAVED_DEQUANTIZED = (
    "the model was loaded from an FP8 checkpoint and will be saved in its current dtype; stock "
    "transformers would quantize all of its matrices and write no quantization_config"
)


def save_dequantized(model: nn.Module) -> int:
    """Make transformers save a dequantized model in its present dtype.

    A model that transformers (5.0 to 5.23) has dequantized keeps the conversion, and
    transformers reverses it when it saves the model: all matrices, even embeddings and the output
    layer, are quantized without a ``quantization_config`` in the file. A later load would take the
    codes for weights. This function removes the operation from the model's conversions.

    Args:
        model: any model; the parts that transformers loaded are checked.
    Returns:
        The number of changed conversions; 0 on a second call.
    """
    dropped = 0
    for module in model.modules():
        conversions = vars(module).get("_weight_conversions")
        if not conversions or getattr(module, "is_quantized", False):
            continue
        entries = []
        for conversion in conversions:
            operations = getattr(conversion, "operations", None) or []
            others = [op for op in operations if type(op).__name__ not in _DEQUANTIZERS]
            if len(others) == len(operations):
                entries.append(conversion)
                continue
            dropped += 1
            if others:
                entries.append(_without_scales(conversion, others))
        module.__dict__["_weight_conversions"] = entries
    return dropped


def _without_scales(conversion: Any, operations: list[Any]) -> Any:
    """Return a transformers conversion, for example a merge of experts, without scales."""
    scales = ("_scale_inv", "activation_scale")
    sources = [s for s in conversion._original_source_patterns if not s.endswith(scales)]
    return conversion.copy(sources, conversion._original_target_patterns, operations=operations)
