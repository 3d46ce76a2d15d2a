"""Models that can be planned: presets, and the configurations of Hugging Face models.

transformers builds a model on the meta device, where parameters have shapes but no memory, so the
counted modules are those that will be trained. The presets need neither network nor files. Their
sizes are those of the configurations on the Hugging Face hub. GPT's sizes are those of the scripts
that FP8-LM was trained with (Azure/MS-AMP-Examples, gpt3) and, for 175B, of GPT-3 (arXiv
2005.14165), which transformers' GPT-NeoX class can express.
"""

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_fp8.quantization.wording import suggestion
from torch_fp8_tools.host_models import imported, missing_package, model_folder


def _sizes(
    base: dict[str, Any], layers: int, hidden: int, inner: int, heads: int, **more: Any
) -> dict[str, Any]:
    """Return a configuration with these sizes."""
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden}
    return base | sizes | {"intermediate_size": inner, "num_attention_heads": heads, **more}


_UNTIED = {"tie_word_embeddings": False}
_HEADS = {"num_key_value_heads": 8, "head_dim": 128, **_UNTIED}
_LLAMA_3 = {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 131072}
_LLAMA_3 |= {"rms_norm_eps": 1e-5, **_HEADS}
_QWEN_3 = {"model_type": "qwen3", "vocab_size": 151936, "max_position_embeddings": 40960, **_HEADS}
_GPT = {"model_type": "gpt_neox", "vocab_size": 50304, "max_position_embeddings": 2048}
_GPT |= {"use_parallel_residual": False, "tie_word_embeddings": True}
_QWEN_3_MOE = _QWEN_3 | {"model_type": "qwen3_moe", "num_key_value_heads": 4, "num_experts": 128}
_QWEN_3_MOE |= {"num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
_GPT_OSS = {"model_type": "gpt_oss", "vocab_size": 201088, "num_experts_per_tok": 4}
_GPT_OSS |= {**_HEADS, "head_dim": 64}
_MIXTRAL = {"model_type": "mixtral", "vocab_size": 32000, "max_position_embeddings": 32768}
_MIXTRAL |= {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, **_UNTIED}
PRESETS: dict[str, dict[str, Any]] = {
    "gpt-7b": _sizes(_GPT, 32, 4096, 16384, 32),
    "gpt-13b": _sizes(_GPT, 40, 5120, 20480, 40),
    "gpt-175b": _sizes(_GPT, 96, 12288, 49152, 96),
    "llama-3.2-1b": _sizes(_LLAMA_3, 16, 2048, 8192, 32, head_dim=64, tie_word_embeddings=True),
    "llama-3.2-3b": _sizes(_LLAMA_3, 28, 3072, 8192, 24, tie_word_embeddings=True),
    "llama-3.1-8b": _sizes(_LLAMA_3, 32, 4096, 14336, 32),
    "llama-3.1-70b": _sizes(_LLAMA_3, 80, 8192, 28672, 64),
    "qwen3-0.6b": _sizes(_QWEN_3, 28, 1024, 3072, 16, tie_word_embeddings=True),
    "qwen3-1.7b": _sizes(_QWEN_3, 28, 2048, 6144, 16, tie_word_embeddings=True),
    "qwen3-4b": _sizes(_QWEN_3, 36, 2560, 9728, 32, tie_word_embeddings=True),
    "qwen3-8b": _sizes(_QWEN_3, 36, 4096, 12288, 32),
    "qwen3-14b": _sizes(_QWEN_3, 40, 5120, 17408, 40),
    "qwen3-32b": _sizes(_QWEN_3, 64, 5120, 25600, 64),
    "qwen3-30b-a3b": _sizes(_QWEN_3_MOE, 48, 2048, 6144, 32),
    "gpt-oss-20b": _sizes(_GPT_OSS, 24, 2880, 2880, 64, num_local_experts=32),
    "gpt-oss-120b": _sizes(_GPT_OSS, 36, 2880, 2880, 64, num_local_experts=128),
    "mixtral-8x7b": _sizes(_MIXTRAL, 32, 4096, 14336, 32),
}
"""Preset name -> keyword arguments of the configuration, with its ``model_type``."""
_SIZES = ("num_hidden_layers", "hidden_size")


def read_config(model: Any) -> Any:
    """Return the Hugging Face configuration of a model.

    Args:
        model: a preset (`PRESETS`, in any case), a ``config.json`` or a folder that contains one,
            or a configuration.
    Raises:
        ValueError: the preset or folder does not exist; the configuration names no model, or no
            sizes.
        ImportError: transformers is missing.
    """
    config = model if hasattr(model, "to_dict") else _from_name(model)
    text = text_of(config)
    missing = [n for n in _SIZES if not isinstance(getattr(text, n, None), int)]
    if missing:
        raise ValueError(
            f"the configuration of {type(config).__name__} has no {', '.join(missing)}, so its "
            "repeated layers are unknown. Plan a model made of repeated layers, such as a causal "
            "language model"
        )
    return config


def build(config: Any) -> nn.Module:
    """Build the model on the meta device in float32, in training mode.

    Args:
        config: the result of `read_config`.
    Raises:
        ValueError: transformers has no such class for the configuration, or refuses it.
    """
    transformers = _transformers()
    cls = transformers.AutoModelForCausalLM
    try:
        with torch.device("meta"), contextlib.redirect_stderr(io.StringIO()):
            model: nn.Module = cls.from_config(config, dtype=torch.float32)
    except Exception as error:
        raise ValueError(
            f"transformers cannot build a {cls.__name__} of {type(config).__name__}: "
            f"{type(error).__name__}: {error}"
        ) from error
    return model.train()


def split_for_tensor_parallel(model: nn.Module, config: Any, degree: int) -> None:
    """Reduce each linear layer in the model's tensor-parallel plan to one rank's share.

    The embedding and the output layer stay whole, because transformers gathers their results.

    Raises:
        ValueError: the model has no such plan, or `degree` does not divide a size.
    """
    if degree == 1:
        return
    plan = dict(getattr(model, "tp_plan", None) or {})
    if not plan:
        raise ValueError(
            f"transformers has no tensor-parallel plan for {type(model).__name__}: use tensor=1 "
            "and shard it with fsdp"
        )
    heads = getattr(text_of(config), "num_attention_heads", None) or degree
    if heads % degree:
        raise ValueError(f"tensor={degree} does not divide the {heads} attention heads")
    for name, module in list(model.named_modules()):
        place = re.sub(r"\.\d+\b", ".*", f".{name}")  # a plan's * is a layer's number
        style = next((style for end, style in plan.items() if place.endswith(f".{end}")), None)
        if not isinstance(module, nn.Linear) or style not in ("colwise", "rowwise"):
            continue
        shape, split = [*module.weight.shape], int(style == "rowwise")
        if shape[split] % degree:
            raise ValueError(
                f"tensor={degree} does not divide the {shape[split]} features of {name!r}"
            )
        shape[split] //= degree
        with torch.device("meta"):
            part = nn.Linear(shape[1], shape[0], bias=module.bias is not None)
        model.set_submodule(name, part)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the repeated layers: the largest list, if possible one with a module per layer."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    number = text_of(model.config).num_hidden_layers
    lists = [blocks for blocks in lists if len(blocks) == number] or lists
    sizes = [sum(p.numel() for p in blocks.parameters()) for blocks in lists]
    return list(lists[sizes.index(max(sizes))])


def _from_name(model: Any) -> Any:
    if not isinstance(model, (str, Path)):
        raise TypeError(
            f"the model must be the name of a preset, a folder or a configuration, got {model!r}"
        )
    preset = PRESETS.get(str(model).lower())
    transformers = _transformers()
    if preset is not None:
        return transformers.AutoConfig.for_model(**preset)
    path = model_folder(model) or Path(model)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"{str(model)!r} is neither a preset, nor a folder with a config.json, nor a model in "
            f"the cache of the Hugging Face hub{suggestion(model, PRESETS)}. Presets: "
            f"{', '.join(PRESETS)}"
        )
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        kind = fields.pop("model_type")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{file} is not the configuration of a Hugging Face model: {type(error).__name__}: "
            f"{error}"
        ) from error
    fields.pop("quantization_config", None)
    text = fields.get("text_config") or fields  # a model of text and images has several parts
    if not any(name in text for name in ("hidden_size", "n_embd", "d_model")):
        raise ValueError(f"{file} has no hidden_size, so the model's sizes are unknown")
    try:
        return transformers.AutoConfig.for_model(kind, **fields)
    except ImportError as error:
        raise missing_package("transformers", "transformers builds models", error) from error
    except Exception as error:
        raise ValueError(f"{file}: {type(error).__name__}: {error}") from error


def _transformers() -> Any:
    return imported("transformers", "transformers builds models")


def text_of(config: Any) -> Any:
    """Return the part of a configuration that describes the text model."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config
