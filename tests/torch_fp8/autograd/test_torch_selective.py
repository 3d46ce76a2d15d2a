import functools

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tests.internals import ATTENTION, CASTS, operator_name
from tests.torch_fp8.block_models import LlamaLayer


def _policy(saved, context, func, *args, **kwargs):
    keep = operator_name(func) in saved
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


POLICIES = {"nothing": (), "casts": (*CASTS, *ATTENTION), "products": ("scaled_mm",)}


def _gradients(recipe, saved):
    """Gradients of two steps, each of two micro-batches, and the histories then."""
    layer = LlamaLayer(recipe=recipe)
    options = {}
    if saved is not None:
        policy = functools.partial(_policy, saved)
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
    found = []
    for _step in range(2):
        for _micro_batch in range(2):
            x = torch.randn(1, 32, 128).bfloat16().requires_grad_()
            y = checkpoint(layer, x, use_reentrant=False, **options)
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
