import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import torch_fp8
from tests.internals import SplitShard, plain, reshard, with_data
from torch_fp8 import FP8Config
from torch_fp8.distributed import connect_fsdp, join_sharded, split_sharded

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def new_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 97), nn.LayerNorm(97), nn.Linear(97, 64))


def shard(net, **options):
    fully_shard(net[2], mp_policy=POLICY, **options)
    fully_shard(net, mp_policy=POLICY)


def make(config=None, **options):
    net = new_net()
    torch_fp8.convert_to_float8(net, config)
    shard(net, **options)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2)


def step(net, optimizer, seed):
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))
    with torch.autocast("cpu", torch.bfloat16):
        loss = (net(x.bfloat16()) - x).float().pow(2).mean()
    loss.backward()
    assert {p.grad.dtype for p in net.parameters()} == {torch.float32}
    gradients = {type(p.grad._local_tensor).__name__ for p in net.parameters()}
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), gradients


def values(net):
    return [p.to_local().detach().clone() for p in net.parameters()]


def split_names(net):
    return {n for n, p in net.named_parameters() if isinstance(p._local_tensor, SplitShard)}


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_parameters_stay_the_same_objects_through_split_training_and_join(level):
    config = FP8Config(opt_level=level)
    net, optimizer = make(config)
    parameters, before = list(net.parameters()), values(net)
    (report,) = split_sharded(net, [optimizer], config)
    assert (report.num_split, report.num_float32) == (2, 0)
    assert report.num_hooks_restored == 0
    assert split_names(net) == {"0.weight", "2.weight"}
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    assert all(type(p) is DTensor for p in net.parameters())
    for split, value in zip(values(net), before, strict=True):
        assert type(split) is torch.Tensor
        torch.testing.assert_close(split, value, rtol=2**-16, atol=0)
    assert torch_fp8.restore_weights(optimizer) == 0  # not its business
    assert split_names(net) == {"0.weight", "2.weight"}
    split_sharded(net, [optimizer], config)  # with its hooks again
    split = values(net)
    assert join_sharded(net, [optimizer]) == 2
    assert split_names(net) == set()
    assert all(map(torch.equal, split, values(net)))
    # Splitting what was joined is exact; so is training on.
    split_sharded(net, [optimizer], config)
    assert all(map(torch.equal, split, values(net)))
    losses = [step(net, optimizer, seed) for seed in range(6)]
    assert losses[0][1] == {"Float8Grad" if level == "O3" else "WideGrad", "Tensor"}
    assert losses[-1][0] < losses[0][0]
    join_sharded(net, [optimizer])
    assert all(a is b for a, b in zip(parameters, net.parameters(), strict=True))
    assert all(a is b for a, b in zip(parameters, optimizer.param_groups[0]["params"], strict=True))
    assert {p.dtype for p in net.parameters()} == {torch.float32}


def test_joined_model_computes_in_bf16_and_has_float32_gradients():
    net, optimizer = make()
    split_sharded(net, [optimizer], FP8Config())
    step(net, optimizer, 0)  # FSDP2 has fixed by now which casts it makes
    join_sharded(net, [optimizer])
    seen = []
    net[2].register_forward_pre_hook(lambda module, _: seen.append(module.weight.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        net(torch.randn(8, 64).bfloat16()).float().sum().backward()
    assert seen == [torch.bfloat16]
    assert {p.grad.dtype for p in net.parameters()} == {torch.float32}


@pytest.mark.parametrize("kind", ["left alone", "missing", "O1"])
def test_weights_that_no_converted_optimizer_trains_stay_float32(kind):
    net, optimizer = make()
    config = FP8Config(opt_level="O1") if kind == "O1" else FP8Config()
    if kind == "left alone":
        fused = type("FusedSGD", (torch.optim.SGD,), {"__module__": "apex.optimizers"})
        optimizer = fused(net.parameters(), lr=1e-2)
    elif kind == "missing":
        optimizer = torch.optim.AdamW(net[0].parameters(), lr=1e-2)
    split_sharded(net, [optimizer], config)
    assert split_names(net) == ({"0.weight"} if kind == "missing" else set())
    with torch.autocast("cpu", torch.bfloat16):
        net(torch.randn(8, 64).bfloat16()).float().sum().backward()
    assert {p.grad.dtype for p in net.parameters()} == {torch.float32}
    optimizer.step()
    assert join_sharded(net, [optimizer]) == (kind == "missing")


def test_a_second_optimizer_splits_what_it_trains():
    net, _ = make()
    first, second = (torch.optim.AdamW(net[i : i + 2].parameters()) for i in (0, 2))
    split_sharded(net, [first], FP8Config())
    assert split_names(net) == {"0.weight"}
    split_sharded(net, [second], FP8Config())
    assert split_names(net) == {"0.weight", "2.weight"}


def test_columns_are_split_too_and_an_inner_dimension_is_refused():
    net, optimizer = make(shard_placement_fn=lambda p: Shard(1) if p.ndim > 1 else Shard(0))
    assert isinstance(net[2], FSDPModule)
    before = values(net)
    split_sharded(net, [optimizer], FP8Config())
    assert net[2].weight.placements == (Shard(1),)
    assert split_names(net) == {"0.weight", "2.weight"}
    join_sharded(net, [optimizer])
    for joined, value in zip(values(net), before, strict=True):
        torch.testing.assert_close(joined, value, rtol=2**-16, atol=0)
    conv = nn.Sequential(nn.Conv1d(32, 64, 3), nn.Linear(64, 64))
    fully_shard(conv, shard_placement_fn=lambda p: Shard(1) if p.ndim == 3 else Shard(0))
    optimizer = torch.optim.AdamW(conv.parameters())
    with pytest.raises(ValueError, match=r"'0.weight' is sharded as \(Shard\(dim=1\),\)"):
        split_sharded(conv, [optimizer], FP8Config())


def in_memory(parameter, grad):
    """A whole gradient as it is held: that of a split weight in BF16."""
    split = isinstance(parameter._local_tensor, SplitShard)
    return grad.full_tensor().bfloat16().float() if split else grad.full_tensor()


READS = {
    "full_tensor": lambda p: p.full_tensor(),
    "to_local": lambda p: p.to_local(),
    "clone": lambda p: p.detach().clone().to_local(),
    "norm": lambda p: torch.linalg.vector_norm(p.detach()).full_tensor(),
    "foreach norm": lambda p: torch._foreach_norm([p.detach()])[0].full_tensor(),
    "difference": lambda p: (p.detach() - 0.01).abs().full_tensor(),
    "cpu": lambda p: p.detach().cpu().to_local(),
    "redistribute": lambda p: p.detach().redistribute(placements=[Replicate()]).to_local(),
    "double": lambda p: p.detach().double().to_local(),
    "numpy": lambda p: torch.from_numpy(p.detach().to_local().numpy().copy()),
    "state_dict": lambda p: nn.ParameterList([p]).state_dict()["0"].full_tensor(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_shards_read_as_float32_ones(read):
    net, optimizer = make()
    split_sharded(net, [optimizer], FP8Config())
    step(net, optimizer, 0)
    for parameter in net.parameters():
        whole = nn.Parameter(with_data(parameter, plain(parameter._local_tensor)))
        with torch.no_grad():
            result, expected = read(parameter), read(whole)
        assert result.dtype == expected.dtype
        assert torch.equal(result, expected)


def test_a_penalty_on_shards_has_the_gradient_of_float32_ones():
    net, optimizer = make()
    split_sharded(net, [optimizer], FP8Config())
    for parameter in net.parameters():
        whole = nn.Parameter(with_data(parameter, plain(parameter._local_tensor)))
        for weight in (parameter, whole):
            (weight - 0.01).square().sum().full_tensor().backward()
        assert torch.equal(parameter.grad.full_tensor(), in_memory(parameter, whole.grad))


WRITES = {
    "mul_": lambda p: p.mul_(1 - 1e-5),
    "add_": lambda p: p.add_(1e-6),
    "zero_": lambda p: p.zero_(),
    "clamp_": lambda p: p.clamp_(-0.011, 0.011),
    "lerp_": lambda p: p.lerp_(torch.ones_like(p), 1e-4),
    "copy_": lambda p: p.copy_(p.detach() * 1.00001),
    "data": lambda p: p.data.mul_(1 - 1e-5),
    "detach": lambda p: p.detach().mul_(1 - 1e-5),
    "to_local": lambda p: p.to_local().mul_(1 - 1e-5),
    "row": lambda p: p.to_local()[0].fill_(0.3),
    "foreach": lambda p: torch._foreach_mul_([p], 1 - 1e-5),
    "swapped": lambda p: (k := p.detach().clone(), p.zero_(), p.copy_(k)),
    "all_reduce": lambda p: dist.all_reduce(p.to_local().mul_(1 - 1e-5)),
    "init": lambda p: (torch.manual_seed(3), nn.init.uniform_(p, -0.1, 0.1)),
    "load": lambda p: nn.ParameterList([p]).load_state_dict({"0": p.detach() * 1.00001}),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@torch.no_grad()
def test_what_is_written_to_a_shard_is_kept_and_gathered(write):
    nets = []
    for _ in range(2):
        net, optimizer = make()
        split_sharded(net, [optimizer], FP8Config())
        connect_fsdp(net, FP8Config())
        nets.append(net)
    net, twin = nets
    x = torch.randn(8, 64).bfloat16()
    net(x)
    reshard(net)  # the root keeps what it has gathered
    for parameter, other in zip(net.parameters(), twin.parameters(), strict=True):
        whole = nn.Parameter(with_data(parameter, plain(parameter._local_tensor).clone()))
        write(parameter)
        write(whole)
        assert torch.equal(parameter.full_tensor(), whole.full_tensor())
        other.copy_(whole)
    assert split_names(net) == {"0.weight", "2.weight"}
    assert torch.equal(net(x), twin(x))


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_what_a_policy_computes_in_is_gathered(dtype):
    split, stock = new_net(), new_net()
    for net in (split, stock):
        for module in (net[2], net):
            fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    optimizer = torch.optim.AdamW(split.parameters(), lr=1e-2)
    split_sharded(split, [optimizer], FP8Config())
    assert split_names(split) == {"0.weight", "2.weight"}
    x = torch.randn(8, 64)
    with torch.no_grad():
        for parameter, value in zip(stock.parameters(), values(split), strict=True):
            parameter.copy_(with_data(parameter, value))
    outputs = [net(x) for net in (split, stock)]
    assert torch.equal(*outputs)
    for output in outputs:
        output.float().square().sum().backward()
    for parameter, other in zip(split.parameters(), stock.parameters(), strict=True):
        assert torch.equal(parameter.grad.full_tensor(), in_memory(parameter, other.grad))
