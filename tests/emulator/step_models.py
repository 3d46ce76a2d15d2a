"""Small models of whole steps: a Llama, one with biases, GPT-2, and LoRA on a frozen Llama."""

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tests.golden.training import LLAMA, llama


def _biases() -> nn.Module:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA, attention_bias=True, mlp_bias=True))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    return model.train()


def _gpt2() -> nn.Module:
    """Build a GPT-2, whose layers are transformers' `Conv1D`; nothing is dropped."""
    torch.manual_seed(0)
    sizes = {"vocab_size": LLAMA["vocab_size"], "n_positions": 64, "n_embd": 96, "n_layer": 2}
    off = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, n_head=4, **off)).train()


def _lora() -> nn.Module:
    """Build a Llama that PEFT has frozen, with adapters whose product is not zero."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    return model


MODELS = {"llama": llama, "biases": _biases, "gpt2": _gpt2, "lora": _lora}
