"""Parts of transformers, as models of tests have them: norms, MLPs, attention, blocks, adapters."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.models import llama_config
from torch_fp8 import FP8Config, convert_to_float8


class Norm(nn.Module):
    """An RMSNorm as Hugging Face writes it."""

    def __init__(self, size, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)
        self.variance_epsilon = eps

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * y.to(x.dtype)


class MLP(nn.Module):
    def __init__(self, size, inner, bias=False):
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=bias)
        self.up_proj = nn.Linear(size, inner, bias=bias)
        self.down_proj = nn.Linear(inner, size, bias=bias)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class JoinedMLP(nn.Module):
    """As Phi-3 and GLM-4 have it."""

    def __init__(self, size, inner, bias=False):
        super().__init__()
        self.gate_up_proj = nn.Linear(size, 2 * inner, bias=bias)
        self.down_proj = nn.Linear(inner, size, bias=bias)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(up * self.act_fn(gate))


class UpFirstMLP(JoinedMLP):
    def forward(self, x):
        up, gate = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.act_fn(gate) * up)


class Attention(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(size, size, bias=False) for _ in range(4)
        )

    def forward(self, x):
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.o_proj(F.scaled_dot_product_attention(q, k, v))


class Block(nn.Module):
    def __init__(self, size=64, inner=176, bias=False):
        super().__init__()
        self.attn_norm, self.mlp_norm = Norm(size), Norm(size)
        self.attention, self.mlp = Attention(size), MLP(size, inner, bias)

    def forward(self, x):
        x = x + self.attention(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    def __init__(self, size=64, inner=176):
        super().__init__()
        self.layers = nn.ModuleList(Block(size, inner) for _ in range(2))
        self.norm = Norm(size)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Adapter(nn.Module):
    """LoRA around a layer, as PEFT has it."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, rank, bias=False, dtype=base.weight.dtype)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


class LlamaLayer(nn.Module):
    """Hugging Face's decoder layer and its angles, as a function of 32 hidden states."""

    def __init__(self, **options):
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

        config = llama_config(hidden_size=128, intermediate_size=256, num_hidden_layers=1)
        config._attn_implementation = "sdpa"
        torch.manual_seed(0)
        self.layer = LlamaDecoderLayer(config, 0).bfloat16()
        self.angles = LlamaRotaryEmbedding(config)(
            torch.zeros(1, dtype=torch.bfloat16), torch.arange(32)[None]
        )
        convert_to_float8(self.layer, FP8Config(**options))

    def forward(self, x):
        return self.layer(x, position_embeddings=self.angles)
