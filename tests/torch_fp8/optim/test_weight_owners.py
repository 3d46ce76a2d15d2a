import copy

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils import parametrizations

from tests.internals import HalfWeight, SplitWeight, stored, stored_grad
from tests.steps import adamw
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8, restore_weights, revert


def _converted(model, **options):
    config = FP8Config(**options)
    return adamw(model, config, lr=1e-3)


class Around(nn.Module):
    """An FP8 layer before and after a module of another kind, which runs as `call` says."""

    def __init__(self, inner, call=None):
        super().__init__()
        self.up, self.inner, self.down = nn.Linear(64, 64), inner, nn.Linear(64, 64)
        self.call = call or (lambda inner, x: inner(x))

    def forward(self, x):
        return self.down(self.call(self.inner, self.up(x)))


def _without_autocast(inner, x):
    with torch.autocast("cpu", enabled=False):
        return inner(x.float())


def _convolution(inner, x):
    return inner(x.t()[None])[0].t()


def _product(inner, x):
    with torch.autocast("cpu", enabled=False):
        return x.float() @ inner.weight


class Owner(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)


CASES = {
    "weight_norm": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Conv1d(64, 64, 3, padding=1), dim=2),
        lambda inner, x: _without_autocast(lambda y: _convolution(inner, y), x),
    ),
    "old weight_norm": (lambda: nn.utils.weight_norm(nn.Linear(64, 64)), _without_autocast),
    "spectral_norm": (
        lambda: parametrizations.spectral_norm(nn.Linear(64, 64)),
        _without_autocast,
    ),
    "old spectral_norm": (lambda: nn.utils.spectral_norm(nn.Linear(64, 64)), _without_autocast),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(64, 64)), None),
    "convolution": (lambda: nn.Conv1d(64, 64, 1), lambda inner, x: _without_autocast(
        lambda y: _convolution(inner, y), x)),
    "bilinear": (lambda: nn.Bilinear(64, 64, 64), lambda inner, x: _without_autocast(
        lambda y: inner(y, y), x)),
    "attention": (
        lambda: nn.MultiheadAttention(64, 4),
        lambda inner, x: _without_autocast(lambda y: inner(y, y, y)[0], x),
    ),
    "recurrent": (lambda: nn.GRU(64, 64), lambda inner, x: _without_autocast(
        lambda y: inner(y)[0], x)),
    "the user's own": (Owner, _product),
}  # fmt: skip


@pytest.mark.parametrize(("make", "call"), CASES.values(), ids=CASES)
def test_what_autocast_does_not_reach_trains_as_stock(make, call):
    model = Around(make(), call)
    inner = {name: p.dtype for name, p in model.inner.named_parameters()}
    before = [p.detach().clone() for p in model.inner.parameters()]
    optimizer, report = _converted(model, skip=("lm_head", "inner"))
    assert {name: p.dtype for name, p in model.inner.named_parameters()} == inner
    assert report.num_split == 2
    assert report.num_float32 >= 1
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(16, 64)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.isfinite()
    assert all(p.isfinite().all() for p in model.parameters())
    after = list(model.inner.parameters())
    assert not all(torch.equal(p, q) for p, q in zip(after, before, strict=True))


def test_the_same_holds_without_naming_them():
    for make, call in CASES.values():
        model = Around(make(), call)
        _converted(model)
        with torch.autocast("cpu", torch.bfloat16):
            assert model(torch.randn(16, 64)).isfinite().all()


@pytest.mark.parametrize("padding", [False, True])
def test_a_transformer_encoder_is_evaluated_on_its_fast_path(padding):
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.TransformerEncoder(layer, 2))
    stock = copy.deepcopy(model[1]).eval()
    _optimizer, report = _converted(model)
    assert "in nn.TransformerEncoderLayer, which reads them directly" in str(report)
    model.eval()
    mask = torch.zeros(2, 8, dtype=torch.bool)
    mask[:, 5:] = padding
    x = torch.randn(2, 8, 64)
    with torch.no_grad():
        output = model[1](x, src_key_padding_mask=mask)
        assert torch.equal(output, stock(x, src_key_padding_mask=mask))


class Heads(nn.Module):
    """A transformer's ends: an embedding and an output layer that works in float32."""

    def __init__(self):
        super().__init__()
        self.embed, self.hidden = nn.Embedding(256, 64), nn.Linear(64, 64)
        self.lm_head = nn.Linear(64, 256)

    def forward(self, ids, keyword=False):
        x = self.hidden(self.embed(ids))
        with torch.autocast("cpu", enabled=False):
            return self.lm_head(input=x.float()) if keyword else self.lm_head(x.float())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("keyword", [False, True])
def test_an_output_layer_outside_autocast_computes_in_float32(keyword, compiled):
    model = Heads()
    optimizer, report = _converted(model)
    assert (report.num_split, report.num_float32) == (3, 0)
    weight = model.lm_head.weight
    assert isinstance(weight, SplitWeight)
    x, whole = torch.ones(4, 64) / 3, weight.detach().clone()
    assert not torch.equal(whole, stored(weight).float())
    assert torch.equal(model.lm_head(x), F.linear(x, whole, model.lm_head.bias))
    # Dynamo of torch 2.11 cannot delete an attribute, and breaks the graph there.
    one = torch.__version__ >= torch.torch_version.TorchVersion("2.13")
    forward = torch.compile(model, backend="aot_eager", fullgraph=one) if compiled else model
    with torch.autocast("cpu", torch.bfloat16):
        logits = forward(torch.arange(8), keyword)
    assert logits.dtype == torch.float32
    logits.square().mean().backward()
    assert weight.grad.dtype == torch.float32
    assert weight.grad.abs().sum() > 0
    optimizer.step()
    assert model.lm_head.weight is weight
    assert not torch.equal(weight, whole)
    with pytest.raises(RuntimeError):
        model.lm_head(torch.ones(4, 63))
    assert model.lm_head.weight is weight


@pytest.mark.skipif(not HalfWeight.hides_in_graphs, reason="its gradient is float32 in the graph")
def test_an_output_layer_under_autocast_is_no_break_in_a_compiled_graph():
    model = nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 8))  # 8 is too few for FP8
    _converted(model)
    assert len(model[1]._forward_hooks) == 1
    x = torch.randn(4, 64)
    with torch.autocast("cpu", torch.bfloat16):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
        eager = model(x)
    assert torch.equal(compiled, eager)
    assert eager.dtype == torch.bfloat16
    gradients = []
    for output in (compiled, eager):
        output.float().square().mean().backward()
        gradients.append(stored_grad(model[1].weight).clone())
        assert gradients[-1].dtype == torch.bfloat16  # as the product that makes it
        model.zero_grad()
    assert torch.equal(*gradients)


def test_an_output_layer_under_autocast_multiplies_by_the_bf16_half():
    model = nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 8))
    _converted(model)
    head, x = model[1], torch.randn(4, 512)
    with torch.autocast("cpu", torch.bfloat16):
        output = head(x)
        assert torch.equal(output, F.linear(x, stored(head.weight).float(), head.bias))
    output.float().square().mean().backward()
    grad = head.weight.grad.clone()
    twin = nn.Linear(512, 8)
    twin.weight.data, twin.bias.data = stored(head.weight).float(), head.bias.data
    with torch.autocast("cpu", torch.bfloat16):
        twin(x).float().square().mean().backward()
    assert torch.equal(grad, twin.weight.grad)


def test_the_hooks_of_output_layers_go_with_the_split():
    model = Heads()
    optimizer, _ = _converted(model)
    restore_weights(optimizer)
    revert(model)
    assert not model.lm_head._forward_pre_hooks
    assert not model.lm_head._forward_hooks
    assert not model.lm_head._forward_pre_hooks_with_kwargs
    assert not model.lm_head._forward_hooks_always_called
    twin = copy.deepcopy(model)
    assert torch.equal(twin(torch.arange(8)), model(torch.arange(8)))


def test_an_fp8_layer_that_is_evaluated_in_float32_is():
    model = nn.Sequential(nn.Linear(64, 64))
    _converted(model, eval_fp8=False)
    x = torch.randn(4, 64, requires_grad=True)
    model(x).sum().backward()
    model.eval()
    assert torch.equal(model(x), F.linear(x, model[0].weight.float(), model[0].bias))


def _adapted(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 256))
    # lora_A of the first layer has 4,096 elements, its partner 2,048.
    return get_peft_model(model, LoraConfig(r=16, target_modules=["0"], **options))


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_keep_their_dtype_and_are_merged_outside_autocast(dora):
    model = _adapted(use_dora=dora, modules_to_save=["2"])
    trained = {n: p.dtype for n, p in model.named_parameters() if p.requires_grad}
    optimizer, report = _converted(model)
    assert {n: p.dtype for n, p in model.named_parameters() if p.requires_grad} == trained
    assert report.num_split == 0
    assert str(report) == ("AdamW with 8-bit states, 2 weights stay float32: of adapters")
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.randn(8, 256)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    x = torch.randn(4, 256)
    model.eval()
    before = model(x)
    model.merge_adapter()
    torch.testing.assert_close(model(x), before, rtol=0.05, atol=0.05)
    model.unmerge_adapter()
    model.merge_and_unload()


def test_what_skip_names_keeps_its_dtype_and_an_output_layer_does_not():
    model = Heads()
    _optimizer, report = _converted(model, skip=("lm_head", "embed"))
    assert type(model.embed.weight) is nn.Parameter
    assert model.embed.weight.dtype == torch.float32
    assert isinstance(model.lm_head.weight, SplitWeight)
    assert "1 weight stays float32: skip='embed'" in str(report)


def test_one_unknown_owner_is_enough():
    model = Heads()
    model.add_module("other", Owner())
    model.other.weight = model.embed.weight
    _optimizer, report = _converted(model)
    assert type(model.embed.weight) is nn.Parameter
    assert model.embed.weight.dtype == torch.float32
    assert report.why_float32 == "of Owner"


def test_without_the_model_weights_stay_float32_and_the_report_says_how_they_would_not():
    model = Heads()
    optimizer = torch.optim.AdamW(model.parameters())
    report = convert_optimizer(optimizer)
    assert {(type(p), p.dtype) for p in model.parameters()} == {(nn.Parameter, torch.float32)}
    assert (report.num_split, report.num_float32) == (0, 3)
    assert str(report) == (
        "AdamW with 8-bit states, 3 weights stay float32: not in a known module; call "
        "convert_optimizer(optimizer, config, model=model)"
    )
    assert convert_optimizer(optimizer, model=model).num_split == 3


def test_several_reasons_are_counted():
    model = nn.Sequential(nn.Linear(64, 64), nn.Conv2d(64, 64, 3), nn.Bilinear(64, 64, 8))
    model.append(nn.Conv2d(64, 64, 1))
    _optimizer, report = _converted(model)
    assert report.why_float32 == "2 of Conv2d; 1 of Bilinear"


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return x.float() @ self.inner.weight


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("wrap", [lambda m: m, nn.Sequential], ids=["root", "child"])
def test_a_weight_that_is_read_where_autocast_is_off_is_the_users(wrap, compiled):
    model = wrap(Reader())
    before = [p.detach().clone() for p in model.parameters()]
    optimizer, report = _converted(model)
    assert report.num_split == 1
    weight = next(model.parameters())
    torch.testing.assert_close(weight.detach(), before[0], rtol=2**-16, atol=0)
    stock = wrap(Reader())
    stock.load_state_dict(model.state_dict())
    whole = next(stock.parameters())
    forwards = [model, stock]
    if compiled:
        forwards = [torch.compile(m, backend="aot_eager", fullgraph=True) for m in forwards]
    x = torch.randn(2, 64)
    for autocast in (True, False):
        weight.grad = whole.grad = None
        for forward in forwards:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                output = forward(x)
            assert torch.equal(output, x @ whole)
            output.square().sum().backward()
        assert torch.equal(weight.grad, whole.grad)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as error:
        model(torch.randn(2, 63))
    assert "FP8Config" not in str(error.value)
    optimizer.step()
    assert not torch.equal(weight, whole)
    restore_weights(optimizer)
    revert(model)
    assert not any(m._forward_hooks or m._forward_hooks_always_called for m in model.modules())
    skipping = nn.Sequential(wrap(Reader()), nn.Linear(64, 64))
    _converted(skipping, skip=("inner",))
    skipping[0](torch.randn(2, 64))


def test_a_parameter_of_the_users_own_is_no_break_in_a_compiled_graph():
    model = Around(Owner(), lambda inner, x: x @ inner.weight)
    _converted(model)
    x = torch.randn(4, 64)
    with torch.autocast("cpu", torch.bfloat16):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
        torch.testing.assert_close(compiled, model(x))


def _as_data(model):
    model[1].weight.data = model[0].weight.data


def _as_rows(model):
    memory = torch.randn(96, 64)
    model[0].weight.data, model[1].weight.data = memory[:64], memory[32:]


def _as_buffer(model):
    model[1].register_buffer("weights", model[0].weight.data)


@pytest.mark.parametrize("share", [_as_data, _as_rows, _as_buffer])
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_weights_that_share_memory_go_on_sharing_it(share, cls, level):
    """Decoders are tied by ``decoder.weight.data = encoder.weight.data``, too."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    share(model)
    config = FP8Config(opt_level=level)
    convert_to_float8(model, config)
    optimizer = cls(model.parameters(), lr=1e-2)
    report = convert_optimizer(optimizer, config, model=model)
    num_shared = 1 if share is _as_buffer else 2
    assert report.num_split == 3 - num_shared
    assert report.num_float32 == num_shared
    assert report.why_float32 == "sharing memory with another parameter or buffer"
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    second = model[1].weights if share is _as_buffer else model[1].weight
    if share is _as_rows:
        assert torch.equal(model[0].weight[32:], second[:32])
    else:
        assert torch.equal(model[0].weight, second)


def test_weights_side_by_side_in_one_memory_are_split():
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    memory = torch.randn(128, 64)
    model[0].weight.data, model[1].weight.data = memory[:64], memory[64:]
    _, report = _converted(model)
    assert report.num_split == 2


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_a_weight_and_its_transpose_in_the_same_memory_are_both_stepped(optimizer_class):
    """A stock optimizer steps one after the other, so the memory moves by both updates."""
    moves = []
    for level in ("O1", "O2"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False))
        model[1].weight = nn.Parameter(model[0].weight.t())
        optimizer = optimizer_class(model.parameters(), lr=1e-3)
        config = FP8Config(opt_level=level, recipe="tensorwise")
        convert_to_float8(model, config)
        convert_optimizer(optimizer, config, model=model)
        before = model[0].weight.detach().clone()
        model(torch.randn(32, 64)).square().sum().backward()
        optimizer.step()
        assert torch.equal(model[0].weight, model[1].weight.t())
        moves.append(model[0].weight.detach() - before)
    assert (moves[1] - moves[0]).norm() < 0.05 * moves[0].norm()
