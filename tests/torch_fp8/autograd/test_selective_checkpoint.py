"""Checkpoints that keep FP8: gradients, what is kept and what runs again, and what is refused."""

import copy
import functools
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from tests.torch_fp8.conversion.test_fused_layers import MLP, Attention, Block, Norm
from tests.torch_fp8.test_hugging_face import FAMILIES, TINY
from torch_fp8 import (
    FP8Config,
    convert_optimizer,
    convert_to_float8,
    selective_checkpoint_contexts,
)
from torch_fp8.autograd.current_pass import Unavailable
from torch_fp8.autograd.recompute_trace import ATTENTION, CASTS, is_random
from torch_fp8.distributed.fsdp.connect import connect_fsdp
from torch_fp8.nn.linear import Float8Linear
from torch_fp8.nn.scaling_buffers import INPUT
from torch_fp8.nn.weight_cache import WeightCache, watch
from torch_fp8.ops.quantize_delayed import History
from torch_fp8.quantization.recipe import RECIPES

BF16 = torch.bfloat16


def _selective(function, *args, **kwargs):
    return checkpoint(
        function, *args, use_reentrant=False, context_fn=selective_checkpoint_contexts, **kwargs
    )


def _converted(model, **options):
    convert_to_float8(model, FP8Config(**options))
    return model


def _block(**options):
    torch.manual_seed(0)
    return _converted(Block().bfloat16(), **options)


def _x(*shape, dtype=BF16):
    return torch.randn(*(shape or (2, 32, 64)), generator=torch.Generator().manual_seed(1)).to(
        dtype
    )


def _run(model, function, x=None):
    """Output and gradients of ``function(x)``, which computes on the parameters of `model`."""
    x = (_x() if x is None else x).clone().requires_grad_()
    torch.manual_seed(2)
    y = function(x)
    (y.float() * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
    after = torch.rand(())  # the generator goes on from where the forward left it
    grads = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return y.detach(), x.grad, grads, after


def _assert_equal(want, got):
    assert torch.equal(want[0], got[0])
    assert torch.equal(want[1], got[1])
    assert torch.equal(want[3], got[3])
    for name, grad in want[2].items():
        assert (grad is None and got[2][name] is None) or torch.equal(grad, got[2][name]), name


def _assert_nothing_changes(model, x=None, steps=2, function=None):
    """What `model` gives is the same, checkpointed or not; so are its buffers."""
    plain, recomputed = model, copy.deepcopy(model)
    function = function or (lambda m, x: m(x))
    for _ in range(steps):
        want = _run(plain, lambda x: function(plain, x), x)
        got = _run(recomputed, lambda x: _selective(functools.partial(function, recomputed), x), x)
        _assert_equal(want, got)
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffer, dict(recomputed.named_buffers())[name]), name


class _Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))

    def count(self, *parts):
        return sum(any(p in name for p in parts) for name in self.names)


@pytest.mark.parametrize("options", [{"save_activations": "bf16"}, {"wgrad": "bf16"}, {}], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_and_histories_are_those_without_checkpointing(recipe, options):
    _assert_nothing_changes(_block(recipe=recipe, **options))


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
@pytest.mark.parametrize("early_stop", [True, False])
def test_early_stop_is_not_needed(recipe, early_stop):
    with set_checkpoint_early_stop(early_stop):
        _assert_nothing_changes(_block(recipe=recipe))


class Llama(nn.Module):
    """Hugging Face's decoder layer and its angles, as a function of hidden states."""

    def __init__(self, **options):
        super().__init__()
        config = LlamaConfig(
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        config._attn_implementation = "sdpa"
        torch.manual_seed(0)
        self.layer = LlamaDecoderLayer(config, 0).bfloat16()
        self.angles = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=BF16), ARANGE)
        convert_to_float8(self.layer, FP8Config(**options))

    def forward(self, x):
        return self.layer(x, position_embeddings=self.angles)


ARANGE = torch.arange(32)[None]


@pytest.mark.parametrize("recipe", RECIPES)
def test_of_a_llama_block_q_k_and_v_run_again(recipe):
    model, x = Llama(recipe=recipe), _x(2, 32, 128)
    _assert_nothing_changes(model, x)
    counted = {}
    for how, run in {
        "none": model,
        "full": functools.partial(checkpoint, model, use_reentrant=False),
        "selective": functools.partial(_selective, model),
    }.items():
        y = run(x.clone().requires_grad_())
        with _Operators() as operators:
            y.sum().backward()
        counted[how] = {
            "gemms": operators.count("scaled_mm", "mm.default") + operators.names.count("mm"),
            "attention": operators.count("attention_flash_for_cpu", "attention_for_cpu"),
            "norms": operators.count("rms_norm_statistics", "rms_norm_quantize_once"),
            "products": operators.count("swiglu_quantize", "swiglu_save"),
        }
    again = {k: n - counted["none"][k] for k, n in counted["selective"].items()}
    assert again == {"gemms": 3, "attention": 0, "norms": 1, "products": 0}
    full = {k: n - counted["none"][k] for k, n in counted["full"].items()}
    assert full["gemms"] == 7
    assert full["attention"] == 1
    assert full["norms"] == 2
    assert full["products"] > 0


def _contexts():
    """A ``context_fn``, and what it returns."""
    made = []

    def contexts():
        made.extend(selective_checkpoint_contexts())
        return made[0], made[1]

    return contexts, made


@pytest.mark.parametrize("recipe", RECIPES)
def test_kept_are_what_attention_returns_and_fp8(recipe):
    model = Llama(recipe=recipe)
    contexts, made = _contexts()
    x = _x(4, 32, 128).requires_grad_()
    y = checkpoint(model, x, use_reentrant=False, context_fn=contexts)
    kept = made[1].kept
    in_16_bits = [t for t in kept if t.dtype == BF16]
    assert [t.numel() for t in in_16_bits] == [128 * 128]
    assert sorted(t.numel() for t in kept if t.dtype.itemsize == 1) == sorted(
        # o_proj's input; the second norm's and its output; gate, up and the product
        128 * n
        for n in (128, 128, 128, 256, 256, 256)
    )
    others = sum(t.numel() for t in kept if t.dtype == torch.float32)
    assert others < 128 * (128 * 3 + 256 * 3) / 16
    del kept, in_16_bits
    tensors = [weakref.ref(t) for t in made[1].kept]
    made.clear()
    gc.disable()
    try:
        y.sum().backward()
        assert not [t for t in tensors if t() is not None]
    finally:
        gc.enable()


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_what_nothing_needs_is_gone_after_the_first_pass(recipe):
    model, x = Llama(recipe=recipe), _x(2, 32, 128).requires_grad_()
    contexts, made = _contexts()
    gc.collect()
    before = {id(t) for t in gc.get_objects() if type(t) is torch.Tensor}
    y = checkpoint(model, x, use_reentrant=False, context_fn=contexts)
    alive = [t for t in gc.get_objects() if type(t) is torch.Tensor and id(t) not in before]
    kept = {t.untyped_storage().data_ptr() for t in made[1].kept}
    # beside the result, and the state of the generator that checkpoint restores
    more = [t for t in alive if t.untyped_storage().data_ptr() not in kept and t is not y]
    more = [t for t in more if t.numel()]  # torch 2.11 has two without elements
    assert [t.dtype for t in more] == [torch.uint8]


def test_nothing_is_left_where_no_backward_comes():
    contexts, made = _contexts()
    gc.disable()
    try:
        y = checkpoint(_block(), _x().requires_grad_(), use_reentrant=False, context_fn=contexts)
        tensors = [weakref.ref(t) for t in made[1].kept]
        assert tensors
        made.clear()
        del y
        assert not [t for t in tensors if t() is not None]
    finally:
        gc.enable()


def test_a_backward_leaves_nothing_with_what_was_kept():
    """The graph of the second pass, and what it made of its input, go before a next backward."""

    class Headed(Attention):
        def forward(self, x):
            q, k, v = (layer(x)[:, None] for layer in (self.q_proj, self.k_proj, self.v_proj))
            return self.o_proj(F.scaled_dot_product_attention(q, k, v)[:, 0])

    model = _converted(nn.Sequential(Norm(64), Headed(64)).bfloat16())
    contexts, made = _contexts()
    y = checkpoint(
        model[1], model[0](_x().requires_grad_()), use_reentrant=False, context_fn=contexts
    )
    y.sum().backward(retain_graph=True)
    assert any(t.dtype == BF16 for t in made[1].kept)  # attention's, which autograd records
    assert not any(t.requires_grad for t in made[1].kept)
    assert not made[1].forms


class Rest(nn.Module):
    """Around a block: dropout, tuples, keywords, and an adapter in 16 bits."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention, self.mlp = Norm(64), Attention(64), MLP(64, 176)
        self.first, self.second = nn.Dropout(0.25), nn.Dropout(0.5)
        self.lora_a, self.lora_b = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

    def forward(self, x, *, pair=(1.0, (2.0,))):
        y = self.norm(x)
        x = x + self.first(self.attention(y)) + self.lora_b(self.second(self.lora_a(y)))
        return {"x": (x * pair[0], [x + self.mlp(x) * pair[1][0]])}


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
def test_dropout_tuples_and_adapters(recipe):
    torch.manual_seed(0)
    model = _converted(Rest().bfloat16(), recipe=recipe, skip=("lora_a", "lora_b"))

    def function(model, x):
        y = model(x, pair=(1.5, (0.5,)))["x"]
        return y[0] + y[1][0]

    _assert_nothing_changes(model, function=function)
    plain, recomputed = model, copy.deepcopy(model)
    want = _run(plain, lambda x: function(plain, x))

    def nested(x):
        y = _selective(recomputed, x, pair=(1.5, (0.5,)))["x"]
        return y[0] + y[1][0]

    _assert_equal(want, _run(recomputed, nested))


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
def test_frozen_weights(recipe):
    for frozen in (("q_proj", "gate_proj", "attn_norm"), ("weight",)):
        model = _block(recipe=recipe)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in frozen))
        _assert_nothing_changes(model)


def test_dropout_in_attention():
    class Drops(Attention):
        def forward(self, x):
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
            return F.dropout(self.o_proj(F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)))

    torch.manual_seed(0)
    _assert_nothing_changes(_converted(nn.Sequential(Norm(64), Drops(64)).bfloat16()))


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
@pytest.mark.parametrize("payload", [False, True, "both"])
def test_weights_that_are_kept_between_steps(recipe, payload):
    """The first pass may be the one that fills a cache."""
    if recipe == "blockwise" and not payload:
        pytest.skip("there is no scale of the tensor to keep")
    results = []
    for selective in (False, True):
        model = _block(recipe=recipe)
        layers = [m for m in model.modules() if isinstance(m, Float8Linear)]
        for layer in layers:
            layer.fp8_weight_cache = WeightCache(payload)
            watch(layer.weight)
        run = functools.partial(_selective, model) if selective else model
        for _ in range(2):
            results.append(_run(model, run))
        with torch.no_grad():
            for layer in layers:
                layer.weight.mul_(1.5)
        results.append(_run(model, run))
    for want, got in zip(results[:3], results[3:], strict=True):
        _assert_equal(want, got)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_what_the_step_knows_of_a_weight_is_known_to_both_passes(level):
    """The optimizer's step finds the amax of each weight, with which the next forward casts."""
    results = []
    for selective in (False, True):
        config = FP8Config(recipe="tensorwise", opt_level=level)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        torch.manual_seed(0)
        for weight in model.parameters():
            nn.init.normal_(weight, std=0.1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        convert_to_float8(model, config)
        convert_optimizer(optimizer, config, model=model)
        run = functools.partial(_selective, model) if selective else model
        for step in range(3):
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
            run(x.requires_grad_()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.detach().clone() for p in model.parameters()])
    for want, got in zip(*results, strict=True):
        assert torch.equal(want, got)


def test_attention_is_random_where_it_drops():
    aten = torch.ops.aten
    fused, tensors = aten._scaled_dot_product_flash_attention.default, [None] * 3
    assert is_random(fused, (*tensors, 0.1), {})
    assert is_random(fused, (*tensors,), {"dropout_p": 0.1})
    assert not is_random(fused, (*tensors, 0.0), {})
    assert not is_random(fused, (*tensors,), {})
    assert is_random(aten._scaled_dot_product_efficient_attention.default, (*[None] * 5, 0.1), {})
    assert is_random(aten.native_dropout.default, (None, 0.0, True), {})
    assert not is_random(aten.mm.default, (None, None), {})


def test_blocks_without_fp8():
    torch.manual_seed(0)
    _assert_nothing_changes(Block().bfloat16())


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
def test_a_second_backward(recipe):
    block = _block(recipe=recipe)
    x = _x().requires_grad_()
    y = _selective(block, x)
    first = torch.autograd.grad(y.sum(), [x, *block.parameters()], retain_graph=True)
    histories = {n: b.clone() for n, b in block.named_buffers()}
    second = torch.autograd.grad(y.sum(), [x, *block.parameters()], retain_graph=True)
    for name, buffer in histories.items():
        if "grad" not in name:  # the gradient's history moves with each backward
            assert torch.equal(buffer, dict(block.named_buffers())[name]), name
    if recipe != "delayed":
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
def test_nested_checkpoints(recipe):
    model = _block(recipe=recipe)
    full = functools.partial(checkpoint, use_reentrant=False)

    def function(model, x, around, inside):
        def both(x):
            x = x + inside(model.attention, model.attn_norm(x))
            return x + inside(lambda x: model.mlp(model.mlp_norm(x)), x)

        return around(both, x)

    reentrant = functools.partial(checkpoint, use_reentrant=True)  # its backward runs both passes
    nestings = ((full, _selective), (_selective, full), (_selective, _selective))
    for around, inside in (*nestings, (reentrant, _selective)):
        plain, recomputed = copy.deepcopy(model), copy.deepcopy(model)
        for _ in range(2):
            want = _run(plain, plain)
            nested = functools.partial(function, recomputed, around=around, inside=inside)
            _assert_equal(want, _run(recomputed, nested))
        for name, buffer in plain.named_buffers():
            assert torch.equal(buffer, dict(recomputed.named_buffers())[name]), name


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
def test_a_region_that_starts_behind_the_norm(recipe):
    """Its input is made when it is read, in each pass, in FP8 and plain."""
    torch.manual_seed(0)
    model = _converted(Rest().bfloat16(), recipe=recipe, skip=("lora_a", "lora_b"))

    def branch(model, y):
        return model.attention(y) + model.lora_b(model.lora_a(y))

    plain, recomputed = model, copy.deepcopy(model)
    for _ in range(2):
        want = _run(plain, lambda x: branch(plain, plain.norm(x)))
        inside = functools.partial(branch, recomputed)
        got = _run(recomputed, lambda x, i=inside: _selective(i, recomputed.norm(x)))
        _assert_equal(want, got)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_offloading_inside_and_outside(recipe):
    def offloaded(model, x):
        with saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            return model(x)

    model = _block(recipe=recipe)
    with save_on_cpu():
        _assert_nothing_changes(copy.deepcopy(model))
    _assert_nothing_changes(model, function=offloaded)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_blocks_that_fsdp_shards(recipe, fp8, single_process_group):
    """Its hooks on the block run in the region, and gather in the first pass alone."""
    plain = _block(recipe=recipe)
    block = copy.deepcopy(plain)
    root, mesh = nn.Sequential(block), init_device_mesh("cpu", (1,))
    for module in (block, root):
        fully_shard(module, mesh=mesh)
    if fp8:
        connect_fsdp(root, FP8Config(recipe=recipe))
    for _ in range(2):
        results = []
        for model, run in ((plain, plain), (block, lambda x: _selective(block, x))):
            x = _x().requires_grad_()
            run(x).float().square().sum().backward()
            results.append([x.grad, *(p.grad for p in model.parameters())])
        for want, got in zip(*results, strict=True):
            assert torch.equal(want, got.full_tensor() if isinstance(got, DTensor) else got)


def test_a_model_that_hugging_face_checkpoints():
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    plain = _converted(AutoModelForCausalLM.from_config(config).bfloat16(), recipe="delayed")
    recomputed = copy.deepcopy(plain)
    recomputed.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={
            "use_reentrant": False,
            "context_fn": selective_checkpoint_contexts,
        }
    )
    ids = torch.randint(1, 128, (2, 32))
    operators = {}
    for _ in range(2):
        for model in (plain, recomputed):
            model.train()
            loss = model(ids, labels=ids).loss
            with _Operators() as operators[model]:
                loss.backward()
        for (name, a), b in zip(plain.named_parameters(), recomputed.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad), name
        for (name, a), b in zip(plain.named_buffers(), recomputed.buffers(), strict=True):
            assert torch.equal(a, b), name
    more = operators[recomputed].count("scaled_mm") - operators[plain].count("scaled_mm")
    assert more == 2 * 3


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_moe"])
def test_families(family):
    more = {"ffn_dim": 128, "word_embed_proj_dim": 64} if family == "opt" else {}
    if family in ("mixtral", "qwen3_moe"):
        more = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **TINY, **more)
    plain = _converted(AutoModelForCausalLM.from_config(config).bfloat16(), recipe="delayed")
    recomputed = copy.deepcopy(plain)
    recomputed.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={
            "use_reentrant": False,
            "context_fn": selective_checkpoint_contexts,
        }
    )
    ids = torch.randint(1, 128, (2, 32))
    for _ in range(2):
        for model in (plain, recomputed):
            torch.manual_seed(3)
            model.train()
            model(ids, labels=ids, use_cache=False).loss.backward()
    for (name, a), b in zip(plain.named_parameters(), recomputed.parameters(), strict=True):
        assert (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad), name
    for (name, a), b in zip(plain.named_buffers(), recomputed.buffers(), strict=True):
        assert torch.equal(a, b), name


def test_weights_that_autocast_casts():
    torch.manual_seed(0)
    model = _converted(nn.Sequential(Block(), nn.Linear(64, 64)), skip=("1",))
    plain, recomputed = model, copy.deepcopy(model)
    with torch.autocast("cpu", BF16):  # whose cache the second step finds filled
        for _ in range(2):
            want = _run(plain, plain, _x(dtype=torch.float32))
            got = _run(recomputed, lambda x: _selective(recomputed, x), _x(dtype=torch.float32))
            _assert_equal(want, got)
        assert torch.is_autocast_cache_enabled()


class _Fails(nn.Module):
    def forward(self, x):
        x = x * 2
        raise LookupError(len(_get_current_dispatch_mode_stack()))


def _installed():
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return len(_get_current_dispatch_mode_stack()), hooks, torch.is_autocast_cache_enabled()


def test_errors_in_the_region_leave_nothing_behind():
    x = _x().requires_grad_()
    with pytest.raises(LookupError):
        _selective(nn.Sequential(_block(), _Fails()), x)
    assert _installed() == (0, None, True)
    fails = []

    def second_time(x):
        fails.append(1)
        if len(fails) == 2:
            raise LookupError
        return x.sin()

    y = _selective(second_time, x)
    with pytest.raises(LookupError):
        y.sum().backward()
    assert _installed() == (0, None, True)


def test_a_pass_that_differs_is_told_by_operator_and_place():
    state = []

    def function(block, x):
        state.append(1)
        return block(x.cos() if len(state) == 1 else x.sin())

    y = _selective(functools.partial(function, _block()), _x().requires_grad_())
    with pytest.raises(
        RuntimeError, match=r"test_selective_checkpoint.py:\d+, is aten.sin.+was aten.cos"
    ):
        y.sum().backward()
    state.clear()

    def other_shapes(x):
        state.append(1)
        return (x[len(state) :].exp() + 1).exp()

    y = _selective(other_shapes, _x(4, 8, dtype=torch.float32).requires_grad_())
    with pytest.raises(RuntimeError, match=r"is aten.exp.default\(float32\[2, 8\]\), and was"):
        y.sum().backward()


def test_contexts_without_a_checkpoint_are_refused():
    first, second = selective_checkpoint_contexts()
    with pytest.raises(RuntimeError, match="use_reentrant=False"), first:
        pass
    with pytest.raises(RuntimeError, match="selective checkpoint"), second:
        pass
    assert _installed() == (0, None, True)


def _with_attention(after):
    class Uses(Attention):
        def forward(self, x):
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
            return self.o_proj(after(F.scaled_dot_product_attention(q, k, v)))

    torch.manual_seed(0)
    model = nn.Sequential(Norm(64), Uses(64), nn.Linear(64, 64)).bfloat16()
    return _converted(model, recipe="delayed")


HEADS = (2, 1, 32, 64)


@pytest.mark.parametrize(
    "after",
    [
        lambda a: a * (2.0 if a.float().sum().item() > 0 else 3.0),
        lambda a: a[:, a[0].float().sum(0).argmax() :].sum(1, keepdim=True) + a,
        lambda a: a.clone().mul_(2).add_(a.view(-1)[:64]),
    ],
    ids=["item", "index", "in place"],
)
def test_values_that_the_code_asks_for(after):
    _assert_nothing_changes(_with_attention(after))


def test_a_kept_result_that_is_modified_in_place():
    class InPlace(nn.Module):
        def forward(self, x):
            with torch.no_grad():
                a = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])
                a *= 2
            return (x[:, None] * a).sin()

    model = nn.Sequential(nn.Linear(64, 64), InPlace())
    _assert_nothing_changes(model, _x(dtype=torch.float32))
    kept = []

    def hands_out(x):
        a = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])
        kept.append(a.detach())
        return a.sin().exp()

    y = _selective(hands_out, _x(dtype=torch.float32).requires_grad_())
    kept[0].add_(1)
    with pytest.raises(RuntimeError, match="modified in place after its region"):
        y.sum().backward()


def test_a_history_does_not_move_twice_for_a_scale_that_is_modified():
    history, config = (
        History(torch.zeros(4), torch.zeros(2)),
        FP8Config("delayed"),
    )
    spec = _converted(nn.Sequential(nn.Linear(64, 64)))[0].operand_spec(INPUT)

    def function(x):
        row, _, _ = history.cast(x.detach(), spec, config, rowwise=True, columnwise=False)
        row.scale.mul_(2)
        return x * row.scale

    with pytest.raises(RuntimeError, match=r"quantize_2d_delayed.* was modified in place"):
        _selective(function, _x(32, 64).requires_grad_())
    with pytest.raises(LookupError):  # which came first
        _selective(lambda x: _Fails()(function(x)), _x(32, 64).requires_grad_())
    assert _installed() == (0, None, True)


class _PastTorch(torch.autograd.Function):
    """sin(x), computed past torch's operators, with x or its result saved."""

    @staticmethod
    def forward(ctx, x, saved, written):
        source = x.detach()
        y = torch.empty_like(source) if written == "new" else source.clone()
        y.numpy()[...] = source.sin().numpy() if written == "operator" else source.numpy() + 1
        ctx.save_for_backward(y if saved == "result" else x)
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None, None


@pytest.mark.parametrize("saved", ["result", "input"])
def test_kernels_past_torch_that_write_what_was_allocated(saved):
    torch.manual_seed(0)
    model = _converted(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)))

    def function(model, x):
        y = _PastTorch.apply(model[0](x), saved, "new")
        return model[2](model[1](y))

    _assert_nothing_changes(model, _x(dtype=torch.float32), function=function)


def test_kernels_past_torch_that_read_what_is_not_there_are_told():
    """It writes over a clone that nothing but it reads, and what it reads is dead."""
    model = _converted(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))

    def function(x):
        y = model[0](x)
        scratch = torch.zeros_like(y)
        scratch.detach().numpy()[...] = y.detach().data_ptr() % 2
        return model[1](y)

    def in_numpy(x):
        y = model[0](x)
        return model[1](y * float(y.detach().numpy().sum()))

    def address(x):
        y = model[0](x)
        y.detach().data_ptr()
        return model[1](y)

    for asks in (function, in_numpy, address):
        y = _selective(asks, _x(dtype=torch.float32).requires_grad_())
        with pytest.raises(RuntimeError, match="what is no operator of torch"):
            y.sum().backward()
        assert _installed() == (0, None, True)


def test_what_a_module_stores_in_the_second_pass_says_why_it_is_empty():
    stored = []

    def function(block, x):
        y = block(x)
        stored.append(y.detach())
        return block(y)

    _selective(functools.partial(function, _block()), _x().requires_grad_()).sum().backward()
    first, second = stored
    assert type(first) is torch.Tensor
    assert isinstance(second, Unavailable)
    assert second.shape == first.shape
    with pytest.raises(RuntimeError, match="kept it from there"):
        second.sum()


def test_the_list_of_casts_is_complete():
    """Every operator of a forward that returns FP8 may be kept, and none that returns 16 bits."""
    ours = {
        name.partition("::")[2].partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("torch_fp8::")
    }
    backward = {name for name in ours if "backward" in name}
    others = {"rms_norm", "swiglu", "scaled_mm", "transposed_bytes"}  # of weights, in backward
    assert ours - backward - others == set(CASTS)
    for name in ATTENTION:
        assert hasattr(torch.ops.aten, name)


def _results(graph):
    """The tensors, without substance, that a traced graph returns."""
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    values = [n.meta["val"] for n in output.args[0] if isinstance(n, torch.fx.Node)]
    return [v for v in values if isinstance(v, torch.Tensor)]


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_in_a_compiled_graph_torch_keeps_fp8(recipe):
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    model, x = Llama(recipe=recipe), _x(12, 32, 128)
    twin, graphs, payloads = copy.deepcopy(model), [], []

    def keep(graph, inputs):
        graphs.append(str(graph.graph))
        payloads.append([v.shape for v in _results(graph) if v.dtype == torch.float8_e4m3fn])
        return graph

    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition
    )
    function = functools.partial(
        checkpoint, twin, use_reentrant=False, context_fn=selective_checkpoint_contexts
    )
    got = _run(twin, torch.compile(function, backend=backend, fullgraph=True), x)
    _assert_equal(_run(model, model, x), got)
    forward, backward = graphs
    once = {"tensorwise": "rms_norm_statistics", "blockwise": "rms_norm_quantize_once"}[recipe]
    assert f"torch.ops.torch_fp8.{once}.default" in forward
    assert f"torch.ops.torch_fp8.{once}.default" not in backward
    assert payloads[0]
    assert all(384 in shape for shape in payloads[0])  # tokens: of weights they are made again
