"""Torch's own selective checkpoint around FP8 layers: both passes issue the same operators."""

import functools

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from tests.models import llama_config
from torch_fp8 import FP8Config, convert_to_float8
from torch_fp8.autograd.selective_checkpoint import ATTENTION, CASTS, operator_name


def _policy(saved, context, func, *args, **kwargs):
    keep = operator_name(func) in saved
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


POLICIES = {"nothing": (), "casts": (*CASTS, *ATTENTION), "products": ("scaled_mm",)}


def _gradients(recipe, saved):
    """Gradients of two steps, each of two micro-batches, and the histories then."""
    torch.manual_seed(0)
    config = llama_config(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    config._attn_implementation = "sdpa"
    layer = LlamaDecoderLayer(config, 0).bfloat16()
    convert_to_float8(layer, FP8Config(recipe=recipe))
    angles = LlamaRotaryEmbedding(config)(torch.zeros(1).bfloat16(), torch.arange(32)[None])
    options = {}
    if saved is not None:
        policy = functools.partial(_policy, saved)
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
    found = []
    for _step in range(2):
        for _micro_batch in range(2):
            x = torch.randn(1, 32, 128).bfloat16().requires_grad_()
            y = checkpoint(layer, x, position_embeddings=angles, use_reentrant=False, **options)
            y.float().square().mean().backward()
            found.append(x.grad)
        found += [p.grad for p in layer.parameters()]
        with torch.no_grad():
            for p in layer.parameters():
                p.sub_(p.grad)
                p.grad = None
    return found + [b.clone() for b in layer.buffers()]


@pytest.mark.parametrize("saved", POLICIES)
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
def test_gradients_and_histories_are_those_of_a_whole_checkpoint(recipe, saved):
    whole, selective = _gradients(recipe, None), _gradients(recipe, POLICIES[saved])
    assert len(whole) == len(selective)
    for expected, got in zip(whole, selective, strict=True):
        assert torch.equal(expected, got)
