import copy

import pytest
import torch

from benchmarks import bench_step
from benchmarks.bench_step import FP8
from benchmarks.measurement import layers_apart
from benchmarks.shapes import TOY_LLAMA
from benchmarks.training_run import bigram_tokens, causal_lm, optimizer_of
from tests.waits import Waits
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, variant in bench_step.VARIANTS.items()
        if variant.precision == FP8 and "graph_scales" not in variant.config  # of graphs alone
    ],
)
def test_no_step_of_ours_waits_for_the_device(name, request):
    """transformers looks at the positions, once in a forward, to find packed sequences."""
    variant = bench_step.VARIANTS[name]
    if variant.config.get("backend") == "transformer-engine":
        request.getfixturevalue("te")
    config = FP8Config(**{"recipe": "tensorwise", **variant.config})
    model = causal_lm(TOY_LLAMA | {"num_hidden_layers": 1}, variant, CPU)
    optimizer = optimizer_of(variant, model.parameters(), CPU)
    convert_to_float8(model, config)
    convert_optimizer(optimizer, config, model=model)
    counted = []
    for tokens in bigram_tokens(2, 32, TOY_LLAMA["vocab_size"]).split(1):
        with Waits(lambda: [state["step"] for state in optimizer.state.values()]) as waits:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        counted.append(waits.count)
    assert counted == [1, 1]


def test_layers_of_a_variant_multiply_apart():
    model = causal_lm(TOY_LLAMA, bench_step.VARIANTS["fp8-mixed, layers apart"], CPU)
    with layers_apart():
        assert not convert_to_float8(copy.deepcopy(model), FP8Config("tensorwise")).groups
    assert convert_to_float8(model, FP8Config("tensorwise")).groups
