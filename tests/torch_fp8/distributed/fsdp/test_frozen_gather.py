import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tests.comm_counter import count_communication
from tests.internals import Float8FrozenWeight
from tests.torch_fp8.distributed.cases.fsdp_ranks import (
    Block,
    batch,
    loss_of,
    model_of,
    reshard,
    unshard,
    weights_of,
)
from tests.torch_fp8.distributed.ranks import RANK, RANKS, on_ranks
from torch_fp8 import FP8Config, convert_to_float8, freeze, memory_report
from torch_fp8.distributed import connect_fsdp

pytestmark = pytest.mark.long


class Adapted(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.base = layer
        self.low = nn.Linear(layer.in_features, 4, bias=False)
        self.high = nn.Linear(4, layer.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.high(self.low(x))


CONFIG = FP8Config(recipe="tensorwise", frozen_weights="fp8", skip=("low", "high"))


def adapted(hidden=96):
    model = model_of(hidden=hidden)
    for block in model:
        if isinstance(block, Block):
            block.requires_grad_(False)
            block.up, block.down = Adapted(block.up), Adapted(block.down)
    return model


def shard(model, config=CONFIG, **options):
    report = convert_to_float8(model, config)
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model:
        if isinstance(block, Block):
            fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return report, connect_fsdp(model, config)


def frozen_shards(model):
    shards = (p._local_tensor for p in model.parameters() if isinstance(p, DTensor))
    return [s for s in shards if isinstance(s, Float8FrozenWeight)]


@on_ranks(2)
def test_shards_take_a_byte_and_train_as_on_one_device():
    for hidden in (256, 97):
        alone = adapted(hidden)
        model = copy.deepcopy(alone)
        convert_to_float8(alone, CONFIG)
        report, connected = shard(model)
        held = frozen_shards(model)
        assert len(report.frozen.frozen) == len(held) == connected.num_frozen == 4
        payload = sum(s.qdata.untyped_storage().nbytes() for s in held)
        assert payload == sum(s.numel() for s in held)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, alone)]
        for step in range(3):
            of_both = []
            for one, optimizer in zip((model, alone), optimizers, strict=True):
                loss = loss_of(one, batch(step, (0,)))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                of_both.append(float(loss))
            assert of_both[0] == pytest.approx(of_both[1], rel=2e-2 if step or RANK else 1e-3)
        unshard(model)
        of_whole = {n: w for n, w in weights_of(model).items() if "base" in n}
        assert len(of_whole) == 4
        for name, weight in of_whole.items():
            codes = weight.payload.qdata, alone.get_submodule(name).weight.qdata
            assert torch.equal(*(c.view(torch.uint8) for c in codes))
        reshard(model)
        assert connect_fsdp(model, CONFIG).num_frozen == len(frozen_shards(model)) == 4


@on_ranks(2)
def test_a_sharded_model_is_frozen_in_place():
    alone = model_of()
    model = copy.deepcopy(alone)
    config = FP8Config(recipe="tensorwise")
    _, connected = shard(model, config)
    before = memory_report(model).weights
    report = freeze(model)
    freeze(alone, config)
    assert connected.num_frozen == 0
    assert len(report.frozen) == len(frozen_shards(model)) == 5
    assert memory_report(model).weights == before - 3 * report.num_params
    assert float(loss_of(model, batch(0))) == pytest.approx(
        float(loss_of(alone, batch(0))), rel=1e-5
    )


@on_ranks(2)
def test_a_frozen_weight_travels_as_bytes():
    counts = {}
    for frozen in ("fp8", "keep"):
        config = FP8Config(
            recipe="tensorwise", frozen_weights=frozen, communication="off", skip=("low", "high")
        )
        model = adapted(256)
        shard(model, config)
        with torch.no_grad(), count_communication() as count:
            model(batch(0))
        counts[frozen] = count.payload_bytes
    assert counts["fp8"] < 0.5 * counts["keep"]


@on_ranks(2)
def test_state_dicts_are_plain_and_nothing_written_is_lost():
    alone = adapted(97)
    model = copy.deepcopy(alone)
    convert_to_float8(alone, CONFIG)
    shard(model)
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(model, options=options)
    expected = alone.state_dict()
    assert {type(v) for v in state.values()} == {torch.Tensor}
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    own = model.state_dict()
    assert {type(v.to_local()) for v in own.values()} == {torch.Tensor}
    model.load_state_dict(own)
    other = {n: v * 2 for n, v in own.items()}
    before = [shard.qdata.clone() for shard in frozen_shards(model)]
    model.load_state_dict(own)
    assert len(before) == 4
    for shard_, old in zip(frozen_shards(model), before, strict=True):
        assert torch.equal(shard_.qdata.view(torch.uint8), old.view(torch.uint8))
    model.load_state_dict(other)
    alone.load_state_dict({n: v * 2 for n, v in expected.items()})
    written = get_model_state_dict(model, options=options)
    for name, value in alone.state_dict().items():  # bytes and scales are those of one device
        assert torch.equal(written[name], value), name
    first = float(loss_of(model, batch(0)))
    assert first == pytest.approx(float(loss_of(alone, batch(0))), rel=1e-3)
    with torch.no_grad():
        for one in (model, alone):
            for part in one.modules():
                if isinstance(part, Adapted):
                    part.base.weight.mul_(0.3).add_(1.0)
    second = float(loss_of(model, batch(0)))
    assert second == pytest.approx(float(loss_of(alone, batch(0))), rel=1e-3)
    assert second != pytest.approx(first, rel=1e-2)
    another = adapted(97)
    shard(another)
    reshard(model)
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), another.parameters(), strict=True):
            mine.copy_(theirs)
    assert loss_of(model, batch(0)) == loss_of(another, batch(0))
    assert len(frozen_shards(model)) == 4


@on_ranks(2)
def test_they_survive_offloading_and_moving():
    model = adapted(97)
    shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    alone = adapted(97)
    convert_to_float8(alone, CONFIG)
    expected = pytest.approx(float(loss_of(alone, batch(0))), rel=1e-5)
    assert float(loss_of(model, batch(0))) == expected
    assert len(frozen_shards(model)) == 4
    model = adapted(97)
    shard(model)
    model.to(torch.float32)
    model._apply(lambda t: t.clone())
    assert float(loss_of(model, batch(0))) == expected
    assert len(frozen_shards(model)) == 4
    model.eval()
    with torch.no_grad():
        assert float(loss_of(model, batch(0))) == expected
