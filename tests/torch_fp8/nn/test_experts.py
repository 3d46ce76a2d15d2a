import copy
import sys

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests.internals import (
    GroupedOptions,
    SplitWeight,
    expected_memory,
    expert_recipe,
    experts_dispatch,
    grouped_linear,
    sqnr_db,
)
from tests.moe_experts import CLASSES, WIDTH, E, H, K, forget_entries
from tests.moe_experts import batch as _batch
from tests.moe_experts import experts as _experts
from tests.moe_experts import run as _run
from tests.steps import adamw
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8, memory_report, revert
from torch_fp8.ops.moe_rows import moe_route

RELEASE = {"opt_level": "O3", "gradient_release": True}
FLOOR = 22.5
"""A GEMM of two casts has 28.5 dB. What leaves a block has gone through three that are as noisy,
23.7 dB (gate, up and down, say), within 1 dB for few values; a post norm adds one more.
"""
OF_BLOCK = 1.3
"""What the gradients of a block lose: its backward takes gate and up in E4M3, 31.5 dB each, which
leaves 22.2 of 23.5 dB, within 1 dB for few values.
"""
BLOCKS = ("plain", "gpt-oss", "transposed", "transposed-bias")


@pytest.mark.parametrize(
    ("layout", "wgrad"),
    [*((layout, "fp8") for layout in CLASSES), ("plain", "bf16"), ("gpt-oss", "bf16")],
)
def test_every_layout_computes_what_transformers_does(layout, wgrad):
    experts, batch, grad = _experts(layout), _batch(600), torch.randn(600, H)
    want = _run(experts, *batch, grad)
    report = convert_to_float8(experts, FP8Config(recipe="rowwise", wgrad=wgrad))
    assert len(report.experts) == 2
    got = _run(experts, *batch, grad)
    assert set(got) == set(want)
    less = OF_BLOCK if layout in BLOCKS and wgrad == "fp8" else float(layout == "post-norm")
    for name, value in want.items():
        assert sqnr_db(value, got[name]) >= FLOOR - (less if name != "y" or less == 1 else 0), name
    assert revert(experts) == 1
    again = _run(experts, *batch, grad)
    assert all(torch.equal(again[name], value) for name, value in want.items())


def test_releases_without_post_norms_set_no_flag_for_them():
    """As transformers 5.17."""
    experts, batch = _experts(), _batch(48)
    twin = copy.deepcopy(experts)
    vars(experts).pop("has_post_expert_norm", None)
    for module in (twin, experts):
        assert len(convert_to_float8(module, FP8Config(recipe="rowwise")).experts) == 2
    want, got = (_run(module, *batch) for module in (twin, experts))
    assert experts.fp8_gate is not None
    assert all(torch.equal(got[name], value) for name, value in want.items())


@pytest.mark.parametrize("rows", [1, 3, 16, 64, 512])
@pytest.mark.parametrize("transposed", [False, True])
def test_each_gradient_of_a_grouped_layer_has_the_bits_of_its_casts(rows, transposed):
    """One GEMM: 28.5 dB of two casts, and at least 26 for any number of rows."""
    route = moe_route(torch.arange(E).repeat_interleave(rows)[:, None], E)
    x = torch.randn(E * rows, H, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(E, *((H, 80) if transposed else (80, H)), requires_grad=True)
    options = GroupedOptions("experts", expert_recipe(FP8Config()), transposed, False)
    y = grouped_linear(x, weight, route.offs, route, options)
    grad = torch.randn_like(y)
    got = torch.autograd.grad(y, (x, weight), grad)
    stacked = x.view(E, rows, H).float()
    want_y = stacked @ (weight if transposed else weight.transpose(1, 2))
    grad = grad[route.row[:, 0]].view(E, rows, -1).float()
    want = torch.autograd.grad(want_y, (x, weight), grad)
    for value, other in zip((want_y.flatten(0, 1), *want), (y[route.row[:, 0]], *got), strict=True):
        assert sqnr_db(value, other) >= 26


def test_expert_parallel_sentinels_add_nothing():
    experts, (x, index, scores) = _experts(), _batch(40)
    experts._is_expert_parallel = True
    index[::3, 1] = E
    scores = scores.masked_fill(index == E, 0.0)
    want = _run(experts, x, index, scores)
    convert_to_float8(experts)
    got = _run(experts, x, index, scores)
    for name, value in want.items():
        assert sqnr_db(value, got[name]) >= FLOOR - 0.5, name
    assert not got["scores"][index == E].any()


def test_six_grouped_gemms_run_for_a_block():
    experts, batch = _experts(), _batch(64)
    convert_to_float8(experts)
    with FlopCounterMode(display=False) as counter:
        _run(experts, *batch)
    rows = 64 * K + 16 * E
    counts = counter.get_flop_counts()["Global"]
    assert counts == {torch.ops.torch_fp8.scaled_grouped_mm: 3 * 2 * rows * 3 * WIDTH * H}


def test_an_entry_of_somebody_else_comes_back():
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    forget_entries()

    def theirs(module, x, *args):
        return x + 1

    ALL_EXPERTS_FUNCTIONS["grouped_mm"] = theirs
    try:
        experts, batch = _experts(), _batch(20)
        convert_to_float8(experts)
        assert not torch.equal(experts(*batch), batch[0] + 1)
        revert(experts)
        assert ALL_EXPERTS_FUNCTIONS["grouped_mm"] is theirs
    finally:
        del ALL_EXPERTS_FUNCTIONS["grouped_mm"]


@pytest.mark.long
def test_one_graph_computes_what_eager_code_does():
    experts, batch = _experts("gpt-oss"), _batch(20)
    convert_to_float8(experts)
    want = _run(experts, *batch)
    got = _run(torch.compile(experts, backend="aot_eager", fullgraph=True), *batch)
    for name, value in want.items():
        assert torch.equal(value, got.get(name, got.get(f"_orig_mod.{name}"))), name


def test_evaluation_in_high_precision_is_transformers_own():
    experts, batch = _experts().eval(), _batch(20)
    want = experts(*batch)
    convert_to_float8(experts, FP8Config(eval_fp8=False))
    assert torch.equal(experts(*batch), want)
    assert not torch.equal(experts.train()(*batch), want)


def test_other_functions_get_the_halves_of_split_weights_under_autocast():
    """As ``generate`` does on CUDA, which decodes by ``batched_mm``."""
    experts, (x, index, scores) = _experts().eval(), _batch(20)
    _optimizer, _ = adamw(experts, FP8Config())
    assert isinstance(experts.gate_up_proj, SplitWeight)
    experts.config._experts_implementation = "batched_mm"
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert experts(x, index, scores).dtype == x.dtype
        seen = []
        handle = experts.act_fn.register_forward_pre_hook(
            lambda module, args: seen.append((args[0].dtype, experts.gate_up_proj.dtype))
        )
        experts(x, index, scores)
        handle.remove()
    assert seen == [(torch.bfloat16, torch.bfloat16)]
    assert isinstance(experts.gate_up_proj, SplitWeight)


@pytest.mark.parametrize(
    ("options", "bound"), [({}, 7.1), ({"opt_level": "O3"}, 6.1), (RELEASE, 5.1)]
)
def test_bytes_of_trained_experts(options, bound):
    experts, config = _experts(hidden_size=256, moe_intermediate_size=128), FP8Config(**options)
    optimizer, report = adamw(experts, config, lr=1e-3)
    assert report.num_split == 2
    expected = expected_memory(experts, [optimizer]).bytes_per_param
    _, index, scores = _batch(64)
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            y = experts(torch.randn(64, 256), index, scores)
        y.float().square().sum().backward()
        held = memory_report(experts, optimizer).bytes_per_param
        optimizer.step()
    assert held <= bound
    assert held == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_training_experts_with_eight_bit_states_follows_stock(level):
    def losses(config):
        torch.manual_seed(0)
        experts, (x, index, scores) = _experts(), _batch(24, E - 1)
        target = torch.randn(24, H)
        optimizer = torch.optim.AdamW(experts.parameters(), lr=3e-3, weight_decay=0.0)
        before = experts.down_proj[E - 1].detach().clone()
        if config is not None:
            convert_to_float8(experts, config)
            convert_optimizer(optimizer, config, model=experts)
        values = []
        for _ in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = (experts(x, index, scores) - target).square().mean()
            loss.backward()
            optimizer.step()
            values.append(loss.item())
        unused = experts.down_proj[E - 1].detach()
        assert (unused - before).abs().max() <= before.abs().max() * 2**-16  # a split's rounding
        return values

    want, got = losses(None), losses(FP8Config(opt_level=level))
    assert got[-1] < got[0]
    assert got == pytest.approx(want, rel=0.02)


@pytest.mark.parametrize("implementation", ["deepgemm", "deepgemm_megamoe"])
def test_an_implementation_without_backward_is_refused(implementation):
    experts = _experts(_experts_implementation=implementation)
    with pytest.raises(ValueError, match="has no backward"):
        convert_to_float8(experts)


@pytest.mark.parametrize(
    ("changes", "options", "reason"),
    [
        ({"_experts_implementation": "sonicmoe"}, {}, "experts_implementation='sonicmoe' computes"),
        ({}, {"recipe": "mxfp8"}, "mxfp8"),
        ({}, {"skip": ("experts.down_proj",)}, "skip='experts.down_proj'"),
        ({}, {"overrides": {"experts": {"recipe": "bf16"}}}, "overrides={'experts': bf16}"),
    ],
)
def test_experts_that_stay_say_why(changes, options, reason):
    model = nn.ModuleDict({"experts": _experts(**changes), "linear": nn.Linear(64, 64)})
    report = convert_to_float8(model, FP8Config(**options))
    assert report.experts == ()
    assert {s.name for s in report.skipped} == {"experts.gate_up_proj", "experts.down_proj"}
    assert all(reason in s.reason for s in report.skipped), report.skipped


def test_eager_becomes_grouped_and_the_summary_says_so():
    experts, batch = _experts(_experts_implementation="eager"), _batch(20)
    want = experts(*batch)
    report = convert_to_float8(experts)
    assert "experts_implementation was 'eager' and is now 'grouped_mm'" in report.summary()
    assert sqnr_db(want, experts(*batch)) > FLOOR - 0.5
    revert(experts)
    assert experts.config._experts_implementation == "eager"
    assert torch.equal(experts(*batch), want)


def test_a_card_without_the_operator_leaves_experts(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    from tests.internals import expert_reason

    reason = expert_reason("", _experts(), FP8Config(), "tensorwise", torch.device("cuda"))
    assert "this card is sm_89" in reason


def test_transformers_is_not_needed(monkeypatch):
    monkeypatch.delitem(sys.modules, "transformers.integrations.moe", raising=False)
    assert experts_dispatch.functions() is None
