"""Payloads of weights that are kept between optimizer steps, and cannot be stale."""

import copy
import functools
import itertools
import pickle
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

import torch_fp8.ops.quantize
from tests.internals import PayloadCast, halves_module, split_parameter
from tests.moe_experts import H, batch, experts
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8

RECIPES = ["tensorwise", "rowwise", "blockwise", "mxfp8"]


def _model(cache=True, recipe="tensorwise", dtype=torch.float32, **options):
    """Layers whose weights keep payloads (``True``), amaxes (``False``), nothing (None).

    Args:
        dtype: the weights'; BF16 ones are plain Parameters.
    """
    torch.manual_seed(0)
    config = FP8Config(recipe=recipe, cache_weights=cache or False, **options)
    model = nn.Sequential(nn.Linear(128, 192), nn.GELU(), nn.Linear(192, 128)).to(dtype)
    convert_to_float8(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    convert_optimizer(optimizer, config, model=None if cache is None else model)
    if cache is None and dtype == torch.float32:
        for layer in (model[0], model[2]):
            split_parameter(layer.weight)
    return model, optimizer


def _backward(model, seed):
    x = torch.randn(8, 128, generator=torch.Generator().manual_seed(seed))
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x)
    output.float().square().mean().backward()
    return output


@pytest.fixture
def weight_reads(monkeypatch):
    shapes = []
    original = torch_fp8.ops.quantize.tensor_amax

    def counted(x):
        shapes.append(tuple(x.shape))
        return original(x)

    monkeypatch.setattr(torch_fp8.ops.quantize, "tensor_amax", counted)
    monkeypatch.setattr(halves_module, "tensor_amax", counted)
    return shapes


@pytest.mark.parametrize("recipe", RECIPES)
def test_training_is_the_same_with_and_without(recipe):
    models = [_model(cache, recipe) for cache in (None, False, True)]
    for step in range(6):
        for model, optimizer in models:
            _backward(model, 2 * step)
            _backward(model, 2 * step + 1)
            optimizer.step()
            optimizer.zero_grad()
    plain, *kept = [list(model.parameters()) for model, _ in models]
    for parameters in kept:
        for p, q in zip(plain, parameters, strict=True):
            assert torch.equal(p, q)


@pytest.mark.parametrize(
    ("cache", "compiled"), [(False, False), (False, True), (True, False), (True, True)]
)
def test_a_weight_is_never_read_for_its_amax_after_the_first_forward(weight_reads, cache, compiled):
    model, optimizer = _model(cache)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    weights = {(192, 128), (128, 192)}
    _backward(run, 0)
    assert weights <= set(weight_reads)
    for step in range(3):
        weight_reads.clear()
        for micro_batch in range(3):
            _backward(run, 3 * step + micro_batch)
        optimizer.step()
        assert not weights & set(weight_reads)
    weight_reads.clear()
    model[0].weight.data.mul_(2)
    _backward(run, 20)
    assert [shape for shape in weight_reads if shape in weights] == [(192, 128)]


@pytest.mark.parametrize("cache", [False, True])
def test_nothing_is_kept_of_a_plain_parameter(cache):
    said = pytest.warns(UserWarning, match="caches nothing") if cache else nullcontext()
    with said:
        model, optimizer = _model(cache, dtype=torch.bfloat16)
    for _ in range(2):
        _backward(model, 0)
        optimizer.step()
        assert [layer.fp8.payloads.tensors for layer in model[::2]] == [[], []]


def test_another_recipe_starts_afresh():
    model, _ = _model(True)
    _backward(model, 0)
    config = FP8Config(recipe="blockwise", cache_weights=True)
    convert_to_float8(model, config)
    fresh = _model(None, "blockwise")[0]
    assert torch.equal(_backward(model, 1), _backward(fresh, 1))


def test_a_weight_is_cast_once_per_optimizer_step_and_by_it(weight_casts):
    model, optimizer = _model()
    _backward(model, 0)
    assert weight_casts == [(192, 128), (128, 192)]
    for step in range(2):
        weight_casts.clear()
        optimizer.step()
        assert weight_casts == [(192, 128), (128, 192)]
        for micro_batch in range(3):
            _backward(model, 3 * step + micro_batch)
        assert len(weight_casts) == 2


@pytest.mark.parametrize("cache", [False, True])
def test_a_released_step_keeps_what_the_next_forward_needs(weight_casts, weight_reads, cache):
    model, optimizer = _model(cache, gradient_release=True)
    weights = [(192, 128), (128, 192)]
    for step in range(3):
        _backward(model, step)
        optimizer.step()
        if step:
            assert not {*weights} & {*weight_reads}
            assert not cache or sorted(weight_casts) == sorted(weights)
        weight_casts.clear()
        weight_reads.clear()


def _in_place(weight):
    with torch.no_grad():
        weight.mul_(2)


_COLLECTIVES = {
    "broadcast": lambda w: dist.broadcast(w, 0),
    "all_reduce": lambda w: dist.all_reduce(w),
    "scatter": lambda w: dist.scatter(w, [w.detach().clone()], 0),
    "all_gather": lambda w: dist.all_gather([w], w.detach().clone()),
    "broadcast of an alias": lambda w: dist.broadcast(w.detach(), 0),
}


@pytest.mark.parametrize("name", _COLLECTIVES)
def test_a_collective_into_a_weight_is_seen(name, single_process_group):
    model, _ = _model()
    weight = model[2].weight
    _backward(model, 0)
    version = weight.halves.version
    assert weight.halves.is_filled
    with torch.no_grad():
        _COLLECTIVES[name](weight)
    assert weight.halves.version != version
    assert not weight.halves.is_filled


def _weights_after_steps(recipe, cache, generate):
    """Generates before the first forward, between forward and step, and after a step."""
    model, optimizer = _model(cache, recipe)
    for step in range(3):
        generate(model)
        _backward(model, step)
        generate(model)
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


@functools.cache
def _weights_without_generation(recipe, cache):
    return _weights_after_steps(recipe, cache, lambda model: None)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("cache", [None, False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_generation_between_steps_changes_nothing(recipe, cache, evaluates, mode):
    def generate(model):
        model.train(not evaluates)
        with mode(), torch.autocast("cpu", torch.bfloat16):
            model(torch.ones(3, 128))  # other tokens
        model.train()

    weights = _weights_after_steps(recipe, cache, generate)
    for expected, got in zip(_weights_without_generation(recipe, cache), weights, strict=True):
        assert torch.equal(expected, got)


@pytest.mark.parametrize("kept", [False, True])
def test_a_write_between_forward_and_backward_is_seen(kept):
    gradients = []
    for cache in (None, kept):
        model, _ = _model(cache)
        x = torch.randn(8, 128, generator=torch.Generator().manual_seed(3), requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
        model[2].weight.data.mul_(2)
        output.float().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_has_a_cache_of_its_own(copied, cache):
    model, optimizer = _model(cache)
    _backward(model, 0)
    twin, other = copied((model, optimizer))
    twin[0].weight.data.mul_(2)
    assert not torch.equal(_backward(model, 1), _backward(twin, 1))
    other.step()
    _backward(twin, 2)


def _shared(model):
    if not model[0].weight.is_shared():
        model[0].weight.share_memory_()
    model[0].weight.halves.high[3, 4] += 9  # another process


_WRITES = {
    "nothing": lambda model: None,
    "in place": lambda model: _in_place(model[0].weight),
    "alias": lambda model: model[0].weight.data.mul_(2),
    "data": lambda model: setattr(model[0].weight, "data", 3 * model[0].weight.data),
    "loaded": lambda model: model.load_state_dict(
        {k: 2 * v for k, v in model.state_dict().items()}
    ),
    "another process": _shared,
    "moved": lambda model: model.to("cpu"),
}


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("write", _WRITES)
def test_compiled_layers_train_as_eager_ones(cache, write):
    """Whoever writes a weight; a graph takes its amax, or its payload, as an input."""
    compiled, reference = _model(cache), _model(None)
    for _, optimizer in (compiled, reference):
        optimizer.param_groups[0]["weight_decay"] = 50  # amaxes fall
    run = torch.compile(compiled[0], fullgraph=True, backend="aot_eager")
    for step in range(3):
        outputs = [_backward(run, step), _backward(reference[0], step)]
        assert torch.equal(*outputs)
        for model, optimizer in (compiled, reference):
            if step:
                optimizer.step()
                optimizer.zero_grad()
            _WRITES[write](model)
    assert all(map(torch.equal, compiled[0].parameters(), reference[0].parameters()))


def test_what_cannot_be_kept_is_refused():
    with pytest.raises(
        ValueError, match="'both' is unknown; the valid choices are 'auto', True, F"
    ):
        FP8Config(cache_weights="both")
    with pytest.raises(ValueError, match="excludes cache_weights"):
        FP8Config(opt_level="O1", cache_weights=True)
    optimizer = torch.optim.AdamW(nn.Linear(64, 64).parameters())
    with pytest.raises(ValueError, match="needs the model"):
        convert_optimizer(optimizer, FP8Config(cache_weights=True))


@pytest.mark.parametrize("cache", [True, False])
def test_a_checkpoint_that_repeats_a_forward_only_reads_the_weight(cache):
    model, optimizer = _model(cache)
    _backward(model, 0)
    optimizer.step()
    kept = []
    for seed in (1, 2):
        x = torch.randn(8, 128, generator=torch.Generator().manual_seed(seed))
        with torch.autocast("cpu", torch.bfloat16):
            output = checkpoint(model, x, use_reentrant=False)
        output.float().square().mean().backward()
        kept.append([t.data_ptr() for p in model.parameters() if p.ndim > 1 for t in p.halves.kept])
    assert kept[0] == kept[1]


class Counted:
    def __init__(self):
        self.graphs, self.operators = 0, Counter()

    def __call__(self, module, inputs):
        self.graphs += 1
        compilers = {"fw_compiler": self._compiler, "bw_compiler": self._compiler}
        return aot_autograd(**compilers)(module, inputs)

    def _compiler(self, module, inputs):
        nodes = [n for n in module.graph.nodes if getattr(n.target, "namespace", "") == "torch_fp8"]
        self.operators.update(n.target._schema.name.partition("::")[2] for n in nodes)
        return make_boxed_func(module.forward)


@pytest.mark.parametrize(("recipe", "casts"), [("tensorwise", 4), ("blockwise", 4), ("rowwise", 5)])
def test_a_graph_takes_the_payload_and_is_compiled_once(weight_casts, recipe, casts):
    """Casts of inputs and gradients are left, and where scales differ that of the second weight in
    backward, which the first needs not.
    """
    model, optimizer = _model(recipe=recipe)
    backend = Counted()
    run = torch.compile(model, fullgraph=True, backend=backend)
    weights = [(192, 128), (128, 192)]
    _backward(run, 0)
    assert weight_casts[:2] == weights  # before the first step
    for step in range(3):
        weight_casts.clear()
        optimizer.step()
        assert weight_casts == weights
        for micro_batch in range(3):
            _backward(run, 3 * step + micro_batch)
        assert weight_casts == weights
    assert backend.graphs == 1
    quantized = sum(n for name, n in backend.operators.items() if name.startswith("quantize_2d"))
    assert quantized == casts
    assert backend.operators["transposed_bytes"] == (recipe != "rowwise")


@pytest.mark.parametrize("bias", [False, True])
def test_a_graph_transposes_a_payload_in_backward(bias):
    """In the launch that casts the gradient, unless that sums its rows."""
    model, _ = _model()
    reference = copy.deepcopy(model)
    operators = []

    def counted(module, inputs):
        operators.append(
            {
                str(node.target).split(".")[1]
                for node in module.graph.nodes
                if "." in str(node.target)
            }
        )
        return make_boxed_func(module.forward)

    for layer in (*model[::2], *reference[::2]) if not bias else ():
        layer.bias = None
    partition = {"partition_fn": min_cut_rematerialization_partition}
    backend = aot_autograd(fw_compiler=counted, bw_compiler=counted, **partition)
    outputs = [_backward(torch.compile(model, backend=backend), 0), _backward(reference, 0)]
    assert torch.equal(*outputs)
    for compiled, eager in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(compiled.grad, eager.grad)
    one, two = {"quantize_2d_beside"}, {"quantize_2d_sum", "transposed_bytes"}
    assert not operators[0] & (one | two)
    assert operators[1] & (one | two) == (two if bias else one)


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = experts("plain")

    def forward(self, x):
        _, index, scores = batch(len(x))
        return self.experts(x, index, scores)


@pytest.mark.parametrize(
    ("kind", "recipe"), [*itertools.product(["linear", "conv1d"], RECIPES), ("experts", "rowwise")]
)
def test_no_graph_keeps_a_cast_of_a_weight_for_backward(kind, recipe):
    """Its bytes would live from forward to backward, in each layer."""
    sizes = [(256, 384), (384, 256), (256, 384)]
    layers = [nn.Linear(*size, bias=False) for size in sizes]
    if kind == "conv1d":
        layers = [Conv1D(*size[::-1]) for size in sizes]
    elif kind == "experts":
        layers = [Routed() for _ in range(2)]
    model, config = nn.Sequential(*layers), FP8Config(recipe=recipe, cache_weights=False)
    convert_to_float8(model, config)
    convert_optimizer(torch.optim.AdamW(model.parameters()), config, model=model)
    sizes = {p.numel() for p in model.parameters() if p.ndim > 1}
    kept = []

    def forward(module, inputs):
        (outputs,) = module.graph.find_nodes(op="output")
        values = [x.meta["val"] for x in outputs.args[0] if isinstance(x, torch.fx.Node)]
        kept.extend(x.numel() for x in values if torch.is_tensor(x) and x.dtype.itemsize == 1)
        return make_boxed_func(module.forward)

    backend = aot_autograd(fw_compiler=forward, partition_fn=min_cut_rematerialization_partition)
    x = torch.randn(16, H if kind == "experts" else 256)
    with torch.autocast("cpu", torch.bfloat16):
        torch.compile(model, backend=backend)(x).float().sum().backward()
    assert kept
    assert not sizes & set(kept)


def test_a_graph_reads_the_payload_of_a_transposed_weight_as_it_is():
    model, config = nn.Sequential(Conv1D(128, 64), Conv1D(64, 128)), FP8Config(cache_weights=True)
    for layer in model:
        layer.bias.requires_grad_(False)
    convert_to_float8(model, config)
    convert_optimizer(torch.optim.AdamW(model.parameters()), config, model=model)
    reference = copy.deepcopy(model)
    assert all(layer.weight.halves.payload is not None for layer in model)
    x = torch.randn(16, 64)
    for run in (torch.compile(model, fullgraph=True, backend="aot_eager"), reference):
        with torch.autocast("cpu", torch.bfloat16):
            run(x).float().square().sum().backward()
    for layer, eager in zip(model, reference, strict=True):
        assert torch.equal(layer.weight.grad, eager.weight.grad)


def _tensors(model):
    halves = [p.halves for p in model.parameters() if p.ndim > 1]
    return [t.data_ptr() for h in halves for t in h.payload[:2]]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("write", ["in place", "alias", "loaded", "step"])
def test_a_payload_stays_where_a_cuda_graph_reads_it(recipe, write):
    model, optimizer = _model(recipe=recipe)
    before = _tensors(model)
    _backward(model, 0)
    optimizer.step() if write == "step" else _WRITES[write](model)
    _backward(model, 1)
    assert _tensors(model) == before
    payload = model[0].weight.halves.current_payload(model[0].weight.halves.cast)
    expected = PayloadCast(model[0].fp8.recipe.weight)(model[0].weight.halves)
    assert all(map(torch.equal, map(_bytes, payload[:2]), map(_bytes, expected[:2])))


def _bytes(x):
    return x.contiguous().view(torch.uint8) if x.ndim else x


def test_a_step_that_the_scaler_skips_keeps_the_payload(weight_casts):
    model, optimizer = _model()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(_backward(model, 0).float().sum())
    payload = [t.clone() for t in map(_bytes, model[0].weight.halves.payload[:2])]
    weight_casts.clear()
    model[0].weight.grad.fill_(float("nan"))
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    _backward(model, 1)
    assert weight_casts == []
    assert all(map(torch.equal, payload, map(_bytes, model[0].weight.halves.payload[:2])))


def test_two_layers_with_one_weight_share_its_payload():
    first, second, third = (nn.Linear(64, 64, bias=False) for _ in range(3))
    second.weight = third.weight = first.weight
    model = nn.Sequential(first, second, third)
    config = FP8Config(
        recipe="tensorwise", cache_weights=True, overrides={"2": {"recipe": "blockwise"}}
    )
    convert_to_float8(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    assert convert_optimizer(optimizer, config, model=model).num_cached == 1
    plain = copy.deepcopy(model)
    plain[0].weight.halves.keep_payload(None)
    x = torch.randn(8, 64)
    for net in (model, plain):
        net(x).square().sum().backward()
    assert torch.equal(model[0].weight.grad, plain[0].weight.grad)
