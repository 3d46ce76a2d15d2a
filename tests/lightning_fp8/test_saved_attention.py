"""`save_attention` through Lightning's precision plugin."""

import lightning.fabric
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_fp8 import FP8Precision
from torch_fp8 import FP8Config, revert
from torch_fp8.conversion.attention_layers import is_marked


def test_fabric_takes_the_option():
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        vocab_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    losses = []
    for save in ("qkv", "bf16"):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        plugin = FP8Precision(FP8Config(save_attention=save))
        fabric = lightning.fabric.Fabric(accelerator="cpu", devices=1, plugins=[plugin])
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
        tokens = torch.arange(16)[None]
        loss = model(input_ids=tokens, labels=tokens).loss
        fabric.backward(loss)
        optimizer.step()
        assert sum(map(is_marked, model.modules())) == (2 if save == "qkv" else 0)
        losses.append(loss.item())
        revert(model.module)
    assert losses[0] != losses[1]
    assert abs(losses[0] / losses[1] - 1) < 2e-3
