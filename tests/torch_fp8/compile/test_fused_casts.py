"""Compiled blocks, partitioned as inductor does: they compute what eager ones do, with the same."""

import collections
import copy
import functools

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3DecoderLayer

from tests.models import SIZES
from tests.saved_activations import count_saved
from tests.steps import renew_scales
from torch_fp8 import (
    Float8Linear,
    FP8Config,
    convert_to_float8,
    scaling_state_dict,
    selective_checkpoint_contexts,
)

pytestmark = pytest.mark.long


RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8")
LAYERS = {"llama": (LlamaConfig, LlamaDecoderLayer), "phi3": (Phi3Config, Phi3DecoderLayer)}
each_recipe = pytest.mark.parametrize(
    "recipe",
    [
        *("tensorwise", "delayed", "blockwise"),
        *(pytest.param(r, marks=pytest.mark.combination) for r in ("rowwise", "mxfp8")),
    ],
)
TOKENS = 256
GEMMS = ("scaled_mm", "mm")


class Block(nn.Module):
    def __init__(self, family="llama", **options):
        super().__init__()
        config_class, layer_class = LAYERS[family]
        sizes = SIZES | {"hidden_size": 128, "intermediate_size": 384, "pad_token_id": 0}
        config = config_class(**sizes)
        config._attn_implementation = "sdpa"
        torch.manual_seed(0)
        self.layer = layer_class(config, 0).bfloat16()
        self.angles = LlamaRotaryEmbedding(config)(
            torch.zeros(1, dtype=torch.bfloat16), torch.arange(TOKENS // 2)[None]
        )
        convert_to_float8(self, FP8Config(**options))
        _remember(self)

    def forward(self, x):
        return self.layer(x, position_embeddings=self.angles)


def _remember(model):
    """Delayed scaling's layers have each another past, which the next amaxes may exceed or not."""
    generator = torch.Generator().manual_seed(1)
    for layer in model.modules():
        if isinstance(layer, Float8Linear) and layer.fp8.recipe.delayed:
            history, last = layer.scaling_state
            history[:, 0] = torch.tensor([4.0, 0.1, 4.0]) * torch.rand(3, generator=generator)
            layer.load_scaling_state(history, last)


class Partitioned:
    def __init__(self, **options):
        self.graphs = []
        self.backend = aot_autograd(
            fw_compiler=self._keep,
            bw_compiler=self._keep,
            partition_fn=min_cut_rematerialization_partition,
            **options,
        )

    def _keep(self, graph, inputs):
        self.graphs.append(graph)
        return graph

    def compile(self, function):
        torch._dynamo.reset()
        return torch.compile(function, fullgraph=True, backend=self.backend)

    def operators(self):
        return [
            collections.Counter(
                name for node in graph.graph.nodes if (name := _called(node)) is not None
            )
            for graph in self.graphs
        ]


def _called(node):
    """A functional graph calls what writes to its arguments by another operator's first one."""
    by_another = node.target is torch.ops.higher_order.auto_functionalized_v2
    return _name(node.args[0] if by_another else node.target)


def _name(target):
    if not isinstance(target, torch._ops.OpOverload):
        return None
    name = target._schema.name.partition("::")[2]
    if name in GEMMS:
        return "gemm"
    return name if target.namespace == "torch_fp8" else None


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if _name(func) is not None:
            self.count[_name(func)] += 1
        return func(*args, **(kwargs or {}))


def _run(model, parameters, seed):
    x = torch.randn(2, TOKENS // 2, 128, generator=torch.Generator().manual_seed(seed))
    x = x.bfloat16().requires_grad_()
    for parameter in parameters:
        parameter.grad = None
    y = model(x)
    y.float().square().sum().backward()
    return [y, x.grad, *(p.grad for p in parameters)]


def _assert_equal(want, got):
    for a, b in zip(want, got, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("family", LAYERS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_compiled_block_gives_the_very_bytes_by_the_same_operators(recipe, family):
    block = Block(family, recipe=recipe)
    twin = copy.deepcopy(block)
    backend = Partitioned()
    compiled = backend.compile(twin)
    for step in range(3):
        with Operators() as eager:  # of the last step: norms know their readers by then
            want = _run(block, list(block.parameters()), step)
        _assert_equal(want, _run(compiled, list(twin.parameters()), step))
    _assert_equal(list(block.buffers()), list(twin.buffers()))
    # What is saved of gate and up rowwise comes with the product's cast, for checkpoints.
    less = collections.Counter(swiglu_save=recipe == "rowwise")
    assert sum(backend.operators(), less) == _as_in_a_graph(eager.count, recipe, family)


def _as_in_a_graph(count, recipe, family):
    """With a scale that is known beforehand, a graph for the CPU takes amaxes besides the casts."""
    count = collections.Counter(count)
    if recipe == "delayed":
        count.update(rms_norm=count["rms_norm_quantize_once"])
        if family == "llama":
            count.update(swiglu_backward=1)
        else:
            count.update(gate_up_backward_amax=1)
    return count


def _scaling(block):
    return list(scaling_state_dict(block).values())


def test_a_compiled_block_is_scaled_by_steps_as_an_eager_one():
    block = Block(recipe="delayed")
    for layer in block.modules():
        if isinstance(layer, Float8Linear):
            layer.reset_scaling()
    twin = copy.deepcopy(block)
    compiled = Partitioned(keep_inference_input_mutations=True).compile(twin)
    for step in range(4):
        for micro_batch in range(2):
            seed = 2 * step + micro_batch
            want = _run(block, list(block.parameters()), seed)
            _assert_equal(want, _run(compiled, list(twin.parameters()), seed))
        _assert_equal(_scaling(block), _scaling(twin))
        renew_scales(*block.parameters(), *twin.parameters())
        _assert_equal(_scaling(block), _scaling(twin))
        assert all(m.fp8.scales_known for m in twin.modules() if isinstance(m, Float8Linear))


@each_recipe
def test_a_compiled_block_keeps_for_backward_what_an_eager_one_keeps(recipe):
    block = Block(recipe=recipe)
    there = [*block.parameters(), *block.angles]
    x = torch.randn(2, TOKENS // 2, 128).bfloat16().requires_grad_()
    with count_saved(there) as saved:
        block(x)
    backend = Partitioned(keep_inference_input_mutations=True)
    backend.compile(block)(x)
    outputs = next(n for n in backend.graphs[0].graph.nodes if n.op == "output").args[0]
    kept = {n for n in outputs[1:] if n.op != "placeholder"}
    values = [n.meta["val"] for n in kept]
    total = sum(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor))
    assert total == pytest.approx(saved.total, rel=0.01)


@each_recipe
def test_a_selective_checkpoint_repeats_three_gemms(recipe):
    forward, backward = _checkpointed(recipe, context_fn=selective_checkpoint_contexts)
    products = 8 if recipe == "tensorwise" else 14  # blocks do not divide k and v
    assert (forward["gemm"], backward["gemm"]) == (7, products + 3)
    assert not any("swiglu" in name and "backward" not in name for name in backward)


def test_a_checkpoint_repeats_a_forward_with_the_scales_that_it_had():
    forward, backward = _checkpointed("delayed")
    assert (forward["gemm"], backward["gemm"]) == (7, 14 + 6)  # nobody wants the last one's result


def _checkpointed(recipe, **options):
    """The operators of a checkpointed block, which computes what it does without."""
    block = Block(recipe=recipe)
    twin = copy.deepcopy(block)
    backend = Partitioned()
    function = functools.partial(checkpoint, twin, use_reentrant=False, **options)
    got = _run(backend.compile(function), list(twin.parameters()), 0)
    _assert_equal(_run(block, list(block.parameters()), 0), got)
    _assert_equal(list(block.buffers()), list(twin.buffers()))
    return backend.operators()


def test_histories_survive_forwards_between_a_forward_and_its_backward():
    """Backward records the gradient's amax, and nothing else of what its forward has seen."""
    block = Block(recipe="delayed")
    twin = copy.deepcopy(block)
    for model in (block, Partitioned(keep_inference_input_mutations=True).compile(twin)):
        generator = torch.Generator().manual_seed(0)
        outputs = [
            model((i + 1) * torch.randn(1, TOKENS // 2, 128, generator=generator).bfloat16())
            for i in range(3)
        ]
        for i, y in enumerate(outputs):
            (y.float() * (i + 1)).square().sum().backward()
    _assert_equal(list(block.buffers()), list(twin.buffers()))


class Read(nn.Module):
    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.RMSNorm(64, eps=1e-5)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.how = how
        convert_to_float8(self, FP8Config(recipe="blockwise"))

    def forward(self, x):
        y = self.norm(x)
        return self.first(y) + self.second(self.how(y)) + y


@pytest.mark.parametrize(
    ("how", "fused"),
    [
        (lambda y: y, 2),
        (lambda y: y.view(4, 2, 64).view(8, 64), 2),
        (lambda y: y.t().contiguous().view(8, 64), 1),
        (lambda y: y.t().reshape(-1, 8).reshape(8, 64), 1),
        (lambda y: y * 2, 1),
        (lambda y: y.flip(0), 1),
    ],
)
def test_fused_is_what_the_norm_made_and_nothing_else(how, fused):
    model = Read(how)
    twin = copy.deepcopy(model)
    x = torch.randn(8, 64)
    backend = Partitioned()
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    results = []
    for function, leaf in zip((model, backend.compile(twin)), leaves, strict=True):
        y = function(leaf)
        y.square().sum().backward()
        results.append((y, leaf.grad))
    _assert_equal(*results)
    casts = [n for n in backend.graphs[0].graph.nodes if _name(n.target) == "quantize_2d"]
    assert len(casts) == 2 + (2 - fused)  # of the weights, and of what is not the norm's


class Readers(nn.Module):
    """A norm and two layers with delayed scaling; others may read before, or want less."""

    def __init__(self, reads_before, frozen):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.RMSNorm(64, eps=1e-5)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.first.weight.requires_grad_(not frozen)
        self.reads_before = reads_before
        convert_to_float8(self, FP8Config(recipe="delayed"))
        _remember(self)

    def forward(self, x):
        y = self.norm(x)
        other = y.tanh() if self.reads_before else y
        return self.first(y) + self.second(y) + other


@pytest.mark.parametrize(("reads_before", "frozen", "casts"), [(True, False, 1), (False, True, 2)])
def test_the_first_reader_decides_the_scale_for_all(reads_before, frozen, casts):
    model = Readers(reads_before, frozen)
    twin = copy.deepcopy(model)
    backend = Partitioned()
    compiled = backend.compile(twin)
    for step in range(2):
        leaves = [torch.full((8, 64), 1.0 + step).cumsum(1).requires_grad_() for _ in range(2)]
        results = []
        for function, leaf in zip((model, compiled), leaves, strict=True):
            y = function(leaf)
            y.square().sum().backward()
            results.append((y, leaf.grad))
        _assert_equal(*results)
    _assert_equal(list(model.buffers()), list(twin.buffers()))
    forward, _ = backend.operators()
    of_norm = {name: count for name, count in forward.items() if name.startswith("rms_norm")}
    once = {"rms_norm_statistics": 1, "rms_norm": 2, "rms_norm_quantize_once": 1}
    assert of_norm == once | ({"rms_norm_quantize": 1} if casts > 1 else {})


@pytest.mark.parametrize(
    "options",
    [
        {"recipe": "tensorwise"},
        pytest.param({"recipe": "blockwise"}, marks=pytest.mark.combination),
        {"recipe": "delayed", "save_activations": "bf16"},
    ],
    ids=lambda options: options["recipe"],
)
def test_lengths_that_change(options):
    layer = Block(**options).layer
    block = nn.Sequential(layer.post_attention_layernorm, layer.mlp)
    twin = copy.deepcopy(block)
    compiled = torch.compile(twin, fullgraph=True, dynamic=True, backend=Partitioned().backend)
    for tokens in (24, 40):
        x = torch.randn(2, tokens, 128).bfloat16()
        with torch._dynamo.config.patch(error_on_recompile=tokens == 40):
            results = []
            for model in (block, compiled):
                leaf = x.clone().requires_grad_()
                y = model(leaf)
                y.float().square().sum().backward()
                results.append((y, leaf.grad))
            _assert_equal(*results)


def test_two_norms_of_one_epsilon_with_symbolic_shapes():
    """There a float that a module holds is an input of the graph."""
    block = Block()
    twin = copy.deepcopy(block)
    compiled = torch.compile(twin, fullgraph=True, dynamic=True, backend=Partitioned().backend)
    x = torch.randn(2, TOKENS // 2, 128).bfloat16()
    _assert_equal([block(x)], [compiled(x)])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_a_block_is_one_graph(mode):
    block = Block()
    x = torch.randn(2, TOKENS // 2, 128).bfloat16()
    with mode():
        _assert_equal([block(x)], [Partitioned().compile(block)(x)])


@pytest.mark.parametrize("family", LAYERS)
def test_blocks_that_are_compiled_one_by_one_share_a_graph(family):
    """Whatever their names; past 8 graphs of one function torch.compile leaves it eager."""
    layers = [Block(family).layer for _ in range(3)]
    model = nn.ModuleList(layers)
    convert_to_float8(model)
    assert [layer.mlp.fp8.name for layer in layers] == ["0.mlp", "1.mlp", "2.mlp"]
    backend = CompileCounterWithBackend("aot_eager")
    angles = Block(family).angles
    x = torch.randn(2, TOKENS // 2, 128).bfloat16().requires_grad_()
    for layer in layers:
        layer.compile(backend=backend, fullgraph=True)
        x = layer(x, position_embeddings=angles)
    x.float().sum().backward()
    assert backend.frame_count == 1
