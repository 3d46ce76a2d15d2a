import copy
import functools
import io
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from tests.comm_counter import count_communication
from tests.internals import (
    WEIGHT,
    SplitShard,
    UnshardedFloat8Weight,
    local,
    scaling_buffers,
    sqnr_db,
)
from tests.steps import renew_scales
from tests.torch_fp8.distributed.cases.fsdp_ranks import (
    BF16,
    Block,
    attached,
    batch,
    loss_of,
    model_of,
    reshard,
    sharded,
    unshard,
    weights_of,
)
from tests.torch_fp8.distributed.ranks import RANK, RANKS, on_ranks
from tests.torch_fp8.nn.test_conv1d import Conv1D
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8, set_forward_precision
from torch_fp8.distributed import connect_fsdp, split_sharded
from torch_fp8.ops.quantize import quantize

pytestmark = pytest.mark.long
O1 = FP8Config(opt_level="O1")
RECIPES = ["tensorwise", "delayed", "rowwise", "blockwise", "mxfp8"]


@on_ranks(2)
def test_gathered_bytes_are_those_of_a_cast_on_one_device():
    for recipe in RECIPES:
        for policy in (None, BF16):
            config = FP8Config(recipe=recipe, opt_level="O1", emulate=True)
            hidden = 203 if recipe == "blockwise" else 33
            plain, model = model_of(hidden=hidden), model_of(hidden=hidden)
            with torch.no_grad():  # blocks and rows differ
                for parameter in (*plain.parameters(), *model.parameters()):
                    if parameter.ndim == 2:
                        parameter.mul_(2.0 ** torch.linspace(-8, 8, len(parameter))[:, None])
            model, report = sharded(config, policy, model)
            with torch.no_grad():
                for p, q in zip(plain.parameters(), model.parameters(), strict=True):
                    p.mul_(3)
                    q.mul_(3)
            unshard(model)
            # MX scales travel with the bytes, which FSDP allows where it need not pad: not 33 rows.
            assert report.num_gathers == len(weights_of(model)) == (4 if recipe == "mxfp8" else 5)
            for name, weight in weights_of(model).items():
                spec = model.get_submodule(name).fp8.recipe.weight
                exact = plain.get_submodule(name).weight.detach()
                whole = quantize(exact, spec)
                assert torch.equal(whole.qdata.view(torch.uint8), weight.qdata.view(torch.uint8))
                assert torch.equal(whole.scale, weight.rowwise().scale)
                assert weight.dtype == (torch.bfloat16 if policy else torch.float32)


@on_ranks(2)
def test_payloads_are_freed_as_fsdp_frees_weights():
    for recipe in ("tensorwise", "mxfp8"):
        for after_forward in (True, False):
            config = FP8Config(recipe=recipe, opt_level="O1", emulate=True)
            model, _ = sharded(config, reshard_after_forward=after_forward)
            unshard(model)
            payloads = [w.payload for w in weights_of(model).values()]
            storages = {
                t.untyped_storage() for p in payloads for t in (p.qdata, p.scale) if t.numel() > 1
            }

            def held(storages=tuple(storages)):
                return sum(storage.size() for storage in storages)

            whole = held()
            loss = loss_of(model, batch(0))
            forward = held()
            loss.backward()
            numel = sum(p.qdata.numel() for p in payloads)
            # One byte for each element, and MX's scales: there is nothing else.
            assert whole / numel == pytest.approx(1 + (recipe == "mxfp8") / 32, abs=0.01)
            assert forward == (0 if after_forward else whole)
            assert held() == 0
            with pytest.raises(RuntimeError, match="the unsharded weight was freed by FSDP"):
                UnshardedFloat8Weight(payloads[0], torch.float32).sum()


@on_ranks(2)
def test_every_rank_sees_a_bad_weight_and_the_nan_of_gradients_of_one():
    whole = 64 * 96
    numbers = {"tensorwise": whole, "rowwise": 96, "blockwise": whole, "mxfp8": 32}
    for recipe, number in numbers.items():
        for bad in (torch.inf, torch.nan):
            config = FP8Config(recipe=recipe, opt_level="O1", emulate=True)
            model, _ = sharded(config)
            if RANK == RANKS - 1:
                model[1].down.weight._local_tensor[0, 0] = bad
            unshard(model)
            weight = model[1].down.weight.dequantize()
            assert weight.isnan().sum() == number
            reshard(model)
    model, _ = sharded(FP8Config(opt_level="O1"))
    x = batch(0)
    if RANK == 0:
        x[0, 0] = torch.nan
    loss_of(model, x).backward()
    grads = [p.grad.to_local() for p in model.parameters() if p.to_local().numel()]
    assert len(grads) == 15
    assert all(grad.isnan().any() for grad in grads)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(64, 64), nn.Linear(64, 64, bias=False)
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)
        self.out.weight, self.two.weight = self.embedding.weight, self.one.weight

    def forward(self, x):
        return self.out(self.two(self.one(self.embedding(x))))


@on_ranks(2)
def test_tied_layers_gather_once_and_what_a_plain_layer_shares_as_it_is():
    torch.manual_seed(0)
    model, plain = Tied(), Tied()
    plain.load_state_dict(model.state_dict())
    for made in (model, plain):
        convert_to_float8(made, O1)
    fully_shard(model)
    assert connect_fsdp(model, O1).num_gathers == 1
    x = torch.arange(8).view(1, 8) + RANK
    assert loss_of(model, x) == loss_of(plain, x)

    model = Tied()
    some = FP8Config(opt_level="O1", skip=("two",))
    convert_to_float8(model, some)
    fully_shard(model)
    report = connect_fsdp(model, some)
    loss_of(model, x).backward()
    assert report.num_gathers == 0
    assert "a module in high precision shares it" in str(report)


@on_ranks(2)
def test_frozen_weights_are_gathered_in_fp8_and_are_no_missing_gradients():
    frozen = model_of()
    frozen[1].requires_grad_(False)
    model, report = sharded(O1, BF16, frozen)
    loss_of(model, batch(0)).backward()
    assert report.num_gathers == 5
    assert all(p.grad is None for p in model[1].parameters())
    some = model_of()
    some[1].up.requires_grad_(False)
    model, _ = sharded(O1, BF16, some)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*got no gradient")
        loss_of(model, batch(0)).backward()


@on_ranks(2)
def test_communication_off_is_stock_and_can_be_undone():
    model, report = sharded(FP8Config(opt_level="O1", communication="off"))
    loss_of(model, batch(0)).backward()
    assert report.num_gathers == report.num_scatters == len(weights_of(unshard(model))) == 0
    reshard(model)
    assert connect_fsdp(model, O1).num_gathers == len(weights_of(unshard(model))) == 5


@on_ranks(2)
def test_a_reduce_scatter_of_the_users_stays():
    model, _ = sharded(O1, connected=False)
    own = DefaultReduceScatter()
    own.__class__ = type("Own", (DefaultReduceScatter,), {})
    model[1].set_custom_reduce_scatter(own)
    report = connect_fsdp(model, O1)
    connect_fsdp(model, FP8Config(opt_level="O1", communication="off"))
    assert (report.num_gathers, report.num_scatters) == (5, 2)
    assert "not '1': it has a custom reduce-scatter" in str(report)
    assert model[1]._get_fsdp_state()._fsdp_param_group._reduce_scatter_comm is own
    root = model._get_fsdp_state()._fsdp_param_group
    assert type(root._reduce_scatter_comm) is DefaultReduceScatter


@on_ranks(2)
def test_shards_of_the_second_dimension():
    sharding = {"shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 else None}
    for recipe, number in (("tensorwise", 5), ("rowwise", 0)):
        config = FP8Config(opt_level="O1", recipe=recipe, emulate=True)
        model, report = sharded(config, **sharding)
        alone = model_of()
        convert_to_float8(alone, config)
        loss = loss_of(model, batch(0))
        assert loss == loss_of(alone, batch(0))
        loss.backward()
        assert report.num_gathers == number
        assert ("rowwise scales need whole rows" in str(report)) == (number == 0)


@on_ranks(2)
def test_what_fsdp_moves_from_the_cpu_is_asked_there():
    """With CPU offload; here another dtype stands for another device."""
    model, report = sharded(O1, offload_policy=CPUOffloadPolicy(pin_memory=False))
    local = model[1].up.weight._local_tensor
    moved = local.to(torch.float64)
    loss_of(model, batch(0)).backward()
    inputs, _ = moved.fsdp_pre_all_gather(None, None, None, None, None)
    assert report.num_gathers == 5
    assert inputs[0].dtype == torch.uint8
    assert moved is not local
    assert local.to("cpu") is local


@on_ranks(2)
def test_delayed_scales_are_those_of_one_device():
    """Histories and scales, bit for bit; the next gather takes the scale."""
    config = FP8Config(recipe="delayed", opt_level="O1", amax_history_len=4)
    model, _ = sharded(config)
    alone = model_of()
    convert_to_float8(alone, config)
    for step in range(3):
        layers = (model[1].up, alone[1].up)
        with torch.no_grad():
            for one in (model, alone):
                for parameter in one.parameters():
                    parameter.mul_(1.5)
        for one in (model, alone):
            one.zero_grad()
            loss_of(one, batch(step)).backward()
        renew_scales()
        histories = [layer.fp8_amax_history[WEIGHT] for layer in layers]
        scales = [scaling_buffers(layer)[1][WEIGHT, 0] for layer in layers]
        assert torch.equal(*histories)
        assert torch.equal(*scales)
    unshard(model)
    assert model[1].up.weight.scale == scales[0]


@on_ranks(2)
def test_copies_and_pickles_are_plain():
    model, _ = sharded(FP8Config(opt_level="O1"))
    parameter = model[1].up.weight
    shard = parameter._local_tensor
    buffer = io.BytesIO()
    torch.save({"shard": shard, **model.state_dict()}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    copies = [copy.deepcopy(shard), copy.deepcopy(parameter)._local_tensor, loaded["shard"]]
    copies += [v._local_tensor for k, v in loaded.items() if k != "shard"]
    assert all(type(c) is torch.Tensor and not c.__dict__ for c in copies)
    assert torch.equal(copies[0], shard)
    assert attached(model) == 5
    unshard(model)
    gathered = model[1].up.weight
    assert type(copy.deepcopy(gathered)) is torch.Tensor
    assert torch.equal(pickle.loads(pickle.dumps(gathered)), gathered.dequantize())
    assert torch.equal(gathered.detach().view(gathered.shape) + 0, gathered.dequantize())


@on_ranks(2)
def test_an_optimizer_that_keeps_its_states_steps_shards_as_the_whole():
    config = FP8Config()
    model, _ = sharded(config, BF16, model_of(hidden=99), connected=False)
    alone = model_of(hidden=99)
    convert_to_float8(alone, config)
    optimizers = [torch.optim.RMSprop(m.parameters(), lr=1e-3) for m in (model, alone)]
    (report,) = split_sharded(model, optimizers[:1], config)
    convert_optimizer(optimizers[1], config, model=alone)
    connect_fsdp(model, config)
    for step in range(3):
        for i, (name, p) in enumerate(alone.named_parameters()):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(9 * step + i))
            shard = model.get_parameter(name)
            shard.grad = distribute_tensor(p.grad, shard.device_mesh, shard.placements)
        for optimizer in optimizers:
            optimizer.step()
    split = [isinstance(local(p), SplitShard) for p in model.parameters()]
    assert report.num_split == sum(split) == 4
    for name, p in alone.named_parameters():
        assert torch.equal(model.get_parameter(name).full_tensor(), p.detach())


def _alone():
    alone = model_of()
    convert_to_float8(alone, O1)
    return alone


@on_ranks(2)
def test_shards_that_were_replaced_are_connected_by_the_next_forward():
    alone = _alone()
    for dtype, tolerance in ((torch.bfloat16, 0.02), (torch.float32, 0)):
        model, _ = sharded(O1)
        if dtype == torch.float32:  # after a first forward
            loss_of(model, batch(0)).backward()
            model.zero_grad()
        assert attached(model) == 5
        model._apply(torch.clone)  # as another device does
        assert attached(model) == 0
        model.to(dtype)
        losses = [float(loss_of(one, batch(0))) for one in (model, alone)]
        assert losses[0] == pytest.approx(losses[1], rel=tolerance)
        loss_of(model, batch(0)).backward()
        assert {w.dtype for w in weights_of(unshard(model)).values()} == {dtype}
        reshard(model)
        assert attached(model) == 5


@on_ranks(2)
def test_converting_again_takes_gathered_weights_for_weights():
    model, _ = sharded(O1)
    assert len(weights_of(unshard(model))) == 5
    assert len(convert_to_float8(model, O1).converted) == 5
    reshard(model)
    assert connect_fsdp(model, O1).num_gathers == 5
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    connect_fsdp(model, O1)
    assert hooks == [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]


@on_ranks(2)
def test_an_evaluation_in_high_precision_gathers_so_and_keeps_gradients():
    """``eval_fp8=False``, between two micro-batches."""
    models = []
    for evaluates in (True, False):
        model, _ = sharded(FP8Config(opt_level="O1", eval_fp8=not evaluates))
        model.set_requires_gradient_sync(False)
        loss_of(model, batch(0)).backward()
        if evaluates:
            with torch.no_grad():
                assert torch.equal(model.eval()(batch(1)), model_of()(batch(1)))
            assert not weights_of(unshard(model))
            reshard(model)
        model.train().set_requires_gradient_sync(True)
        loss_of(model, batch(1)).backward()
        models.append(model)
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(p.grad.to_local(), q.grad.to_local())


@on_ranks(2)
def test_a_forward_in_bf16_gathers_weights_in_high_precision():
    model, _ = sharded(O1)
    alone = _alone()
    loss_of(model, batch(0)).backward()
    for one in (model, alone):
        one.zero_grad()
        set_forward_precision(one, "bf16")
    with torch.no_grad():
        assert torch.equal(model(batch(1)), model_of()(batch(1)))
    assert not weights_of(unshard(model))
    reshard(model)
    assert loss_of(model, batch(1)) == loss_of(alone, batch(1))


@on_ranks(2)
def test_gathers_that_no_forward_announced_have_scales_of_their_own():
    """One collective for each group of FSDP's, and never an old scale."""
    model, _ = sharded(O1)
    alone = _alone()
    loss_of(model, batch(0)).backward()

    def grown(factor):
        with torch.no_grad():
            for one in (model, alone):
                for parameter in one.parameters():
                    parameter.data.mul_(factor)

    def assert_scales(count):
        named = weights_of(model)
        assert len(named) == count
        for name, weight in named.items():
            exact = alone.get_submodule(name).weight.detach()
            assert torch.equal(weight.scale, quantize(exact, weight.payload.spec).scale)

    grown(2)
    with count_communication() as count:
        model.unshard()
        model[1].unshard()
    assert_scales(3)
    assert count.of("all-reduce").calls == 2
    loss_of(model, batch(0)).backward()
    grown(2)
    with count_communication() as count, torch.no_grad():
        model[1](torch.randn(2, 64))
    model[1].unshard()
    assert_scales(2)
    assert count.of("all-reduce").calls == 1
    reshard(model)

    class Method(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

        def generate(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    torch.manual_seed(0)
    one = Method()
    other = Method()
    other.load_state_dict(one.state_dict())
    for made in (one, other):
        convert_to_float8(made, O1)
    for layer in one.layers[:2]:
        fully_shard(layer)
    fully_shard(one)
    connect_fsdp(one, O1)
    register_fsdp_forward_method(one, "generate")
    for factor in (1, 3):
        losses = []
        for made in (one, other):
            with torch.no_grad():
                for parameter in made.parameters():
                    parameter.mul_(factor)
            x = torch.ones(4, 64)
            loss = made.generate(x).float().square().mean()
            loss.backward()
            losses.append(float(loss))
        assert losses[0] == losses[1]


@on_ranks(2)
def test_recomputed_and_prefetched_weights_are_those_of_a_plain_run():
    made = []
    for kind in ("plain", "reentrant", "not reentrant", "prefetched"):
        config = FP8Config(recipe="delayed", opt_level="O1")
        model, _ = sharded(config)
        if "reentrant" in kind:
            for block in model:
                if isinstance(block, Block):
                    block.forward = functools.partial(
                        checkpoint, block.forward, use_reentrant=kind == "reentrant"
                    )
        if kind == "prefetched":
            model.set_modules_to_forward_prefetch([model[1], model[2]])
            model[2].set_modules_to_backward_prefetch([model[1]])
        for step in range(2):
            model.zero_grad()
            with count_communication() as count:
                loss = loss_of(model, batch(step))
                loss.backward()
            renew_scales()
        grads = torch.cat([p.grad.to_local().flatten() for p in model.parameters()])
        history = model[1].up.fp8_amax_history.clone()
        made.append((loss, grads, history))
        assert count.of("all-reduce").calls == 1
        assert all(map(torch.equal, made[-1], made[0])), kind


@on_ranks(2)
def test_transposed_weights_on_two_ranks_are_those_of_one():
    """GPT-2's, one with uneven shards. Payloads gathered are those cast on one rank, but for
    rowwise's, whose rows are the inputs' on a shard; gradients are scattered in 8 bits.
    """
    for recipe in RECIPES:
        config = FP8Config(recipe=recipe, opt_level="O1", emulate=True)
        torch.manual_seed(0)
        model = nn.Sequential(Conv1D(96, 32), nn.GELU(), Conv1D(64, 96), Conv1D(48, 64))
        for layer in (model[0], model[2], model[3]):
            nn.init.normal_(layer.weight, std=0.2)
        alone = copy.deepcopy(model)
        for layer in (model[0], model[2], model[3], model):
            fully_shard(layer)
        convert_to_float8(model, config)
        convert_to_float8(alone, config)
        connect_fsdp(model, config)
        outputs = []
        for one in (model, alone):
            outputs.append(one(batch(0)))
            outputs[-1].square().mean().backward()
        for shard, whole in zip(model.parameters(), alone.parameters(), strict=True):
            dist.all_reduce(whole.grad)
            if whole.ndim == 2:
                assert sqnr_db(whole.grad / RANKS, shard.grad.full_tensor()) > 30
        output = sqnr_db(outputs[1].detach(), outputs[0].detach())
        assert output > (35 if recipe == "rowwise" else 100)
