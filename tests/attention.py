"""Attention of transformers' models on its own, and kernels in place of those that need a GPU."""

import torch
from transformers import Gemma2Config, GptOssConfig, LlamaConfig, MistralConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.mistral.modeling_mistral import MistralAttention

from torch_fp8 import FP8Config, convert_to_float8, revert
from torch_fp8.conversion.attention_layers import eager_function

HEADS, GROUPS, TOKENS, DIM = 8, 2, 96, 64
SIZES = {
    "hidden_size": HEADS * DIM,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": DIM,
}
MODULES = {
    "llama": (LlamaConfig, LlamaAttention),
    "mistral": (MistralConfig, MistralAttention),
    "gemma2": (Gemma2Config, Gemma2Attention),
    "gpt_oss": (GptOssConfig, GptOssAttention),
}
QKV = FP8Config(opt_level="O1", save_attention="qkv")


class Attention:
    """The attention of a model, converted for a test and reverted after it."""

    def __init__(self, kind="llama", implementation="sdpa", config=QKV):
        torch.manual_seed(0)
        make, cls = MODULES[kind]
        self.config = make(**SIZES, attn_implementation=implementation)
        self.config._attn_implementation = implementation
        self.module = cls(self.config, 0).train()
        if hasattr(self.module, "sinks"):  # which the class leaves as its memory was
            torch.nn.init.normal_(self.module.sinks)
        self.implementation, self.fp8 = implementation, config

    def __enter__(self):
        convert_to_float8(self.module, self.fp8)
        return self

    def __exit__(self, *exception):
        revert(self.module)

    def __call__(self, q, k, v, mask=None, **kwargs):
        name = self.implementation
        function = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_function(self.module))
        if self.implementation == "eager" and mask is None:
            hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
            mask = torch.zeros(TOKENS, TOKENS).masked_fill(hidden, -1e9).to(q.dtype)[None, None]
        out, _ = function(self.module, q, k, v, mask, scaling=DIM**-0.5, dropout=0.0, **kwargs)
        return out


def operands(dtype=torch.float32, batch=2, frozen=()):
    generator = torch.Generator().manual_seed(1)
    tensors = []
    for heads in (HEADS, GROUPS, GROUPS):
        # As projections leave them: (B, S, H, D) in memory.
        x = torch.randn(batch, TOKENS, heads, DIM, generator=generator).transpose(1, 2)
        if len(tensors) == 1:
            x = x + 1.5 * torch.randn(1, heads, 1, DIM, generator=generator)
        tensors.append(x.to(dtype).detach().requires_grad_(len(tensors) not in frozen))
    return tensors


def gradients(attention, tensors, **kwargs):
    out = attention(*tensors, **kwargs)
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
    trained = [t for t in tensors if t.requires_grad]
    return out.detach(), torch.autograd.grad(out, trained, g)


def padding_mask():
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril().repeat(2, 1, 1, 1)
    mask[0, :, :, :30] = False  # padding on the left
    return mask | torch.eye(TOKENS, dtype=torch.bool)


CASES = {
    "sdpa": ("llama", "sdpa", {}),
    "padding": ("llama", "sdpa", {"mask": padding_mask()}),
    "eager": ("llama", "eager", {}),
    "sliding window": (
        "mistral",
        "sdpa",
        {"mask": (torch.ones(TOKENS, TOKENS).tril() - torch.ones(TOKENS, TOKENS).tril(-16) > 0)},
    ),
    "flex": ("llama", "flex_attention", {}),
    "flash": ("llama", "flash_attention_2", {}),
}


class Kernel(torch.autograd.Function):
    """A function that saves what it is given and its output, as flash and flex attention do."""

    @staticmethod
    def forward(ctx, q, k, v):
        out = causal(q, k, v).transpose(1, 2).contiguous().transpose(1, 2)
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out = (t.float() for t in ctx.saved_tensors)
        groups = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
        hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
        weights = (q @ k.mT / DIM**0.5).masked_fill(hidden, -1e9).softmax(-1)
        by_weight = grad.float() @ v.mT - (grad.float() * out).sum(-1, keepdim=True)
        by_product = weights * by_weight / DIM**0.5
        grads = by_product @ k, by_product.mT @ q, weights.mT @ grad.float()
        of_heads = [g.unflatten(1, (-1, groups)).sum(2) for g in grads[1:]]
        return tuple(g.to(grad.dtype) for g in (grads[0], *of_heads))


def causal(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )


def replace_kernels(monkeypatch):
    """Have transformers call `Kernel` for flex and flash attention, which need a GPU."""
    from transformers.integrations import flash_attention, flex_attention

    def flash(query, key, value, *args, **kwargs):
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        return Kernel.apply(q, k, v).transpose(1, 2)

    monkeypatch.setattr(
        flex_attention,
        "compile_friendly_flex_attention",
        lambda q, k, v, **_: Kernel.apply(q, k, v),
    )
    monkeypatch.setattr(flash_attention, "_flash_attention_forward", flash)
