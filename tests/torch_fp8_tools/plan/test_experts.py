import pytest
import torch
from transformers import AutoConfig

from tests import models
from tests.internals import StepBytes, build, expected_memory, read_config
from tests.torch_fp8_tools.plan.layouts_for_tests import plan_beside
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8

SIZES = models.SIZES | {"vocab_size": 96, "num_hidden_layers": 1, "head_dim": 16}
SIZES |= {"moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2}
SIZES |= {"tie_word_embeddings": False, "pad_token_id": 0}
COUNTED = {"O2": StepBytes(0.0, 0.0, 0.0, 0.0, 0.0)}
"""For plans in which the bytes of a step have no part: nobody counts them."""


@pytest.mark.parametrize(
    ("kind", "line"), [("qwen3_moe", "experts: 16 rows each of 8 experts."), ("llama", "")]
)
def test_a_plan_names_the_rows_of_experts(kind, line):
    sizes = {name: size for name, size in SIZES.items() if kind != "llama" or "expert" not in name}
    config = AutoConfig.for_model(kind, **sizes)
    planned = plan_beside(COUNTED, config, sequence=64, levels=("O2",))
    assert line in str(planned)
    assert planned.experts == line.removesuffix(".")


@pytest.mark.parametrize(
    ("level", "released", "most"), [("O2", False, 7.2), ("O3", False, 6.2), ("O3", True, 5.2)]
)
@pytest.mark.parametrize(
    "name", ["llama-3.1-8b", "qwen3-30b-a3b", "gpt-oss-20b", "gpt-oss-120b", "mixtral-8x7b"]
)
def test_bytes_of_whole_models(name, level, released, most):
    """A Llama's embedding and output layer are 13 %, and their gradients stay wide at O3."""
    most += 0.03 * (name == "llama-3.1-8b" and level == "O3" and not released)
    model = build(read_config(name))
    config = FP8Config(recipe="rowwise", opt_level=level, gradient_release=released)
    convert_to_float8(model, config, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    convert_optimizer(optimizer, config, model=model)
    held = expected_memory(model, [optimizer]).total / sum(p.numel() for p in model.parameters())
    assert most - 0.15 < held <= most
