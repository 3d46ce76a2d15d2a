"""Modules of fused experts of transformers on their own, one of each layout."""

from types import SimpleNamespace

import torch
from torch import nn

from tests.internals import experts_dispatch

E, K, H, WIDTH = 4, 2, 64, 48

CONFIG = {
    "_experts_implementation": "grouped_mm",
    "num_experts": E,
    "num_local_experts": E,
    "moe_num_experts": E,
    "n_routed_experts": E,
    "hidden_size": H,
    "intermediate_size": WIDTH,
    "moe_intermediate_size": WIDTH,
    "moe_hidden_size": H,
    "moe_latent_size": None,
    "hidden_act": "silu",
    "mlp_hidden_act": "relu2",
    "post_norm_eps": 1e-6,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
CLASSES = {
    "plain": ("qwen3_moe", "Qwen3MoeExperts"),
    "gpt-oss": ("gpt_oss", "GptOssExperts"),
    "transposed": ("aria", "AriaExperts"),
    "transposed-bias": ("openai_privacy_filter", "OpenAIPrivacyFilterExperts"),
    "no-gate": ("nemotron_h", "NemotronHExperts"),
    "post-norm": ("muse_spark", "MuseSparkExperts"),
}
"""Those that transformers dispatches."""
BATCHED = {"llama-4": ("llama4", "Llama4TextExperts")}
"""Those of which each expert computes every token."""
LAYOUTS = [*CLASSES, *BATCHED]


def experts(layout="plain", **changes):
    """Build one, with Gaussian weights."""
    model, name = (CLASSES | BATCHED)[layout]
    module = __import__(f"transformers.models.{model}.modeling_{model}", fromlist=[name])
    built = getattr(module, name)(SimpleNamespace(**CONFIG | changes))
    for parameter in built.parameters():
        nn.init.normal_(parameter, std=0.1)
    return built


def batch(tokens, num_experts=E, top_k=K):
    """Return tokens, their experts and their scores."""
    x = torch.randn(tokens, H)
    scores, index = torch.randn(tokens, num_experts).softmax(-1).topk(min(top_k, num_experts))
    return x, index, scores


def run(module, x, index, scores, grad=None):
    """Return the output and all gradients."""
    x, scores = x.clone().requires_grad_(), scores.clone().requires_grad_()
    module.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(x, index, scores)
    y.float().backward(torch.ones_like(y, dtype=torch.float32) if grad is None else grad)
    grads = {name: p.grad.clone() for name, p in module.named_parameters()}
    return {"y": y.detach(), "x": x.grad, "scores": scores.grad, **grads}


def forget_entries():
    """Take back the entries of models that other tests of this process have left."""
    for left in (*experts_dispatch._converted, nn.Module()):
        experts_dispatch.remove(left)
