"""TRL's GRPO with LoRA sends its weights to vLLM, for which a server stands that notes them."""

import json
import math

import pytest
import torch

pytest.importorskip("peft")
pytest.importorskip("trl")

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation

from tests.internals import Float8FrozenWeight
from torch_fp8 import Float8Linear


class Server:
    """What of TRL's client of vLLM a trainer calls; it generates the same tokens for everybody.

    Attributes:
        received: the weights of each synchronization, by the name that vLLM has for them.
    """

    def __init__(self, **options):
        self.received: list[dict[str, torch.Tensor]] = []

    def init_communicator(self, device): ...

    def reset_prefix_cache(self): ...

    def get_server_info(self):
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(self, metadata, weights):
        sent = {name: weight.clone() for name, weight in weights}
        assert [m[0] for m in metadata] == list(sent)
        assert [m[1] for m in metadata] == [str(w.dtype)[6:] for w in sent.values()]
        self.received.append(sent)

    def generate(self, prompts, n, **options):
        many = [[5 + i, 6, 7, 3] for i in range(n)] * len(prompts)
        chances = [[[-math.log(64)]] * 4 for _ in many]  # of an untrained model
        return {"prompt_ids": prompts, "completion_ids": many, "logprobs": chances}


@pytest.mark.long
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_merged_weights_are_sent(accelerate, monkeypatch, tmp_path, tiny_model, level):
    """base + B A, before every step; what is trained on is the base, bit for bit."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setenv("TORCH_FP8_CONFIG", json.dumps({"opt_level": level}))
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)
    monkeypatch.setattr(vllm_generation, "VLLMClient", Server)
    args = GRPOConfig(
        str(tmp_path),
        **{"num_generations": 2, "max_completion_length": 8, "max_steps": 3, "beta": 0.0},
        **{"use_vllm": True, "vllm_mode": "server", "per_device_train_batch_size": 2},
        **{"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True},
        learning_rate=1e-2,
    )
    trainer = GRPOTrainer(
        str(tiny_model),
        lambda completions, **_: [float(len(set(c)) + i) for i, c in enumerate(completions)],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["the cat sat on a mat"] * 6}),
        processing_class=AutoTokenizer.from_pretrained(tiny_model),
        # of 32 x 64 and 128 x 32 elements: the second alone would be split into BF16 and a residual
        peft_config=LoraConfig(r=32, target_modules=["up_proj", "q_proj"], task_type="CAUSAL_LM"),
    )
    base = _layer(trainer.model).base_layer.weight.detach().float().clone()
    generation = trainer.vllm_generation
    generation.logprobs = None if level == "O2" else generation.logprobs
    trainer.train()

    if level == "O2":  # log-probabilities were asked for within calls alone
        assert "fp8/logprob_difference" in trainer.state.log_history[0]
        assert generation.logprobs is None
        assert "generate" not in vars(generation)
    server = generation.vllm_client
    assert len(server.received) == 3
    assert isinstance(_layer(trainer.model).base_layer, Float8Linear)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not any("lora" in sent or "base_layer" in sent for sent in server.received[0])
    frozen = level != "O1"  # PEFT has frozen the base, which is stored as FP8 alone then
    assert isinstance(_layer(trainer.model).base_layer.weight, Float8FrozenWeight) == frozen
    if frozen:
        exact, base = base, _layer(trainer.model).base_layer.weight.dequantize().float()
        assert (base - exact).norm() / exact.norm() < 0.03
    assert torch.equal(server.received[0][name], base.bfloat16())  # B is zero before the first step
    trainer.vllm_generation.sync_weights()
    layer = _layer(trainer.model)
    product = layer.scaling["default"] * (
        layer.lora_B["default"].weight.float() @ layer.lora_A["default"].weight.float()
    )
    assert product.abs().max() > 1e-3
    sent = server.received[-1][name]
    if frozen:
        assert torch.equal(sent, (base + product).bfloat16())
        assert torch.equal(layer.base_layer.weight.dequantize().float(), base)
        return
    torch.testing.assert_close(sent, (base + product).bfloat16(), rtol=2.0**-8, atol=1e-6)
    assert torch.equal(layer.base_layer.weight.float(), base)


def _layer(model):
    return model.base_model.model.model.layers[0].mlp.up_proj
