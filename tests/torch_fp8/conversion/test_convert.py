import copy
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, fully_shard

import torch_fp8
from torch_fp8 import (
    Float8Linear,
    FP8Config,
    convert_optimizer,
    convert_to_float8,
    memory_report,
    revert,
)
from torch_fp8.autograd.function import of_text
from torch_fp8.distributed import links
from torch_fp8.nn.layer_filter import matches


class Model(nn.Module):
    """An embedding tied to lm_head, two blocks, odd sizes."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(48, 32)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(32, 64), "down": nn.Linear(64, 32)}) for _ in range(2)
        )
        self.lm_head = nn.Linear(32, 48, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer["down"](layer["up"](x).relu())
        return self.lm_head(x)


LINEARS = ("layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down")


def test_converts_in_place_with_the_same_parameters():
    model = Model()
    model.layers[0]["up"].weight.requires_grad_(False)
    before = dict(model.named_parameters())
    keys = list(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters())
    report = convert_to_float8(model, FP8Config(recipe="delayed"))
    assert report.converted == LINEARS
    assert report.skipped == (("lm_head", "skip='lm_head'"),)
    after = dict(model.named_parameters())
    assert all(before[name] is after[name] for name in before)
    assert list(model.state_dict()) == keys
    assert model.lm_head.weight is model.embed.weight
    assert not model.layers[0]["up"].weight.requires_grad
    model(torch.arange(48).view(2, 24)).logsumexp(-1).sum().backward()
    old = model.layers[1]["up"].weight.clone()
    optimizer.step()
    assert not torch.equal(old, model.layers[1]["up"].weight)


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


@pytest.mark.parametrize(
    ("thing", "how"),
    [
        (torch.optim.SGD(nn.Linear(2, 2).parameters()), r"got SGD; torch_fp8.convert_optimizer"),
        (Model, "got type; pass an instance of the class"),
        ({"weight": torch.zeros(2)}, "got dict; pass the model"),
    ],
    ids=["optimizer", "class", "state dict"],
)
def test_what_is_no_model_is_told(thing, how):
    for convert in (convert_to_float8, torch_fp8.conversion_report):
        with pytest.raises(TypeError, match=how):
            convert(thing)


def test_a_recipe_is_given_by_name():
    assert convert_to_float8(Model(), "rowwise").recipe.name == "rowwise"


def test_converting_twice_changes_nothing():
    model = Model()
    config = FP8Config(recipe="delayed", amax_history_len=4)
    first = convert_to_float8(model, config)
    model(torch.arange(48).view(2, 24))
    history = model.layers[0]["up"].fp8_amax_history
    second = convert_to_float8(model, config)
    assert (first.converted, first.skipped) == (second.converted, second.skipped)
    assert model.layers[0]["up"].fp8_amax_history is history


def test_another_config_replaces_the_first():
    model = Model()
    convert_to_float8(model, FP8Config(recipe="delayed"))
    report = convert_to_float8(model, FP8Config(recipe="rowwise", skip=("lm_head", "layers.0")))
    assert report.converted == LINEARS[2:]
    assert type(model.layers[0]["up"]) is nn.Linear
    assert model.layers[1]["up"].fp8.recipe.name == "rowwise"
    assert not dict(model.named_buffers())


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_revert_leaves_stock_modules(recipe):
    model, stock = Model(), Model()
    stock.load_state_dict(model.state_dict())
    convert_to_float8(model, FP8Config(recipe=recipe))
    assert revert(model) == 4
    assert revert(model) == 0
    for ours, theirs in zip(model.modules(), stock.modules(), strict=True):
        assert type(ours) is type(theirs)
        assert ours.__dict__.keys() == theirs.__dict__.keys()
    tokens = torch.arange(48).view(2, 24)
    assert torch.equal(model(tokens), stock(tokens))


def test_revert_leaves_plain_gradients():
    """At O3 too, whose hooks quantize them; the optimizer goes on, and both are converted again."""
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))
    twin = copy.deepcopy(model)
    config = FP8Config(opt_level="O3")
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (model, twin)]
    x = torch.randn(8, 64)

    def step(model, optimizer):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for each, optimizer in zip((model, twin), optimizers, strict=True):
        convert_to_float8(each, config)
        convert_optimizer(optimizer, config, model=each)
        step(each, optimizer)
    model(x).square().mean().backward()
    assert {type(p.grad) for p in model.parameters()} > {torch.Tensor}
    revert(model)
    for _ in range(2):
        assert {type(p.grad) for p in model.parameters()} == {torch.Tensor}
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
        model.zero_grad()
        optimizers[0].step()
        model(x).square().mean().backward()
    model.zero_grad()
    convert_to_float8(model, config)
    convert_optimizer(optimizers[0], config, model=model)
    for each, optimizer in zip((model, twin), optimizers, strict=True):
        step(each, optimizer)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.detach().clone(), theirs.detach().clone())


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_graph_from_before_revert_delivers_its_gradients(level):
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))
    convert_to_float8(model)
    twin = copy.deepcopy(model)
    for each, chosen in ((model, level), (twin, "O2")):
        optimizer = torch.optim.AdamW(each.parameters())
        convert_optimizer(optimizer, FP8Config(opt_level=chosen), model=each)
    x = torch.randn(8, 64)
    losses = [each(x).square().mean() for each in (model, twin)]
    revert(model)
    for loss in losses:
        loss.backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert (type(ours.grad), ours.grad.dtype) == (torch.Tensor, torch.float32)
        assert torch.equal(ours.grad, theirs.grad.clone())


def test_a_bare_linear_is_converted_itself():
    linear = nn.Linear(32, 32)
    report = convert_to_float8(linear)
    assert type(linear) is Float8Linear
    assert report.converted == ("",)


def test_tied_linears_stay_tied():
    a = nn.Linear(32, 32)
    b = nn.Linear(32, 32)
    b.weight = a.weight
    shared = nn.Sequential(a, b, a)
    report = convert_to_float8(shared)
    assert report.converted == ("0", "1")
    assert shared[0] is shared[2]
    assert shared[0].weight is shared[1].weight


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


class _Adapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.base_layer = nn.Linear(32, 32)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(32, 16, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(16, 32, bias=False)})


class _Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.top_k = 2
        self.gate_up_proj = nn.Parameter(torch.randn(8, 32, 64))


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
        (_Adapter(), {"lora_A.default": "adapter", "lora_B.default": "adapter"}),
        (_Experts(), {"gate_up_proj": "fused expert weights in an unsupported layout"}),
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


def test_config_comes_from_the_environment_unless_given(monkeypatch):
    monkeypatch.setenv("TORCH_FP8_CONFIG", '{"recipe": "rowwise"}')
    assert convert_to_float8(Model()).recipe.name == "rowwise"
    assert convert_to_float8(Model(), FP8Config()).recipe.name == "tensorwise"


def test_auto_says_what_it_resolved_to():
    report = convert_to_float8(Model())
    assert report.recipe.name == "tensorwise"
    assert "auto -> tensorwise" in report.summary()
    assert "emulation on CPU" in report.summary()
    assert "ranks" not in report.summary()
    assert "  ranks     as asked" in report.summary(communication="as asked").splitlines()


@pytest.mark.parametrize(
    ("recipe", "emulate", "emulated"),
    [("tensorwise", False, False), ("tensorwise", True, False), ("mxfp8", True, True)],
    ids=str,
)
def test_emulation_is_decided_at_conversion(monkeypatch, recipe, emulate, emulated):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H100")
    monkeypatch.setattr("torch_fp8.conversion.convert.check_driver", lambda device: None)
    model = Model()
    config = FP8Config(recipe=recipe, emulate=emulate)
    report = convert_to_float8(model, config, device="cuda:0")
    assert report.emulated is emulated
    assert model.layers[0]["up"].fp8.emulate is emulated
    backend = "emulation" if emulated else "torch scaled_mm"
    assert f"{backend} on NVIDIA H100 (sm_90)" in report.summary()
    assert convert_to_float8(Model()).emulated


def test_a_second_conversion_decides_on_emulation_anew_for_graphs_too(monkeypatch):
    model, config = Model(), FP8Config(recipe="rowwise", emulate=True)
    for native in (False, True):
        monkeypatch.setattr("torch_fp8.conversion.convert.runs_natively", lambda *_, n=native: n)
        convert_to_float8(model, config)
        fp8 = model.layers[0]["up"].fp8
        assert fp8.emulate is not native
        assert of_text(fp8.casts) == (fp8.recipe, False, not native)


def test_an_old_card_is_refused_before_anything_changes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA A100")
    model = Model()
    with pytest.raises(ValueError, match="A100"):
        convert_to_float8(model, device="cuda:0")
    assert not any(isinstance(m, Float8Linear) for m in model.modules())


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
    model.experts = _Experts()  # 2 of 8 experts a token
    experts = 3 * 8 * 32 * 64 * 2 / 8
    assert convert_to_float8(model).flops_share == pytest.approx(5 * size / (total + experts))


def test_summary_groups_what_was_skipped():
    model = Model()
    model.adapters = nn.ModuleList(_Adapter() for _ in range(4))
    text = convert_to_float8(model).summary(model, [torch.optim.AdamW(model.parameters())])
    assert "FP8: 8 of 9 linear layers" in text  # those of the adapters are no layers left out
    assert "  adapters  8 linear layers of LoRA or another adapter, in high precision" in text
    assert ": adapter" not in text
    assert "16.00 bytes per parameter, before and after" in text
    assert " MiB" in text


def test_summary_says_what_fused_experts_mean():
    model = nn.ModuleList([nn.Linear(32, 64, bias=False), _Experts()])
    report = convert_to_float8(model)
    # One layer of 2,048 weights; of 8 experts with as many, 2 a token.
    assert report.flops_share == pytest.approx(1 / 3)
    text = report.summary()
    assert "  experts   66.7 % of the matmul FLOPs are in fused experts" in text
    assert "all GEMMs together are only 1.20 times as fast" in text
    assert "experts" not in convert_to_float8(Model()).summary()


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


def test_summary_says_that_the_optimizer_is_not_converted_and_how():
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    report = convert_to_float8(model)
    text = report.summary(model)
    assert "  optimizer not converted" in text
    assert "torch_fp8.convert_optimizer(optimizer, config, model=model)" in text
    assert text.endswith("; the states are unknown and not counted")
    states = torch_fp8.convert_optimizer(optimizer, model=model)
    text = report.summary(model, [optimizer], [states])
    assert "not converted" not in text
    assert "not counted" not in text
    assert text.endswith(" MiB, 0.3 MiB before")
    report = convert_to_float8(model, FP8Config(opt_level="O1"))
    assert "not converted" not in report.summary(model)


def test_checkpoints_are_plain_and_open_both_ways(tmp_path):
    fp8, stock = Model(), Model()
    convert_to_float8(fp8, FP8Config(recipe="delayed"))
    fp8(torch.arange(48).view(2, 24)).sum().backward()
    torch.save(fp8.state_dict(), tmp_path / "fp8.pt")
    loaded = torch.load(tmp_path / "fp8.pt", weights_only=True)
    assert {type(t) for t in loaded.values()} == {torch.Tensor}
    stock.load_state_dict(loaded, strict=True)
    fp8.load_state_dict(Model().state_dict(), strict=True)
    fp8.load_state_dict(Model().state_dict(), strict=True, assign=True)
    fp8(torch.arange(48).view(2, 24)).sum().backward()


def test_scaling_state_resumes_exactly():
    config = FP8Config(recipe="delayed", amax_history_len=8)
    torch.manual_seed(1)
    model = Model()
    batches = [torch.randint(48, (2, 24)) for _ in range(6)]

    def train(model, batches):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for tokens in batches:
            optimizer.zero_grad()
            model(tokens).logsumexp(-1).mean().backward()
            optimizer.step()
        return model

    convert_to_float8(model, config)
    whole = train(copy.deepcopy(model), batches)
    half = train(model, batches[:3])
    weights, scaling = half.state_dict(), torch_fp8.scaling_state_dict(half)
    assert all(type(t) is torch.Tensor and t.dtype == torch.float32 for t in scaling.values())
    resumed = Model()
    convert_to_float8(resumed, config)
    resumed.load_state_dict(weights)
    torch_fp8.load_scaling_state_dict(resumed, scaling)
    train(resumed, batches[3:])
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    histories = [model.layers[0]["up"].fp8_amax_history for model in (whole, resumed)]
    assert torch.equal(*histories)


def test_scaling_state_does_not_depend_on_wrappers_around_a_module():
    def made(wrap):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32)) for _ in range(3)))
        if wrap:
            model[0] = torch.compile(model[0], backend="eager")
            model[1][0] = checkpoint_wrapper(torch.compile(model[1][0], backend="eager"))
        convert_to_float8(model, FP8Config(recipe="delayed"))
        return model

    plain, wrapped = made(wrap=False), made(wrap=True)
    plain(torch.randn(16, 32)).sum().backward()
    state = torch_fp8.scaling_state_dict(plain)
    torch_fp8.load_scaling_state_dict(wrapped, state)
    again = torch_fp8.scaling_state_dict(wrapped)
    assert all(torch.equal(value, again[key]) for key, value in state.items())
    assert again.keys() == state.keys()
    of_names = {key.replace("0.0.", "0._orig_mod.0."): value for key, value in state.items()}
    torch_fp8.load_scaling_state_dict(plain, of_names)  # as they were written before


def test_scaling_state_of_another_model_is_refused_whole():
    model = Model()
    convert_to_float8(model, FP8Config(recipe="delayed", amax_history_len=8))
    model(torch.arange(48).view(2, 24))
    state = torch_fp8.scaling_state_dict(model)
    fresh = Model()
    convert_to_float8(fresh, FP8Config(recipe="delayed", amax_history_len=8))
    state[links.STATE_KEY] = torch.ones(len(links.KINDS), dtype=torch.uint8)
    wrong = {**state, "layers.1.down.amax_history": torch.zeros(3, 9)}
    with pytest.raises(ValueError, match=r"layers\.1\.down\.amax_history.*amax_history_len"):
        torch_fp8.load_scaling_state_dict(fresh, wrong)
    missing = dict(list(state.items())[1:])
    with pytest.raises(ValueError, match="in the model, not in the state"):
        torch_fp8.load_scaling_state_dict(fresh, missing)
    assert (fresh.layers[0]["up"].fp8_amax_history == 0).all()
    assert fresh not in links._saved
    torch_fp8.load_scaling_state_dict(fresh, {})
    other = Model()
    convert_to_float8(other)
    assert torch_fp8.scaling_state_dict(other) == {}
    torch_fp8.load_scaling_state_dict(other, state)


@pytest.fixture
def one_process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize("order", ["shard-first", "convert-first"])
def test_fsdp2_modules_are_converted_and_reverted(order):
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    twin = copy.deepcopy(model)
    convert_to_float8(twin)

    def shard():
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

    if order == "shard-first":
        shard()
        parameters = list(model.parameters())
        assert convert_to_float8(model).converted == ("0", "1")
        assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    else:
        convert_to_float8(model)
        shard()
    assert isinstance(model[0], Float8Linear)
    assert isinstance(model[0], FSDPModule)
    x = torch.randn(8, 32)
    y = model(x)
    assert torch.equal(y, twin(x))
    y.sum().backward()
    twin(x).sum().backward()
    assert torch.equal(model[0].weight.grad.full_tensor(), twin[0].weight.grad)
    assert convert_to_float8(model).converted == ("0", "1")
    assert revert(model) == 2
    assert not isinstance(model[0], Float8Linear)
    assert isinstance(model[0], FSDPModule)
    model(x)


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


@pytest.mark.parametrize(
    ("features", "said"),
    [
        (64, "optimizer AdamW with 8-bit states"),
        (
            32,
            "optimizer AdamW with unchanged states: each of its parameters has fewer than 4,096",
        ),
    ],
)
def test_the_summary_says_of_states_what_its_bytes_say(features, said):
    model = nn.Sequential(nn.Linear(features, features), nn.Linear(features, features))
    report = convert_to_float8(model)
    optimizer = torch.optim.AdamW(model.parameters())
    summary = report.summary(model, [optimizer], [convert_optimizer(optimizer, model=model)])
    assert said in summary
    assert ("before and after" in summary) == (features == 32)


def test_one_of_a_kind_is_singular():
    report = convert_to_float8(nn.Sequential(nn.RMSNorm(64, eps=1e-6), nn.Linear(64, 64)))
    assert "1 of 1 linear layer, " in report.summary()
    assert "1 norm or gated MLP with" in report.summary()
