"""A stand-in for what TRL calls of vLLM: an engine that is particular about what it is handed.

The names and the order of the calls are those of `LLM`, of its model runner and of TRL's own client
of a server. The engine knows the names and shapes of the checkpoint that it was started from, keeps
layers that it multiplies together in one weight, and quantizes a layer when all its parts have
come. It generates the same tokens for everybody, each with the same chance.
"""

import math
import types

import torch
from safetensors import safe_open
from torch import Tensor

from tests.internals import make_recipe
from torch_fp8.ops.quantize import QuantizedTensor, quantize

TOKENS = [5, 6, 7, 3]
_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
_FUSED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}


class Engine:
    """The weights of an engine.

    Attributes:
        quantization: None, or ``fp8_per_block``.
        calls: the life cycle, in order.
        syncs: how often all weights have come.
        plain: what came last, by name.
        quantized: by the name of the fused layer.
    """

    def __init__(self, folder, quantization=None):
        self.quantization = quantization
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as stored:
                for name in stored.keys():  # noqa: SIM118
                    self.shapes[name] = tuple(stored.get_slice(name).get_shape())
        self.calls: list[str] = []
        self.syncs = 0
        self.order: list[str] | None = None
        self.plain: dict[str, Tensor] = {}
        self.quantized: dict[str, QuantizedTensor] = {}

    def take(self, weights):
        parts: dict[str, list[Tensor]] = {}
        taken: dict[str, Tensor] = {}
        for name, weight in weights:
            assert self.shapes[name] == tuple(weight.shape), name
            assert weight.dtype == torch.bfloat16, name
            assert name not in taken, name
            assert type(weight) in (Tensor, torch.nn.Parameter), name
            assert bool(weight.isfinite().all()), name
            taken[name] = weight.detach().clone()
            layer, _, leaf = name.removesuffix(".weight").rpartition(".")
            fused = f"{layer}.{_FUSED.get(leaf, leaf)}"
            parts.setdefault(fused, []).append(taken[name])
        assert taken.keys() == self.shapes.keys()
        assert self.order in (None, list(taken))
        self.order, self.plain = list(taken), taken
        self.syncs += 1
        if self.quantization == "fp8_per_block":
            spec = make_recipe("blockwise").weight
            layers = {k: torch.cat(v) for k, v in parts.items() if k.endswith("_proj")}
            assert all(len(w) % 128 == 0 for w in layers.values())
            self.quantized = {name: quantize(weight, spec) for name, weight in layers.items()}
        return set(taken)


class Model:
    """The model within a runner, which does not quantize what it is handed out of a reload."""

    def __init__(self, engine):
        self.engine = engine

    def load_weights(self, weights):
        self.engine.calls.append("load_weights")
        return self.engine.take(weights)


class OldRunner:
    """A model runner without the reload by layers."""

    def __init__(self, engine):
        self.model = Model(engine)
        self.model_config = types.SimpleNamespace(quantization=engine.quantization, hf_config=None)


class Runner(OldRunner):
    """A model runner; `reload_weights` begins and ends the reload of each layer."""

    def reload_weights(self, weights_iterator=None, weights_path=None, is_checkpoint_format=True):
        assert weights_iterator is not None
        assert weights_path is None
        assert is_checkpoint_format
        engine = self.model.engine
        engine.calls.append("initialize_layerwise_reload")
        self.model.load_weights(weights_iterator)
        engine.calls.append("finalize_layerwise_reload")


class Client:
    """TRL's client of a server: an update is announced, streamed, and ended."""

    def __init__(self, engine):
        self.engine = engine

    def init_communicator(self, device): ...

    def reset_prefix_cache(self):
        self.engine.calls.append("reset_prefix_cache")

    def get_server_info(self):
        config = {"logprobs_mode": "processed_logprobs", "quantization": self.engine.quantization}
        return {"model_config": config}

    def update_named_params(self, metadata, weights):
        self.engine.calls.append("start_weight_update")
        seen = []

        def noted():
            for name, weight in weights:
                seen.append((name, str(weight.dtype).removeprefix("torch."), list(weight.shape)))
                yield name, weight

        self.engine.take(noted())
        assert seen == list(metadata)
        self.engine.calls.append("finish_weight_update")

    def generate(self, prompts, n, **options):
        many = [TOKENS] * n * len(prompts)
        chances = [[[-math.log(64)]] * len(TOKENS) for _ in many]
        if options["logprobs"] is None:
            chances = None  # type: ignore[assignment]
        return {"prompt_ids": prompts, "completion_ids": many, "logprobs": chances}


class LLM:
    def __init__(self, engine, runner=Runner):
        self.engine = engine
        worker = types.SimpleNamespace(model_runner=runner(engine))
        executor = types.SimpleNamespace(driver_worker=worker)
        self.llm_engine = types.SimpleNamespace(model_executor=executor)

    def reset_prefix_cache(self):
        self.engine.calls.append("reset_prefix_cache")

    def wake_up(self, tags):
        self.engine.calls.append(f"wake_up {tags[0]}")

    def sleep(self, level):
        self.engine.calls.append("sleep")

    def generate(self, prompts, sampling_params, use_tqdm):
        asked = sampling_params.logprobs is not None
        chance = types.SimpleNamespace(logprob=-math.log(64), rank=1)
        one = types.SimpleNamespace(
            token_ids=TOKENS, logprobs=[{t: chance} for t in TOKENS] if asked else None
        )
        return [
            types.SimpleNamespace(prompt_token_ids=p["prompt_token_ids"], outputs=[one])
            for p in prompts
        ]
