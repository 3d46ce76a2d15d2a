import time

import pytest
import torch
from torch import nn

from tests.internals import matches
from tests.tied_model import Adapter, Experts, Model
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8, memory_report


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "base_model.model.lm_head", True),
        ("lm_head", "my_lm_head", False),
        ("lm_head", "lm_head_norm", False),
        ("layers.2", "model.layers.2.mlp.up", True),
        ("layers.2", "model.layers.20.mlp.up", False),
        ("layers.*.mlp", "model.layers.20.mlp.up", True),
        ("layers.*.up", "model.layers.20.mlp.up", False),
        ("layers.**.up", "model.layers.20.mlp.up", True),
        ("*_proj", "layers.0.q_proj", True),
        ("l.0", "lx0", False),
        ("model.lm_head", "model._orig_mod.lm_head", True),
        ("layers.0.mlp", "_orig_mod.layers.0._checkpoint_wrapped_module.mlp.up", True),
        ("a.b", "a._my_orig_mod.b", False),
        ("layers.*.up", "layers.a.b.up", False),
        ("layers.*.up", "layers..up", True),
        ("l*s.1", "model.layers.1.up", True),
        ("l**1", "model.layers.1.up", True),
        ("*", "anything.at.all", True),
        ("***", "anything.at.all", True),
        ("up*", "layers.0.gate_up", False),
        ("[a]+(b|c)", "aab", False),
    ],
)
def test_skip_patterns_are_anchored_to_components(pattern, name, expected):
    assert matches(pattern, name) is expected


def test_many_wildcards_take_no_time():
    name = ".".join(f"layers.{i}.self_attn.projection" for i in range(8))
    start = time.perf_counter()
    assert not matches("*".join("aaaaaaaaaa") + "**".join("eeeeeeeeee") + "**z", name)
    assert not matches("**a" * 12 + "z", "a" * 60)
    assert matches("**a" * 12, "a" * 60)
    assert time.perf_counter() - start < 1


def test_a_pattern_that_matches_nothing_is_told():
    report = convert_to_float8(Model(), FP8Config(skip=("lm_head", "layers.7")))
    assert report.unused_skip == ("layers.7",)
    assert "'layers.7' match no module" in report.summary()


class _Subclass(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2


class _Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.randn(2, 32, 64))


class _WithHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.embed_out = nn.Linear(32, 32), nn.Linear(32, 48)

    def get_output_embeddings(self):
        return self.embed_out


def _hooked():
    linear = nn.Linear(32, 32)
    linear.forward = lambda x: nn.functional.linear(x, linear.weight)
    return linear


@pytest.mark.parametrize(
    ("module", "skipped"),
    [
        (Adapter(), {"lora_A.default": "adapter", "lora_B.default": "adapter"}),
        (Experts(), {"gate_up_proj": "fused expert weights in an unsupported layout"}),
        (_Table(), {"positions": "3-D parameter, neither of a linear layer nor of experts"}),
        (_Subclass(32, 32), {"": "_Subclass does not compute what nn.Linear does"}),
        (nn.Linear(32, 1), {"": "out_features=1 is below 16"}),
        (nn.Linear(8, 32), {"": "in_features=8 is below 16"}),
        (nn.Linear(32, 32).double(), {"": "weight is torch.float64"}),
        (_hooked(), {"": "its forward was replaced on the instance"}),
        (_WithHead(), {"embed_out": "output layer"}),
        (nn.MultiheadAttention(32, 2), {"out_proj": "reads its weight without calling it"}),
        (
            torch.nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)),
            {"": "its weight is parametrized"},
        ),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "",
)
def test_skipped_with_the_reason(module, skipped):
    model = nn.ModuleDict({"under_test": module, "other": nn.Linear(32, 32)})
    report = convert_to_float8(model)
    assert "other" in report.converted
    reasons = dict(report.skipped)
    for name, reason in skipped.items():
        full_name = f"under_test.{name}".rstrip(".")
        assert reason in reasons[full_name]
    assert not set(reasons) & set(report.converted)


def test_a_whole_model_below_a_name_like_an_adapters_is_converted():
    layer = nn.ModuleDict({"base_layer": nn.Linear(64, 64, bias=False)})
    layer["lora_A"] = nn.ModuleDict({"default": nn.Linear(64, 64, bias=False)})
    model = nn.ModuleDict({"lora_model": nn.ModuleDict({"model": layer})})  # as X-LoRA's
    report = convert_to_float8(model)
    assert report.converted == ("lora_model.model.base_layer",)
    optimizer = convert_optimizer(torch.optim.AdamW(model.parameters()), model=model)
    assert "1 weight stays float32: of adapters" in str(optimizer)


def test_lm_head_is_converted_by_choice():
    model = Model()
    assert "lm_head" in convert_to_float8(model, FP8Config(skip=())).converted
    assert model.lm_head.weight is model.embed.weight


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Conv2d(3, 3, 3)), "no nn.Linear.*train this model in BF16"),
        (nn.Sequential(nn.Linear(4, 4)), r"'0': in_features=4"),
        (nn.ModuleDict({"lm_head": nn.Linear(32, 32)}), "'lm_head': skip='lm_head'"),
        (nn.Sequential(), "no nn.Linear"),
    ],
    ids=["no-linears", "too-small", "all-skipped", "empty"],
)
def test_nothing_to_convert_is_an_error(model, message):
    with pytest.raises(ValueError, match=message):
        convert_to_float8(model)


def test_what_has_three_dimensions_is_not_for_that_an_expert():
    class Embeddings(nn.Module):
        def __init__(self):
            super().__init__()
            self.position_embeddings = nn.Parameter(torch.zeros(1, 32, 64))
            self.convolution = nn.Conv1d(32, 32, 16)
            self.bilinear = nn.Bilinear(32, 32, 4)
            self.layer = nn.Linear(32, 64)

    report = convert_to_float8(Embeddings())
    assert report.converted == ("layer",)
    assert report.skipped == ()
    assert report.flops_share == 1.0
    assert "experts" not in report.summary()


def test_lazy_modules_are_left_until_their_sizes_are_known():
    model = nn.Sequential(
        *(nn.Linear(64, 96), nn.LazyBatchNorm1d(), nn.RMSNorm(96), nn.Linear(96, 96)),
        *(nn.LazyLinear(80), nn.LazyLinear(64)),
    )
    optimizer = torch.optim.AdamW(model.parameters())
    report = convert_to_float8(model)
    assert report.converted == ("0", "3")
    assert {name: reason.partition(":")[0] for name, reason in report.skipped} == {
        "4": "its size is not known yet",
        "5": "its size is not known yet",
    }
    optimizer_report = convert_optimizer(optimizer, model=model)
    summary = report.summary(model, [optimizer], [optimizer_report])
    assert "4, 5: its size is not known yet: run a batch through the model" in summary
    assert memory_report(model, optimizer).num_params == 64 * 96 + 96 + 96 + 96 * 96 + 96
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
    assert convert_to_float8(model).converted == ("0", "3", "4", "5")
