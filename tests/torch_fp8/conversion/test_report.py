import pytest
import torch
from torch import nn

import torch_fp8
from tests.tied_model import Adapter, Experts, Model
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8


def test_a_report_alone_converts_nothing_and_moves_no_data():
    model = Model().to(torch.bfloat16)
    classes = [type(m) for m in model.modules()]
    config = FP8Config(recipe="delayed", skip=("lm_head", "layers.0"))
    report = torch_fp8.conversion_report(model, config)
    assert [type(m) for m in model.modules()] == classes
    assert not dict(model.named_buffers())
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert str(report) == str(convert_to_float8(model, config))
    assert str(torch_fp8.conversion_report(model, config)) == str(report)  # converted already
    with pytest.raises(ValueError, match=r"no linear layer .* can run in FP8"):
        torch_fp8.conversion_report(nn.Sequential(nn.Linear(8, 8)))


def test_auto_says_what_it_resolved_to():
    report = convert_to_float8(Model())
    assert report.recipe.name == "tensorwise"
    assert "auto -> tensorwise" in report.summary()
    assert "emulation on CPU" in report.summary()
    assert "ranks" not in report.summary()
    assert "  ranks     as asked" in report.summary(communication="as asked").splitlines()


def test_flops_share_counts_experts_frozen_layers_and_wgrad():
    model = nn.ModuleDict(
        {"a": nn.Linear(32, 32), "b": nn.Linear(32, 32), "lm_head": nn.Linear(32, 64)}
    )
    model.b.weight.requires_grad_(False)
    size = 32 * 32
    total = 3 * size + 2 * size + 3 * 2 * size
    assert convert_to_float8(model).flops_share == pytest.approx(5 * size / total)
    report = convert_to_float8(model, FP8Config(wgrad="bf16"))
    assert report.flops_share == pytest.approx(4 * size / total)
    model.experts = Experts()  # 2 of 8 experts a token
    experts = 3 * 8 * 32 * 64 * 2 / 8
    assert convert_to_float8(model).flops_share == pytest.approx(5 * size / (total + experts))


def test_summary_groups_what_was_skipped():
    model = Model()
    model.adapters = nn.ModuleList(Adapter() for _ in range(4))
    text = convert_to_float8(model).summary(model, [torch.optim.AdamW(model.parameters())])
    assert "FP8: 8 of 9 linear layers" in text  # those of the adapters are no layers left out
    assert "  adapters  8 linear layers of LoRA or another adapter, in high precision" in text
    assert ": adapter" not in text
    assert "16.00 bytes per parameter, before and after" in text
    assert " MiB" in text


def test_summary_says_what_fused_experts_mean():
    model = nn.ModuleList([nn.Linear(32, 64, bias=False), Experts()])
    report = convert_to_float8(model)
    # One layer of 2,048 weights; of 8 experts with as many, 2 a token.
    assert report.flops_share == pytest.approx(1 / 3)
    text = report.summary()
    assert "  experts   66.7 % of the matmul FLOPs are in fused experts" in text
    assert "all GEMMs together are only 1.20 times as fast" in text
    assert "experts" not in convert_to_float8(Model()).summary()


def test_summary_names_the_next_call_and_alarms_nobody():
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    report = convert_to_float8(model)
    text = report.summary(model)
    call = "torch_fp8.convert_optimizer(optimizer, config, model=model)"
    assert f"  optimizer next: {call}" in text
    assert str(report) == report.summary()
    assert not any(word in str(report) for word in ("not converted", "warning"))
    assert text.endswith("; the states are unknown and not counted")
    states = torch_fp8.convert_optimizer(optimizer, model=model)
    text = report.summary(model, [optimizer], [states])
    assert "next:" not in text
    assert "not counted" not in text
    assert text.endswith(" MiB, 0.3 MiB before; 9.14 while micro-batches are summed")
    report = convert_to_float8(model, FP8Config(opt_level="O1"))
    assert "next:" not in report.summary(model)


@pytest.mark.parametrize(
    ("features", "said"),
    [
        (64, "optimizer AdamW with 8-bit states"),
        (32, "optimizer AdamW with unchanged states: each of its parameters has fewer than 4,096"),
    ],
)
def test_the_summary_says_of_states_what_its_bytes_say(features, said):
    model = nn.Sequential(nn.Linear(features, features), nn.Linear(features, features))
    report = convert_to_float8(model)
    optimizer = torch.optim.AdamW(model.parameters())
    summary = report.summary(model, [optimizer], [convert_optimizer(optimizer, model=model)])
    assert said in summary
    assert ("before and after" in summary) == (features == 32)
