"""`export` and `weights_for_engine`: a trained model as a folder or as a stream of tensors.

Both take the tensors from `torch_fp8.checkpoint.exported_tensors.exported_tensors`. The scales that
training's forward multiplies by are known, so no calibration is needed, and engines serve the same
bits. `torch_fp8.checkpoint.formats` describes the formats.
"""

import copy
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torch_fp8.checkpoint.adapters import adapted_layers, fold_of
from torch_fp8.checkpoint.exported_tensors import ExportedTensors, ModelTensors, exported_tensors
from torch_fp8.checkpoint.files import (
    copy_tokenizer,
    folder_of,
    parse_size,
    refuse_existing,
    whole_folder,
    write_safetensors,
)
from torch_fp8.checkpoint.names import PLAIN
from torch_fp8.conversion.selection import first_reasons
from torch_fp8.nn.class_swap import without_compiler
from torch_fp8.nn.layer_filter import output_layer
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.quantization.argument_types import check_arguments
from torch_fp8.quantization.recipe import SAVE_FORMATS
from torch_fp8.quantization.wording import check_choice


@dataclass(frozen=True)
class ExportReport:
    """The result of `export`; ``str(report)`` describes it.

    Attributes:
        path: the folder.
        format, recipe: the format and the recipe of the written weights.
        fp8: the names of the layers whose weights are in FP8.
        kept: (name, reason) of layers that run in FP8 but are written in BF16, with the values that
            training multiplied by.
        recast: the names of the expert modules that were cast again, in other blocks than those of
            training.
        ignored: the names of the linear layers and routers that are not in FP8, including those of
            `kept`.
        num_elements: the number of elements of the weights in FP8.
        num_bytes: the bytes of these weights and their scales in the files.
        head: the name of the output layer; empty if the model has none.
    """

    path: Path
    format: str
    recipe: str
    fp8: tuple[str, ...]
    kept: tuple[tuple[str, str], ...]
    recast: tuple[str, ...]
    ignored: tuple[str, ...]
    num_elements: int
    num_bytes: int
    head: str = ""

    @property
    def bytes_per_bf16_byte(self) -> float:
        """The size of the weights and scales in the files, relative to the weights in BF16."""
        return self.num_bytes / (2 * self.num_elements)

    def __str__(self) -> str:
        text = (
            f"{len(self.fp8)} layers in {self.format} FP8 ({self.recipe}) at {str(self.path)!r}, "
            f"{self.bytes_per_bf16_byte:.4f} bytes per byte of BF16"
        )
        if self.head:
            text += f"; output layer {self.head!r} in {'FP8' if self.head in self.fp8 else 'BF16'}"
        if self.kept:
            reasons = first_reasons(self.kept, 3)
            text += f"; {len(self.kept)} that run in FP8 are written in BF16: {reasons}"
        if self.recast:
            text += f"; {len(self.recast)} of them are experts, cast again in blocks of 128 x 128"
        return text


def export(
    model: nn.Module,
    path: str | Path,
    format: str = "fine-grained",
    *,
    tokenizer: Any = None,
    adapters: str | None = None,
    max_shard_size: int | str = "5GB",
) -> ExportReport:
    """Write a converted Hugging Face model to a folder that inference engines load.

    Each weight of an FP8 layer is written as E4M3 codes and scales. Their product is, bit for bit,
    the value that the layer's forward multiplies by. All other parameters are written in BF16,
    except those that transformers keeps in float32; buffers keep their dtype. The folder contains
    ``config.json``, the generation configuration, the tokenizer if it is known, and safetensors
    files as ``save_pretrained`` writes them. Tensors are computed one after another, and the CPU
    holds those of one file. If the export fails, no folder is left. The model does not change.

    Args:
        model: a transformers model converted by `torch_fp8.convert_to_float8`, or its
            DistributedDataParallel wrapper; the weights may be trained or frozen. Call this on one
            rank.
        path: a folder that does not exist yet; its parent must exist.
        format: ``fine-grained`` (recipe blockwise), ``compressed-tensors`` (tensorwise, rowwise,
            blockwise, mxfp8) or ``modelopt`` (delayed).
        tokenizer: an object with ``save_pretrained``, or None for the tokenizer files of the folder
            that the model was loaded from, if there are any.
        adapters: the treatment of PEFT adapters, required if the model has any. ``merge`` casts
            ``W + delta`` in BF16, as ``merge_and_unload`` computes it; parts of a small delta below
            FP8's resolution are lost. ``apart`` writes only the base; save the adapter with
            ``model.save_pretrained`` for engines that serve both.
        max_shard_size: the maximum size of tensors in one file: bytes, or a string such as
            ``"5GB"``.
    Returns:
        A report on the written tensors, and on layers that are in BF16 although they run in FP8.
    Raises:
        ValueError: `path` exists; the format is unknown or cannot express the recipe; the format
            cannot hold a layer (the error names it); weights are not finite, sharded or offloaded.
        TypeError: `model` is not a transformers model, or `tokenizer` cannot be saved.
        OSError: the disk is full or not writable.
        ImportError: safetensors is missing.
    """
    check_arguments(export, locals())
    check_choice("format", format, tuple(SAVE_FORMATS))
    if tokenizer is not None and not callable(getattr(tokenizer, "save_pretrained", None)):
        raise TypeError(
            f"tokenizer={tokenizer!r} has no save_pretrained; pass the tokenizer itself, or None "
            "to copy the files from the model's original folder"
        )
    most, path = parse_size(max_shard_size), refuse_existing(path)
    root = unwrapped(model)
    adapted = adapted_layers(root)
    if adapted and adapters is None:
        raise ValueError(
            f"'{adapted[0]}' has an adapter, and no FP8 format can store one: adapters='merge' "
            "merges all adapters into the weights, which loses what is below the resolution of "
            "FP8; adapters='apart' writes only the base, for an engine that also serves the "
            "adapter, which model.save_pretrained writes"
        )
    tensors = exported_tensors(root, format, fold_of(model, root, adapters or "merge"))

    def configure(folder: Path) -> None:
        _write_configuration(root, folder, tokenizer)
        write_quantization(folder, tensors)

    return write_folder(root, tensors, path, most, configure)


def write_folder(
    model: nn.Module,
    tensors: ExportedTensors,
    path: Path,
    max_shard_size: int,
    configure: Callable[[Path], None],
) -> ExportReport:
    """Write a folder, return the report, and warn of weights with other values or dtypes.

    Args:
        model: the transformers model.
        tensors: its tensors.
        path: the folder.
        max_shard_size: the maximum bytes of tensors in one file.
        configure: the function that writes all other files to a folder. It runs first, because it
            fails quickly.
    """
    plan, format, head = tensors.planned(), tensors.format, output_layer(model)
    assert format is not None
    with whole_folder(path) as folder:
        configure(folder)
        flat = {name: tensor for of_key in plan.values() for name, tensor in of_key.items()}
        write_safetensors(folder, flat, tensors, max_shard_size)
    in_fp8 = [item for item in tensors.items if item.form is format]
    report = ExportReport(
        path=path,
        format=format.name,
        recipe=format.recipe,
        fp8=tuple(tensors.fp8),
        kept=tuple(tensors.kept),
        recast=tuple(tensors.recast),
        ignored=tuple(tensors.ignored),
        num_elements=sum(item.tensor.numel() for item in in_fp8),
        num_bytes=sum(tensor.nbytes for item in in_fp8 for tensor in plan[item.key].values()),
        head=next((name for name, m in model.named_modules() if m is head), ""),
    )
    if report.kept:
        warnings.warn(
            f"{len(report.kept)} layers that run in FP8 are written in BF16, with the same values: "
            f"{first_reasons(report.kept, 3)}",
            stacklevel=3,
        )
    if report.recast:
        warnings.warn(
            "experts are trained with one scale per row and written in blocks of 128 x 128, so "
            f"engines use different FP8 values from training (such as '{report.recast[0]}'); "
            "recipe='rowwise' with format='compressed-tensors' writes the values of training",
            stacklevel=3,
        )
    return report


def unwrapped(model: nn.Module) -> Any:
    """Return the transformers model inside wrappers of torch and PEFT.

    Raises:
        TypeError: there is none.
    """
    root: Any = without_compiler(model)
    if isinstance(root, DistributedDataParallel):
        return unwrapped(root.module)
    if callable(getattr(root, "get_base_model", None)):
        return unwrapped(root.get_base_model())
    config = getattr(root, "config", None)
    if not isinstance(root, nn.Module) or not callable(getattr(config, "save_pretrained", None)):
        raise TypeError(
            "export takes a transformers model, because engines read its config.json; "
            f"{type(root).__name__} has no such config"
        )
    return root


def _write_configuration(model: Any, folder: Path, tokenizer: Any) -> None:
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.save_pretrained(folder)
    generation = getattr(model, "generation_config", None)
    generates = getattr(model, "can_generate", None)
    if generation is not None and callable(generates) and generates():
        generation.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    else:
        copy_tokenizer(folder_of(model.config), folder)


def write_quantization(folder: Path, tensors: ExportedTensors) -> None:
    """Add the format's entry to ``config.json``, and write its other files.

    Args:
        folder: a folder with the model's ``config.json``.
        tensors: the tensors of the export.
    """
    format = tensors.format
    assert format is not None
    file = folder / "config.json"
    config = _in_dtype(json.loads(file.read_text()), str(PLAIN).removeprefix("torch."))
    config["quantization_config"] = format.quantization_config(tensors.ignored)
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for name, content in format.other_files(tensors.ignored).items():
        (folder / name).write_text(json.dumps(content, indent=4) + "\n")


def _in_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return a configuration with `dtype` for itself and for each part that states a dtype."""
    parts = {
        key: _in_dtype(value, dtype)
        for key, value in config.items()
        if isinstance(value, dict) and not value.keys().isdisjoint(("dtype", "torch_dtype"))
    }
    return {k: v for k, v in config.items() if k != "torch_dtype"} | parts | {"dtype": dtype}


_IN_BF16 = (
    "has scales from its original checkpoint that are not powers of two, so BF16 cannot hold its "
    "values; use engine='fine-grained'"
)
ENGINES = ("bf16", "fp8_per_block", "fine-grained")


def weights_for_engine(
    model: nn.Module, engine: str = "bf16", *, adapters: str = "merge"
) -> Iterator[tuple[str, Tensor]]:
    """Return an iterator over (name, tensor) of a policy's weights for an inference engine.

    A reinforcement learning loop sends the weights to the engine that generates rollouts after each
    update. Names are those of a checkpoint, which stores each expert's matrices separately.
    Adapters are folded into a copy of each weight, which is freed when the next one is requested.
    The base is only read, so it never changes, however often you sync.

    Args:
        model: a transformers model converted by `torch_fp8.convert_to_float8`, possibly inside
            wrappers of torch and PEFT.
        engine: ``bf16``: BF16 tensors of the trained weights; buffers, and parameters that
            transformers keeps in float32, keep their dtype. ``fp8_per_block``: BF16 tensors for an
            engine that quantizes them online in blocks of 128 x 128. Weights of FP8 layers have the
            values that training multiplies by; an engine with power-of-two scales quantizes them to
            the same FP8 values. ``fine-grained``: E4M3 ``weight`` and float32 ``weight_scale_inv``
            for an engine that was started from such a checkpoint. For both FP8 engines the weights
            include the factors of Smooth-SwiGLU, as in `export`.
        adapters: ``merge``: ``W + delta``, rounded to BF16 once, and modules that were trained as
            copies; ``apart``: only the base.
    Returns:
        The iterator; only one layer's tensors exist at a time. Tied weights are yielded once.
    Raises:
        ValueError: `engine` or `adapters` is unknown; for the FP8 engines, a layer does not run
            blockwise, or its blocks differ from the engine's (the error names it); a weight is
            sharded; a weight is not finite or without values (raised when it is reached).
        TypeError: `model` is not a transformers model.
    """
    check_arguments(weights_for_engine, locals())
    check_choice("engine", engine, ENGINES)
    root = unwrapped(model)
    fold = fold_of(model, root, adapters)
    for name, module in fold.walk(root):
        is_fp8 = isinstance(module, Float8Layer) and engine != "bf16"
        if is_fp8 and module.fp8.recipe.name != "blockwise":
            raise ValueError(
                f"engine={engine!r} multiplies by blocks of 128 x 128, and '{name}' runs recipe "
                f"{module.fp8.recipe.name!r}; convert the model with recipe='blockwise', or start "
                "an engine in BF16"
            )
    whole = ModelTensors(lambda tensor: tensor)  # with the bits below BF16 of split weights
    if engine == "fine-grained":
        return iter(exported_tensors(root, engine, fold, paused=True))
    if engine == "bf16":
        return iter(exported_tensors(root, None, fold, whole))
    tensors = exported_tensors(root, "fine-grained", fold, whole, in_bf16=_IN_BF16, paused=True)
    for name, reason in tensors.kept:
        raise ValueError(
            f"'{name}' runs in FP8, but an engine would quantize it in other blocks: {reason}; "
            f"convert the model with {name!r} in skip, and make the engine skip it too"
        )
    return iter(tensors)
