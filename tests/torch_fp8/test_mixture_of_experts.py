import copy

import pytest
import torch
from torch import nn

from tests.internals import matmul_flops
from tests.moe_models import MODELS, moe_model
from torch_fp8 import FP8Config, convert_to_float8, revert

NAMES = pytest.mark.parametrize("name", MODELS)
pytestmark = pytest.mark.filterwarnings("ignore:.*falling back to its reference")


def _outside_head(model):
    flops = matmul_flops(model)
    return flops.fp8 / (flops.total - 3 * model.lm_head.weight.numel())


@NAMES
def test_nearly_all_flops_outside_the_output_layer_run_in_fp8(name):
    model = moe_model(name)
    report = convert_to_float8(model)
    shares = {"Llama4Text": 0.95}
    assert _outside_head(model) >= shares.get(name, 0.99)
    assert report.flops.experts == 0
    blocks = sum(p.ndim == 3 and p.shape[0] == 4 for p in model.parameters()) // 2
    assert len(report.experts) == 2 * blocks > 0
    assert f"{2 * blocks} fused weights in FP8 grouped GEMMs" in report.summary()


@NAMES
def test_routers_stay_as_they_are(name):
    """With 16 experts a router is large enough for FP8."""
    counts = ("num_experts", "num_local_experts", "n_routed_experts")
    model = moe_model(name, **{key: 16 for key in counts if key in MODELS[name]})
    routers = {n: m for n, m in model.named_modules() if n.endswith((".gate", ".router"))}
    assert routers
    classes = {n: type(m) for n, m in routers.items()}
    convert_to_float8(model)
    assert {n: type(model.get_submodule(n)) for n in routers} == classes


def test_a_linear_router_beside_experts_is_never_converted():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Parameter(torch.randn(32, 64, 64))

    class Block(nn.Module):
        def __init__(self, experts):
            super().__init__()
            self.gate, self.experts = nn.Linear(64, 32), experts
            self.shared = nn.Linear(64, 32)

    apart = nn.ModuleList([nn.Linear(64, 64) for _ in range(32)])
    for experts in (Experts(), apart):
        report = convert_to_float8(Block(experts))
        assert dict(report.skipped)["gate"] == "router of experts"
        assert "shared" in report.converted


def test_a_table_of_three_dimensions_has_no_router():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(32, 64, 64))

    model = nn.ModuleDict({"positions": Positions(), "gate": nn.Linear(64, 32)})
    report = convert_to_float8(model)
    assert report.converted == ("gate",)
    assert not report.flops.experts


@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
def test_generation_saving_and_copies(name, tmp_path):
    model = moe_model(name).eval()
    x = torch.randint(1, 64, (2, 8))
    report = convert_to_float8(model, FP8Config(recipe="rowwise"))
    assert report.experts
    want = model(x).logits
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": -1}
    tokens = model.generate(x, **options)
    assert torch.equal(copy.deepcopy(model)(x).logits, want)
    assert torch.equal(model.generate(x, **options), tokens)
    assert model.config._experts_implementation == "grouped_mm"
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    for (key, value), (other, loaded) in zip(
        model.state_dict().items(), again.state_dict().items(), strict=True
    ):
        assert key == other
        assert torch.equal(value, loaded), key
    convert_to_float8(again, FP8Config(recipe="rowwise"))
    assert torch.equal(again(x).logits, want)
    assert revert(model) == len(report.converted) + len(report.experts) // 2
