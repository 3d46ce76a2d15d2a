"""The warnings about layers that code bypasses, or that other modules replace."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import torch_fp8
from tests.internals import current_pass
from tests.steps import adamw
from torch_fp8 import FP8Config
from torch_fp8.distributed import connect_fsdp

PASSED_BY = "but the layer was never called"


@pytest.fixture(autouse=True)
def _no_graph_so_far():
    current_pass._noted.cache_clear()


class Model(nn.Module):
    def __init__(self, first=lambda layer, x: layer(x)):
        super().__init__()
        self.a, self.b, self.first = nn.Linear(64, 128), nn.Linear(128, 64), first

    def forward(self, x):
        return self.b(F.gelu(self.first(self.a, x)))


def converted(model, level="O2", **options):
    torch.manual_seed(0)
    optimizer, _ = adamw(model, FP8Config(recipe="tensorwise", opt_level=level, **options), lr=1e-3)
    return model, optimizer


def backward(model, x=None):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(8, 64) if x is None else x).float().square().mean()
    loss.backward()


def warnings_of(model, optimizer, steps=2, run=backward):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            run(model)
            optimizer.step()
            optimizer.zero_grad()
    return [str(w.message) for w in caught if PASSED_BY in str(w.message)]


@pytest.mark.parametrize(
    "first",
    [
        lambda layer, x: F.linear(x, layer.weight, layer.bias),
        lambda layer, x: x @ layer.weight.T,
        lambda layer, x: torch.addmm(layer.bias, x, layer.weight.t()),
        lambda layer, x: F.linear(x, layer.weight + layer.weight.detach().sign() * 1e-3),
    ],
    ids=["linear", "matmul", "addmm", "changed"],
)
@pytest.mark.parametrize(
    ("level", "options"),
    [("O1", {}), ("O2", {}), ("O3", {}), ("O3", {"gradient_release": True})],
    ids=["O1", "O2", "O3", "release"],
)
def test_a_layer_that_is_passed_by_is_named_once(first, level, options):
    told = warnings_of(*converted(Model(first), level, **options), steps=3)
    assert len(told) == 1
    assert "1 converted layer (a)" in told[0]
    assert "skip=('a',)" in told[0]


def test_any_optimizer_looks_where_its_closure_runs_the_backward():
    model, _ = converted(Model(lambda layer, x: x @ layer.weight.T), "O1")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def closure():
        optimizer.zero_grad()
        backward(model)

    optimizer.step(closure)
    with pytest.warns(UserWarning, match=PASSED_BY):
        optimizer.step(closure)


def _accumulated(model):
    for _ in range(3):
        backward(model)


def _in_high_precision(model):
    with torch_fp8.high_precision():
        backward(model)


def _in_evaluation(model):
    model.eval()
    backward(model)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("run", [backward, _accumulated, _in_high_precision, _in_evaluation])
def test_layers_that_are_called_are_not_named(run, level):
    model, optimizer = converted(Model(), level, eval_fp8=False)
    assert warnings_of(model, optimizer, run=run) == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_call_their_layers(reentrant):
    model = Model(lambda layer, x: checkpoint(layer, x, use_reentrant=reentrant))
    x = torch.randn(8, 64, requires_grad=True)
    assert warnings_of(*converted(model), run=lambda model: backward(model, x)) == []


def test_layers_without_gradients_are_not_named():
    model, optimizer = converted(Model(lambda layer, x: F.linear(x, layer.weight)))
    model.a.requires_grad_(False)
    assert warnings_of(model, optimizer) == []


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_layer_that_nobody_uses_is_not_named_for_its_ties_or_zeros(level):
    model = Model()
    model.tied, model.idle = nn.Linear(64, 128), nn.Linear(64, 64)
    model.tied.weight = model.a.weight
    model, optimizer = converted(model, level)
    model.idle.weight.grad = torch.zeros_like(model.idle.weight)
    assert warnings_of(model, optimizer) == []


@pytest.mark.filterwarnings("ignore:FP8")
def test_layers_in_a_graph_are_not_named():
    model, optimizer = converted(Model())
    compiled = torch.compile(model, backend="aot_eager")
    assert warnings_of(compiled, optimizer) == []


@pytest.mark.filterwarnings("ignore:FP8")
@pytest.mark.usefixtures("single_process_group")
def test_layers_in_a_graph_whose_weights_fsdp2_gathers_are_not_named():
    model, config = Model(), FP8Config(recipe="tensorwise", opt_level="O1")
    torch_fp8.convert_to_float8(model, config)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    connect_fsdp(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.compile(backend="eager")
    assert warnings_of(model, optimizer) == []


def test_states_made_of_zeros_do_not_end_the_search():
    model, optimizer = converted(Model(lambda layer, x: x @ layer.weight.T), "O1")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    assert len(warnings_of(model, optimizer)) == 1


@pytest.mark.usefixtures("rank_of_two")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_gradient_that_another_rank_has_made_is_no_sign(level):
    def others(model):
        backward(model)
        model.idle.weight.grad = torch.ones_like(model.idle.weight)

    model = Model()
    model.idle = nn.Linear(64, 64)
    assert warnings_of(*converted(model, level), steps=12, run=others) == []
    model = Model(lambda layer, x: F.linear(x, layer.weight, layer.bias))
    assert len(warnings_of(*converted(model, level), steps=12)) == 1


@pytest.mark.usefixtures("rank_of_two")
def test_a_weight_that_was_frozen_after_its_backward_is_no_sign():
    model, optimizer = converted(Model(lambda layer, x: F.linear(x, layer.weight, layer.bias)))
    backward(model)
    model.a.requires_grad_(False)
    assert warnings_of(model, optimizer) == []


REPLACED = "left FP8 after the conversion"


def torchaos_qat(model):
    torchao = pytest.importorskip("torchao.quantization")
    qat = pytest.importorskip("torchao.quantization.qat")
    granularity = torchao.granularity.PerGroup(32)
    base = torchao.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=granularity
    )
    torchao.quantize_(model, qat.QATConfig(base, step="prepare"))


def torchaos_float8(model):
    pytest.importorskip("torchao.float8").convert_to_float8_training(model)


def a_new_layer(model):
    model.b = nn.Linear(128, 64)


def a_new_block(model):
    model.a = nn.Sequential(nn.Linear(64, 128))


def none(model):
    pass


def no_layer(model):
    model.b = nn.Identity()


def an_adapter(model):
    peft = pytest.importorskip("peft")
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["a", "b"]), model)


def reverted(model):
    torch_fp8.revert(model)


def converted_again(model):
    model.b = nn.Linear(128, 64)
    torch_fp8.convert_to_float8(model, FP8Config(recipe="tensorwise"))


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(
    ("change", "number"),
    [
        (torchaos_qat, 2),
        (torchaos_float8, 2),
        (a_new_layer, 1),
        (a_new_block, 1),
        (none, 0),
        (no_layer, 0),
        (an_adapter, 0),
        (reverted, 0),
        (converted_again, 0),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_layer_that_another_module_replaced_is_reported_once(change, number, level):
    model, _ = converted(Model(), level)
    change(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            backward(model)
            optimizer.step()
    messages = [str(w.message) for w in caught if REPLACED in str(w.message)]
    assert len(messages) == (number > 0)
    assert all(f"FP8: {number} converted layer" in message for message in messages)
    if change is torchaos_qat:
        assert "torchao.quantization.qat" in messages[0]
