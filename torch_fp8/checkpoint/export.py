"""`export`: write a trained model as an FP8 folder that inference engines load, uncalibrated.

The scales that training's forward multiplies by are known, so no calibration is needed, and engines
serve the same bits. `torch_fp8.checkpoint.formats` describes the formats,
`torch_fp8.checkpoint.export_plan` how each tensor is written.
"""

import copy
import json
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torch_fp8.checkpoint.adopt_checkpoint import folder_of
from torch_fp8.checkpoint.export_plan import ExportPlan, plan_export
from torch_fp8.checkpoint.fold_adapters import ADAPTERS, AdapterFold, adapted_layers, refuse_prompts
from torch_fp8.checkpoint.safetensors_files import parse_size, write_safetensors
from torch_fp8.checkpoint.stored_names import PLAIN
from torch_fp8.checkpoint.whole_folder import refuse_existing, whole_folder
from torch_fp8.conversion.selection import first_reasons
from torch_fp8.nn.class_swap import without_compiler
from torch_fp8.nn.layer_filter import output_layer
from torch_fp8.quantization.argument_types import check_arguments
from torch_fp8.quantization.recipe import SAVE_FORMATS
from torch_fp8.quantization.wording import check_choice

_TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("*.model", "*.tiktoken", "chat_template*", "*processor_config.json"),
)
"""The file names of all kinds of tokenizers and processors of transformers."""


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
            "FP8; adapters='apart' writes only the base, for an engine that serves the adapter "
            "from model.save_pretrained beside it"
        )
    plan = plan_export(root, format, fold_of(model, root, adapters or "merge"))
    with whole_folder(path) as folder:
        sizes = _write(root, plan, folder, most, tokenizer)
    return reported(root, plan, path, sizes)


def reported(model: nn.Module, plan: ExportPlan, path: Path, sizes: dict[str, int]) -> ExportReport:
    """Return the report on what was written, and warn of weights with other values or dtypes.

    Args:
        model: the transformers model.
        plan: the plan of its tensors.
        path: the folder.
        sizes: the bytes of the tensors in the files, by their names in the model.
    """
    assert plan.format is not None
    in_fp8 = {group.key: group.tensor for group in plan.groups if group.form is plan.format}
    head = output_layer(model)
    report = ExportReport(
        path=path,
        format=plan.format.name,
        recipe=plan.format.recipe,
        fp8=tuple(plan.fp8),
        kept=tuple(plan.kept),
        recast=tuple(plan.recast),
        ignored=tuple(plan.ignored),
        num_elements=sum(tensor.numel() for tensor in in_fp8.values()),
        num_bytes=sum(sizes[key] for key in in_fp8),
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


def fold_of(model: nn.Module, root: nn.Module, adapters: str) -> AdapterFold:
    """Return the fold of the adapters of `root`, which is `model` inside wrappers.

    Raises:
        ValueError: `adapters` is unknown, or an adapter cannot be folded into weights.
    """
    check_choice("adapters", adapters, ADAPTERS)
    if adapters == "merge":
        refuse_prompts(model)
    return AdapterFold(root, merge=adapters == "merge")


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


def copy_tokenizer(source: Path | None, folder: Path) -> None:
    """Copy the tokenizer files, and a model's own code, if there are any."""
    if source is None:
        return
    for pattern in (*_TOKENIZER, "*.py"):
        for file in sorted(source.glob(pattern)):
            if file.is_file() and not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)


def _write(
    model: Any, plan: ExportPlan, folder: Path, max_shard_size: int, tokenizer: Any
) -> dict[str, int]:
    """Write everything into an existing folder, the configuration first: it fails quickly."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.save_pretrained(folder)
    write_quantization(folder, plan)
    generation = getattr(model, "generation_config", None)
    generates = getattr(model, "can_generate", None)
    if generation is not None and callable(generates) and generates():
        generation.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    else:
        copy_tokenizer(folder_of(model.config), folder)
    return write_safetensors(folder, plan.groups, max_shard_size)


def write_quantization(folder: Path, plan: ExportPlan) -> None:
    """Add the format's entry to ``config.json``, and write its other files.

    Args:
        folder: a folder with the model's ``config.json``.
        plan: the plan of the export.
    """
    assert plan.format is not None
    file = folder / "config.json"
    config = _in_dtype(json.loads(file.read_text()), str(PLAIN).removeprefix("torch."))
    config["quantization_config"] = plan.format.quantization_config(plan.ignored)
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for name, content in plan.format.other_files(plan.ignored).items():
        (folder / name).write_text(json.dumps(content, indent=4) + "\n")


def _in_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return a configuration with `dtype` for itself and for each part that states a dtype."""
    parts = {
        key: _in_dtype(value, dtype)
        for key, value in config.items()
        if isinstance(value, dict) and not value.keys().isdisjoint(("dtype", "torch_dtype"))
    }
    return {k: v for k, v in config.items() if k != "torch_dtype"} | parts | {"dtype": dtype}
