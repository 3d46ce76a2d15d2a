"""FP8 checkpoints in the layouts that are published, written by hand."""

import json
import math
import weakref

import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tests.internals import SAVE_FORMATS
from tests.models import llama
from torch_fp8 import convert_to_float8

EXPORTS = [(format, recipe) for format, recipes in SAVE_FORMATS.items() for recipe in recipes]
E4M3_MAX = 448.0
FINE_GRAINED = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}


def compressed(strategy, **of_weights):
    """The ``quantization_config`` of compressed-tensors with one strategy of weights."""
    weights = {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "dynamic": False,
        "strategy": strategy,
        **of_weights,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def quantized(weight, block, odd=1.0371):
    """E4M3 codes and scales of a weight; `odd` makes the scales other than amax / 448."""
    (rows, cols), (height, width) = weight.shape, block
    grid = math.ceil(rows / height), math.ceil(cols / width)
    padded = torch.zeros(grid[0] * height, grid[1] * width)
    padded[:rows, :cols] = weight
    blocks = padded.view(grid[0], height, grid[1], width)
    scale = (blocks.abs().amax((1, 3)) * (odd / E4M3_MAX)).clamp(min=1e-8)
    codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.view(padded.shape)[:rows, :cols].contiguous(), scale


def exact(qdata, scale, block):
    """What codes and scales stand for, in float64, where their product is exact."""
    spread = scale.double().repeat_interleave(block[0], 0)[: qdata.shape[0]]
    return qdata.double() * spread.repeat_interleave(block[1], 1)[:, : qdata.shape[1]]


def write(folder, state, config, suffix="_scale_inv", shards=1, blocks=None):
    """Write a checkpoint, and return ``{key: (qdata, scale, block)}`` of its FP8 weights.

    Args:
        folder: where to.
        state: a state dict; matrices of projections become FP8, whatever else stays.
        config: of config.json, with its ``quantization_config``.
        suffix: of the keys of scales.
        shards: the number of files.
        blocks: ``function(shape) -> block``; None: 128 x 128.
    """
    folder.mkdir(exist_ok=True)
    tensors, fp8 = {}, {}
    for key, value in state.items():
        if value.ndim == 2 and "proj" in key:
            block = (128, 128) if blocks is None else blocks(value.shape)
            qdata, scale = quantized(value.float(), block)
            fp8[key] = qdata, scale, block
            tensors |= {key: qdata, f"{key}{suffix}": scale}
        else:
            tensors[key] = value.detach().clone()
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return fp8
    keys = sorted(tensors)
    weight_map = {}
    for i in range(shards):
        name = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {key: tensors[key] for key in keys[i::shards]}
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return fp8


def tiny_llama(**changes):
    """A Llama in BF16 with two layers whose matrices divide into blocks of 128 x 128."""
    options = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256}
    options |= {"num_attention_heads": 2, "max_position_embeddings": 64, "dtype": "bfloat16"}
    torch.manual_seed(0)
    model = llama(**options | {"tie_word_embeddings": False} | changes)
    for parameter in model.parameters():  # the rotary frequencies stay float32
        parameter.data = parameter.data.bfloat16()
    return model


def adapted(model, config=None, std=0.05, **options):
    """Give a model LoRA adapters whose product is not zero; convert it if there is a `config`."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(**{"r": 4, **options}))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=std)
    if config is not None:
        convert_to_float8(model, config)
    return model


def write_llama(folder, quantization=None, **changes):
    """Write `tiny_llama` as a fine-grained FP8 checkpoint; return what `write` does."""
    model = tiny_llama(**changes)
    config = model.config.to_dict() | {
        "architectures": ["LlamaForCausalLM"],
        "quantization_config": quantization or FINE_GRAINED,
    }
    return write(folder, model.state_dict(), config)


class LiveStorages(TorchDispatchMode):
    """The bytes of all storages that operations have met, alive now and at their peak."""

    def __init__(self):
        super().__init__()
        self.alive = self.peak = 0
        self._known = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in tree_iter((args, kwargs, result)):
            if type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_meta:
                self._see(value.untyped_storage())
        return result

    def _see(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.alive += size
            self.peak = max(self.peak, self.alive)
            weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key, size):
        self._known.discard(key)
        self.alive -= size


def bytes_of(model, *others):
    """The bytes of all distinct storages of a model, and of other tensors."""
    storages = {}
    for tensor in (*model.parameters(), *model.buffers(), *others):
        plain = getattr(tensor, "qdata", None)
        for part in (tensor,) if plain is None else (plain, tensor.scale):
            storages[part.untyped_storage()._cdata] = part.untyped_storage().nbytes()
    return sum(storages.values())
