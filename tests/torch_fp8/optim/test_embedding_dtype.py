import pickle

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.internals import Float32Output, SplitWeight, stored, stored_grad
from tests.steps import adamw
from torch_fp8 import FP8Config, convert_optimizer, revert

IDS = torch.arange(8).view(2, 4)


class Stream(nn.Module):
    """An embedding, a residual sum as a transformer has it, and an output layer."""

    def __init__(self, embedding=nn.Embedding, dtype=torch.float32):
        super().__init__()
        self.embed = embedding(256, 64, dtype=dtype)
        self.up = nn.Linear(64, 64, dtype=dtype)
        self.head = nn.Linear(64, 256, bias=False, dtype=dtype)

    def forward(self, ids):
        stream = self.embed(ids)
        stream = stream + self.up(stream)
        self.dtype = stream.dtype
        return self.head(stream)


def converted(model=None, level="O2", **options):
    torch.manual_seed(0)
    model = Stream() if model is None else model
    optimizer, _ = adamw(model, FP8Config(opt_level=level, skip=("head",), **options), lr=1e-3)
    return model, optimizer


def run(model):
    with torch.autocast("cpu", torch.bfloat16):
        return model(IDS)


def hooks(model):
    return [
        h
        for m in model.modules()
        for h in m._forward_hooks.values()
        if isinstance(h, Float32Output)
    ]


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_the_residual_stream_has_the_dtype_that_bf16_mixed_gives_it(level):
    stock = Stream()
    run(stock)
    model, _ = converted(level=level)
    run(model)
    assert stock.dtype == model.dtype == torch.float32
    weight = model.embed.weight
    assert weight.dtype == torch.float32
    assert stored(weight).dtype == (torch.float32 if level == "O1" else torch.bfloat16)


@pytest.mark.parametrize("autocast", [True, False])
def test_the_output_is_the_bf16_half_and_the_gradient_is_exact(autocast):
    model, _ = converted()
    weight = model.embed.weight

    def look_up():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model.embed(IDS)

    torch.testing.assert_close(look_up(), stored(weight)[IDS].float(), rtol=0, atol=0)
    torch.testing.assert_close(look_up(), weight[IDS], rtol=2**-8, atol=0)  # BF16's rounding
    assert model.embed.weight is weight
    look_up().sum().backward()
    expected = torch.zeros(256, 64)
    expected[:8] = 1
    torch.testing.assert_close(weight.grad, expected, rtol=0, atol=0)
    assert stored_grad(weight).dtype == torch.bfloat16


def test_the_weight_is_back_where_forward_raises():
    model, _ = converted()
    weight = model.embed.weight
    with pytest.raises(IndexError):
        model.embed(torch.tensor([256]))
    assert model.embed.weight is weight
    assert isinstance(weight, SplitWeight)


def test_a_weight_that_was_bf16_before_keeps_a_bf16_stream():
    model, _ = converted(Stream(dtype=torch.bfloat16))
    run(model)
    assert model.dtype == torch.bfloat16
    assert not hooks(model)


def test_a_bag_and_a_subclass():
    class Scaled(nn.Embedding):
        def forward(self, ids):
            return super().forward(ids) * 8.0

    class Bag(nn.EmbeddingBag):
        def forward(self, ids):
            return super().forward(ids).unsqueeze(1)

    for embedding in (Scaled, Bag):
        model, _ = converted(Stream(embedding))
        run(model)
        assert model.dtype == torch.float32


def test_a_tied_output_layer_computes_as_before():
    model = Stream()
    model.head.weight = model.embed.weight
    converted(model)
    assert run(model).dtype == torch.bfloat16
    assert model.dtype == torch.float32


def test_one_hook_however_often_it_is_converted():
    model, optimizer = converted()
    convert_optimizer(optimizer, optimizer.fp8_config, model=model)
    assert len(hooks(model)) == 1


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_reverted_model_is_pickled_without_anything_of_ours(level):
    model, _ = converted(nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 64)), level)
    assert b"torch_fp8" in pickle.dumps(model)
    revert(model)
    assert b"torch_fp8" not in pickle.dumps(model)


def test_compiled_without_a_graph_break():
    model, _ = converted()
    compiled = torch.compile(model.embed, backend="eager", fullgraph=True)
    assert compiled(IDS).dtype == torch.float32


@pytest.mark.usefixtures("single_process_group")
def test_a_reentrant_checkpoint_trains_under_ddp():
    """It repeats the forward in backward, outside of DDP's forward."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    _optimizer, _ = adamw(model, FP8Config(skip=()))
    last = model[1].forward
    model[1].forward = lambda x: checkpoint(last, x, use_reentrant=True)
    DistributedDataParallel(model)(torch.randn(4, 64)).sum().backward()
    assert model[1].weight.grad.dtype == torch.float32
