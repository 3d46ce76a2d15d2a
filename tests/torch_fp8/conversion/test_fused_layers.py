import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from tests.internals import Float8GatedMLP, Float8RMSNorm, LazyQuantizedTensor, sqnr_db
from tests.steps import Calls, assert_equal, gaussian, saved_bytes, train
from tests.torch_fp8.block_models import MLP, Attention, Model, Norm
from torch_fp8 import Float8Linear, FP8Config, convert_to_float8, revert

FUSED = ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8")


def _model(dtype=torch.bfloat16, seed=0, **options):
    torch.manual_seed(seed)
    model = Model().to(dtype)
    convert_to_float8(model, FP8Config(**options))
    return model


# Values.


@pytest.mark.parametrize("recipe", FUSED)
def test_fused_and_unfused_products_have_the_same_bytes(recipe):
    """What a producer casts is what the plain tensor of the same producer would have been."""
    fused, unfused = _model(recipe=recipe), _model(recipe=recipe)
    for module in unfused.modules():
        if isinstance(module, Float8RMSNorm):
            module.register_forward_hook(lambda m, i, y: y + 0)  # plain from here on
    for module in (*fused.modules(), *unfused.modules()):
        if isinstance(module, Float8Linear):
            module.fp8.group = None  # products that are shared round once, not twice
    x = gaussian(2, 33, 64)
    assert_equal(train(unfused, x), train(fused, x))


def test_gemma_norm_and_torch_norm_are_found_by_what_they_compute():
    class Gemma(Norm):
        def forward(self, x):
            y = x.float()
            y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
            return (y * (1.0 + self.weight.float())).type_as(x)

    for norm in (Gemma(64), nn.RMSNorm(64, eps=1e-6), nn.RMSNorm((64,), eps=1e-3)):
        model = nn.Sequential(copy.deepcopy(norm), nn.Linear(64, 64)).bfloat16()
        report = convert_to_float8(model)
        assert report.producers == ("0",)
        x = gaussian(5, 64)
        want = copy.deepcopy(norm).bfloat16()(x)
        assert sqnr_db(want, model[0](x) + 0) > 48


@pytest.mark.parametrize(
    "norm",
    [
        nn.LayerNorm(64),
        nn.RMSNorm(64, eps=1e-6, elementwise_affine=False),
        nn.RMSNorm(64),  # its epsilon depends on the dtype
        nn.RMSNorm((2, 64), eps=1e-6),
    ],
    ids=["LayerNorm", "no weight", "no eps", "two dimensions"],
)
def test_other_norms_stay_as_they_are(norm):
    model = nn.Sequential(norm, nn.Linear(64, 64))
    cls = type(norm)
    assert convert_to_float8(model).producers == ()
    assert type(norm) is cls


def test_models_of_no_substance_are_converted_alike():
    with torch.device("meta"):
        model = nn.Sequential(Norm(80), MLP(80, 176))
        assert convert_to_float8(model).producers == ("0", "1")
    model = nn.Sequential(Norm(112), MLP(112, 176))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert convert_to_float8(model).producers == ("0", "1")


def test_mlps_without_a_layer_in_fp8_stay_as_they_are():
    model = nn.Sequential(Norm(64), MLP(64, 176), nn.Linear(64, 64))
    report = convert_to_float8(model, FP8Config(skip=("gate_proj", "up_proj", "down_proj")))
    assert report.producers == ("0",)
    assert type(model[1]) is MLP


def test_norms_that_no_layer_of_their_width_reads_return_plain_tensors():
    class Heads(Attention):
        def __init__(self):
            super().__init__(64)
            self.q_norm = Norm(16)

    heads = Heads().bfloat16()
    blocks = nn.ModuleDict({"a": nn.Linear(64, 64)})
    models = [
        nn.ModuleDict({"blocks": b, "norm": Norm(64)})
        for b in (blocks, nn.ModuleList(blocks.values()))
    ]
    convert_to_float8(heads)
    norms = [heads.q_norm]
    for model in models:
        assert convert_to_float8(model.bfloat16()).producers == ("norm",)
        norms.append(model["norm"])
    for norm in norms:
        assert isinstance(norm, Float8RMSNorm)
        assert norm.fp8.quantizer is None
        assert type(norm(gaussian(4, norm.weight.shape[0]))) is torch.Tensor


# Sharing, and what is kept.


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_an_input_is_cast_once_for_all_that_share_it(recipe):
    model = _model(recipe=recipe)
    with Calls() as calls:
        model.layers[0](gaussian(2, 64, 64).requires_grad_()).sum().backward()
    count = calls.names.count
    casts = count("rms_norm_statistics"), count("rms_norm_quantize")
    # One for q, k, v; one for gate, up. In blocks, whose scales need the tile alone, at once.
    assert casts == ((2, 2) if recipe == "tensorwise" else (0, 0))
    assert count("rms_norm_quantize_once") == (0 if recipe == "tensorwise" else 2)
    assert count("swiglu_save") == (1 if recipe == "tensorwise" else 0)
    assert count("swiglu_quantize") == 1
    grouped = recipe == "tensorwise"  # blocks do not divide these layers
    assert count("gate_up_backward_quantize") == grouped  # both gradients
    assert count("swiglu_backward_quantize") == (not grouped)
    # o_proj's input; gradients of q, k and v, together or apart, of o and down
    others = 1 + (3 if grouped else 5)
    weights = 7 + (2 if grouped else 7)  # those of a group are cast together for backward
    assert count("quantize_2d") == weights + others
    assert count("cast_side_by_side") == 2 * grouped
    dense = ("rms_norm", "swiglu", "swiglu_backward")
    assert not any(name in calls.names for name in dense)


@pytest.mark.parametrize(
    ("options", "norm_bytes", "product_bytes", "linear_bytes"),
    [
        ({}, 1, 2, 1),
        ({"recipe": "blockwise"}, 1, 2, 1),
        ({"save_activations": "bf16"}, 0, 4, 1),  # x is kept by nobody else but counted as known
        ({"wgrad": "bf16"}, 1, 2, 2),
    ],
    ids=["default", "blockwise", "bf16", "wgrad bf16"],
)
def test_bytes_that_backward_needs(options, norm_bytes, product_bytes, linear_bytes):
    """Per token: the norm's input, one payload for gate and up, gate and up, down's input."""
    model = nn.Sequential(Norm(128), MLP(128, 384)).bfloat16()
    convert_to_float8(model, FP8Config(**options))
    tokens = 256
    saved = saved_bytes(model, gaussian(tokens, 128).requires_grad_()) / tokens
    payloads = 128 * (norm_bytes + linear_bytes) + 384 * (product_bytes + linear_bytes)
    scales_and_rstd = 4 * (1 + 1 + 3 + 3) + (0 if options.get("recipe") is None else 4 * 4)
    assert payloads <= saved <= payloads + scales_and_rstd + 1


def test_frozen_layers_get_no_transposed_input():
    model = nn.Sequential(Norm(64), nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16()
    model[1].requires_grad_(False)
    convert_to_float8(model)
    y = model[0](gaussian(8, 64))
    assert isinstance(y, LazyQuantizedTensor)
    model[1](y)
    ((row, col),) = y.production.payloads.values()
    assert row is not None
    assert col is None
    model[2](y)  # which wants it
    ((again, col),) = y.production.payloads.values()
    assert again is row
    tokens = row.qdata.shape[0]  # what is beyond them are zeros
    assert torch.equal(col.qdata.view(torch.uint8)[:, :tokens], row.qdata.view(torch.uint8).t())


def test_others_get_the_plain_tensor_and_its_gradient():
    """An adapter beside an FP8 layer reads the exact output of the norm."""
    norm, adapter = Norm(64).bfloat16(), nn.Linear(64, 8, bias=False).bfloat16()
    model = nn.ModuleDict({"norm": norm, "base": nn.Linear(64, 64).bfloat16()})
    convert_to_float8(model)
    x = gaussian(4, 64).requires_grad_()
    y = model["norm"](x)
    base = model["base"](y)
    seen = []
    hook = torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t)
    with hook:
        low = adapter(y)
    assert all(type(t) in (torch.Tensor, nn.Parameter) for t in seen)
    exact = type(norm).__bases__[1].forward(norm, x)
    assert sqnr_db(exact, y + 0) > 48
    (base.sum() + low.sum()).backward()
    both, x.grad = x.grad, None
    model["base"](model["norm"](x)).sum().backward()
    only_base, x.grad = x.grad, None
    adapter(model["norm"](x)).sum().backward()
    assert sqnr_db(only_base.float() + x.grad.float(), both) > 35


def test_outputs_are_freed_with_their_last_reader():
    """Without waiting for the garbage collector: what they hold is large."""
    block = _model().layers[0]
    alive = []

    def watch(module, args, y):
        sources = y.production.sources if isinstance(y, LazyQuantizedTensor) else ()
        alive.extend(weakref.ref(t) for t in (y, *sources) if t is not module.weight)

    def watch_input(module, args):
        alive.extend(weakref.ref(t) for t in (args[0].production, *args[0].production.sources))

    def watch_grad(module, grads):
        alive.append(weakref.ref(grads[0].production))

    for norm in (block.attn_norm, block.mlp_norm):
        norm.register_forward_hook(watch)
    block.mlp.down_proj.register_forward_pre_hook(watch_input)
    for layer in (block.mlp.gate_proj, block.mlp.up_proj):
        layer.register_full_backward_pre_hook(watch_grad)
    gc.disable()
    try:
        y = block(gaussian(8, 64).requires_grad_())
        assert len(alive) == 2 * 3 + 3
        assert not any(ref() is not None for ref in alive)
        alive.clear()
        y.sum().backward()
        assert len(alive) == 2
        assert not any(ref() is not None for ref in alive)
    finally:
        gc.enable()


def test_a_norm_that_is_sharded_by_itself_computes_at_once(single_process_group):
    """FSDP2 frees its weight when its forward is over."""
    model = _model()
    want = model(gaussian(2, 5, 64))
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model.layers[0].attn_norm, mesh=mesh)
    fully_shard(model, mesh=mesh)
    seen = []
    model.layers[0].attn_norm.register_forward_hook(lambda m, args, y: seen.append(type(y)))
    assert torch.equal(model(gaussian(2, 5, 64)), want)
    assert seen == [torch.Tensor]
    model(gaussian(2, 5, 64)).sum().backward()
    revert(model)
    assert isinstance(model.layers[0].attn_norm, Norm)
    assert not isinstance(model.layers[0].attn_norm, Float8RMSNorm)


def test_a_model_whose_norms_are_sharded_before_the_conversion(single_process_group):
    """As transformers' from_pretrained(distributed_config=...) shards them."""
    model = nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 64))
    mesh = init_device_mesh("cpu", (1,))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    report = convert_to_float8(model)
    assert report.converted == ("1",)
    model(gaussian(2, 5, 64)).sum().backward()


def test_what_a_norm_without_readers_returns_may_be_written_to():
    model = nn.Sequential(nn.Linear(64, 96), Norm(96), nn.ReLU(inplace=True))
    convert_to_float8(model)
    assert isinstance(model[1], Float8RMSNorm)
    model(torch.randn(2, 3, 64)).sum().backward()


# Around them.


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_regions_that_end_with_a_norm(reentrant):
    """Their outputs, and the inputs of what comes next, are such activations themselves."""

    class Ends(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.mlp, self.norm = MLP(64, 176), norm

        def forward(self, x):
            return self.norm(x + self.mlp(x))

    for norm in (Norm(64), nn.LayerNorm(64)):
        torch.manual_seed(0)
        plain = nn.Sequential(Ends(norm), Ends(copy.deepcopy(norm)), nn.Linear(64, 64)).bfloat16()
        convert_to_float8(plain)
        recomputed = copy.deepcopy(plain)

        def run(x, model=recomputed):
            for part in model:
                x = checkpoint(part, x, use_reentrant=reentrant)
            return x

        x = gaussian(32, 64)
        assert isinstance(plain[0](x), LazyQuantizedTensor)
        twin = nn.Module()
        twin.forward, twin._modules = run, recomputed._modules
        want, got = train(plain, x), train(twin, x)
        assert torch.equal(want[0], got[0])
        assert torch.equal(want[1], got[1])
        assert all(torch.equal(want[2][n], got[2][n]) for n in want[2])


def test_conversion_is_idempotent_and_reverts():
    model = Model()
    classes = {n: type(m) for n, m in model.named_modules()}
    keys, parameters = list(model.state_dict()), list(model.parameters())
    first = convert_to_float8(model)
    names = {n for n, m in model.named_modules() if isinstance(m, (Float8RMSNorm, Float8GatedMLP))}
    assert set(first.producers) == names == {n for n in classes if "norm" in n or n.endswith("mlp")}
    assert "5 norms" not in first.summary()
    assert f"{len(names)} norms and gated MLPs" in first.summary()
    converted = {n: type(m) for n, m in model.named_modules()}
    assert all(
        c.__name__ == classes[n].__name__ or issubclass(c, Float8Linear)
        for n, c in converted.items()
    )
    assert all(isinstance(m, classes[n]) for n, m in model.named_modules())
    assert convert_to_float8(model).producers == first.producers
    assert {n: type(m) for n, m in model.named_modules()} == converted
    fewer = convert_to_float8(model, FP8Config(skip=("layers.1", "norm")))
    assert set(fewer.producers) == {n for n in names if n.startswith("layers.0")}
    assert type(model.layers[1].mlp) is MLP
    revert(model)
    assert {n: type(m) for n, m in model.named_modules()} == classes
    assert not any(k.startswith("fp8") for m in model.modules() for k in vars(m))
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))


def test_instances_with_a_forward_of_their_own_are_left_alone():
    model = Model()
    model.layers[0].mlp.forward = lambda x: x
    model.norm.forward = lambda x: x
    producers = convert_to_float8(model).producers
    assert "layers.0.mlp" not in producers
    assert "norm" not in producers
