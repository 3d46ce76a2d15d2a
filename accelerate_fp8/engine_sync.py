"""TRL's weight sync to vLLM under this engine, without merging adapters in place.

`accelerate_fp8._register` installs it. TRL merges adapters into the base before each sync, unmerges
them afterwards, and passes a colocated engine one tensor at a time. Here
`torch_fp8.weights_for_engine` yields all weights with the adapters folded into a copy of each, and
only reads the base. A server gets them through TRL's own client, between the start and the end of
an update. A colocated engine gets one iterator over all weights through vLLM's layerwise reload,
which quantizes each layer again when all its parts have arrived.
"""

import inspect
from collections.abc import Iterator
from typing import Any

from accelerate.utils import DistributedType
from torch import Tensor

from accelerate_fp8.trainer import warn_once
from torch_fp8 import weights_for_engine
from torch_fp8.checkpoint.adapters import why_not_folded
from torch_fp8.nn.layer_filter import quantized_by
from torch_fp8.nn.linear import Float8Layer

_OF_CHECKPOINTS = ("compressed-tensors", "modelopt")


def sync_weights(original: Any, self: Any) -> None:
    """Extend ``VLLMGeneration.sync_weights``: send the weights of a converted model.

    TRL's own sync runs under FSDP, whose weights are sharded, for layers that another library has
    quantized, and for adapters that are not a matrix added to a weight. It merges these in place
    and unmerges them, which restores the exact bytes of an FP8 base.
    """
    if not _is_handed_over(self):
        original(self)
        return
    vars(self)["_iter_named_params"] = lambda: _weights(self)
    try:
        original(self)
    finally:
        del vars(self)["_iter_named_params"]


def _is_handed_over(generation: Any) -> bool:
    modules = list(generation.model.modules())
    sharded = generation.accelerator.distributed_type == DistributedType.FSDP
    has_fp8 = any(isinstance(m, Float8Layer) for m in modules)
    if sharded or not has_fp8 or any(map(quantized_by, modules)):
        return False
    reason = why_not_folded(generation.model)
    if not hasattr(generation, "_iter_named_params"):
        reason = "this version of TRL reads the parameters itself"
    if reason:
        warn_once(f"FP8: TRL merges adapters in place for vLLM and unmerges them later: {reason}")
    return not reason


def _weights(generation: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights for a server; a colocated engine gets all of them here instead."""
    if generation.mode == "server":
        if generation.accelerator.is_main_process:
            config = generation.vllm_client.get_server_info().get("model_config", {})
            yield from _handed_over(generation, config)
        return
    runner = generation.llm.llm_engine.model_executor.driver_worker.model_runner
    config = getattr(runner, "model_config", None)
    weights = _handed_over(generation, config)
    reload = getattr(runner, "reload_weights", None)
    if reload is not None and "weights_iterator" in inspect.signature(reload).parameters:
        reload(weights_iterator=weights)
        return
    if _of(config, "quantization"):
        warn_once(
            "FP8: this version of vLLM cannot reload layer by layer (reload_weights with "
            "weights_iterator), so an engine that quantizes online keeps using the first weights "
            "it was given; use a newer vLLM, vllm_mode='server', or an engine in BF16"
        )
    runner.model.load_weights(weights)


def _handed_over(generation: Any, config: Any) -> Iterator[tuple[str, Tensor]]:
    """Return the weights in the form that an engine with this configuration expects.

    Raises:
        ValueError: the engine would not multiply by the weights that it receives.
    """
    quantization = _of(config, "quantization")
    stored = _of(_of(config, "hf_config"), "quantization_config")
    engine = "bf16"
    if quantization == "fp8" and _of(stored, "weight_block_size"):
        engine = "fine-grained"
    elif quantization in _OF_CHECKPOINTS:
        raise ValueError(
            f"vLLM runs with quantization={quantization!r}, taken from the checkpoint it was "
            "started from, but does not quantize the weights it receives from training this way; "
            "start it from the BF16 checkpoint, with or without quantization='fp8_per_block', or "
            "from one that torch_fp8.export wrote with format='fine-grained'"
        )
    elif quantization == "fp8_per_block":
        layers = [(n, m) for n, m in generation.model.named_modules() if isinstance(m, Float8Layer)]
        other = next((n for n, m in layers if m.fp8.recipe.name != "blockwise"), None)
        engine = "fp8_per_block" if other is None else "bf16"
        if other is not None:
            warn_once(
                f"FP8: vLLM quantizes in blocks of 128 x 128 and '{other}' is trained with "
                "other scales, so rollouts use different weights from training; convert with "
                "recipe='blockwise'"
            )
    return weights_for_engine(generation.model, engine)


def _of(config: Any, name: str) -> Any:
    """Return a field of a configuration: a server's is JSON, an engine's is an object."""
    return config.get(name) if isinstance(config, dict) else getattr(config, name, None)
