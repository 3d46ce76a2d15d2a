"""A compiled step has as many graphs in FP8 as in BF16, and as few breaks and dropped frames."""

import functools

import pytest
import torch

from tests.compiled_graphs import count_graphs
from tests.models import llama
from tests.moe_models import moe_model
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8

pytestmark = pytest.mark.long
slow = pytest.mark.slow
MODELS = {
    "Llama": functools.partial(llama, num_hidden_layers=1),
    "Qwen3Moe": functools.partial(moe_model, "Qwen3Moe", num_hidden_layers=1),
    "GptOss": functools.partial(moe_model, "GptOss"),
    "Mixtral": functools.partial(moe_model, "Mixtral"),
    "DeepseekV3": functools.partial(moe_model, "DeepseekV3"),
}


def _steps(name, level):
    """Train a compiled model for two steps; `level`: None for BF16."""
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if level is not None:
        config = FP8Config(recipe="tensorwise", opt_level=level)
        convert_to_float8(model, config)
        convert_optimizer(optimizer, config, model=model)
    compiled = torch.compile(model, backend="aot_eager")
    ids = torch.randint(0, 64, (2, 16))
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = compiled(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("Qwen3Moe", "O2"),
        pytest.param("Qwen3Moe", "O3", marks=slow),
        *(pytest.param(name, "O2", marks=slow) for name in MODELS if name != "Qwen3Moe"),
    ],
)
def test_a_whole_model_in_its_own_loop(name, level):
    assert count_graphs(lambda: _steps(name, level)) == count_graphs(lambda: _steps(name, None))
