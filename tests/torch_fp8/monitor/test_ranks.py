import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.internals import FILE_NAME, is_paused
from tests.steps import monitored
from tests.torch_fp8.distributed.ranks import RANK, RANKS, of_ranks, on_ranks, same_on_ranks
from torch_fp8 import FP8Config, Monitor, convert_to_float8
from torch_fp8.distributed import Float8ColwiseParallel, Float8RowwiseParallel, connect_fsdp


@on_ranks(2)
def test_ranks_join_their_numbers_and_fall_back_together():
    config = FP8Config(
        recipe="tensorwise", opt_level="O1", monitor=1, on_alarm="bf16", fallback_steps=2
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    convert_to_float8(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    logged, paused = {}, {}
    folder = tempfile.mkdtemp()
    monitor = monitored(model, optimizer, config, logged, folder=folder)
    ddp = DistributedDataParallel(model)
    generator = torch.Generator().manual_seed(RANK)
    amax = loss_of_three = None
    for step in range(1, 21):
        x = torch.randn(16, 64, generator=generator)
        target = x
        if step == 2 and RANK == 1:
            x = x * torch.where(torch.arange(64) == 5, 1e6, 1.0)
        loss = (ddp(x) - target).square().mean()
        loss = loss / loss.detach().clamp(min=1)
        loss.backward()
        monitor.observe_loss(loss)
        optimizer.step()
        optimizer.zero_grad()
        paused[step] = [name for name, module in model.named_modules() if is_paused(module)]
        if step == 20:
            amax, loss_of_three = x.abs().max().item(), loss.item()
    assert [paused[step] for step in (2, 3, 4)] == [["0"], ["0"], []]
    first, second = same_on_ranks(logged[20]), of_ranks([amax, loss_of_three])
    assert first["fp8/0/input/amax"] == max(amax for amax, _ in second)
    assert first["fp8/loss"] == pytest.approx(sum(loss for _, loss in second) / 2, rel=1e-5)
    assert (Path(folder) / FILE_NAME).exists() == (RANK == 0)


def _train(model, config, x, steps=1):
    """Train a model's only layer for some steps, each on this rank's x; return what is logged."""
    optimizer, logged = torch.optim.SGD(model.parameters(), lr=0.0), {}
    monitor = monitored(model, optimizer, config, logged)
    for step in range(1, steps + 1):
        if step == steps > 1:
            with torch.no_grad():
                model[0].weight.mul_(1e4)
        y = model(x)
        y.square().mean().backward()
        optimizer.step()
    events = [(e["step"], e["event"]) for e in monitor.events]
    monitor.close()
    return logged[steps], events


@on_ranks(2)
def test_a_weight_that_is_gathered_in_fp8_is_compared_with_its_shards():
    seen = {}
    for recipe in ("tensorwise", "rowwise", "blockwise", "mxfp8", "delayed"):
        config = FP8Config(recipe=recipe, opt_level="O1", monitor=1, communication="fp8")
        for how in ("whole", "sharded"):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(160, 208, bias=False))
            model[0].weight.data.mul_(2.0 ** torch.randint(-9, 9, (208, 1)))
            if recipe != "delayed":
                model[0].weight.data[200, 3] = 40.0  # on the second rank
            convert_to_float8(model, config)
            if how == "sharded":
                fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
                connect_fsdp(model, config)
            x = torch.randn(16, 160)
            steps = 3 if recipe == "delayed" else 1
            seen[how] = series, events = same_on_ranks(_train(model, config, x, steps))
            if recipe == "delayed":
                assert series["fp8/0/weight/sqnr"] < 1
                assert series["fp8/0/weight/saturation"] > 0.6
                assert events == [(3, "alarm"), (3, "left_out")]
        (whole, _), (sharded, _) = seen.values()
        for name, room in (("amax", 0), ("scale", 0), ("sqnr", 0.5), ("underflow", 0.05)):
            name = f"fp8/0/weight/{name}"
            if recipe != "delayed":
                assert sharded[name] == pytest.approx(whole[name], abs=room), (recipe, name)
        if recipe == "tensorwise":
            assert sharded["fp8/0/weight/amax"] == 40.0
            for name in ("fp8/0/input/sqnr", "fp8/0/grad_output/sqnr"):
                assert sharded[name] == pytest.approx(whole[name], abs=0.1)


@on_ranks(2)
def test_what_ranks_gather_in_fp8_is_compared_with_their_parts():
    seen = {}
    for recipe in ("tensorwise", "rowwise"):
        config = FP8Config(recipe=recipe, opt_level="O1", monitor=1, communication="fp8")
        for style in (None, Float8ColwiseParallel, Float8RowwiseParallel):
            torch.manual_seed(0)
            model, x = nn.Sequential(nn.Linear(64, 96, bias=False)), torch.randn(32, 64)
            convert_to_float8(model, config)
            if style is not None:
                of = {"input": Shard(0)} if style is Float8ColwiseParallel else {"output": Shard(0)}
                layouts = {f"{name}_layouts": layout for name, layout in of.items()}
                plan = {"0": style(**layouts)}
                parallelize_module(model, init_device_mesh("cpu", (RANKS,)), plan)
                x = x.chunk(RANKS, dim=0 if "input" in of else 1)[RANK]
            seen[style] = same_on_ranks(_train(model, config, x)[0])
        for style, kind in (
            (Float8ColwiseParallel, "input"),
            (Float8RowwiseParallel, "grad_output"),
        ):
            for name, room in (("amax", 0.01), ("sqnr", 1.0)):
                name = f"fp8/0/{kind}/{name}"
                whole = pytest.approx(seen[None][name], abs=room)
                assert seen[style][name] == whole, (recipe, name)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.gate, self.up = nn.Linear(64, 128, bias=False), nn.Linear(64, 128, bias=False)
        self.down = nn.Linear(128, 64, bias=False)
        for layer in (self.gate, self.up, self.down):
            layer.weight.data.normal_(generator=generator).mul_(0.1)
        self.up.weight.data[100] = self.gate.weight.data[100]  # on the second rank

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


@on_ranks(2)
def test_tensor_parallel_ranks_measure_their_parts_and_fall_back_together():
    config = FP8Config(
        recipe="tensorwise", smooth_swiglu=True, opt_level="O1", monitor=1, on_alarm="bf16"
    )
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    seen = {}
    for how in ("whole", "parallel"):
        model = MLP()
        convert_to_float8(model, config)
        if how == "parallel":
            parallelize_module(model, init_device_mesh("cpu", (RANKS,)), plan)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        logged = {}
        monitor = Monitor(model, [optimizer], config, log=lambda s, _, to=logged: to.update(s))
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
        for _ in range(2):
            loss = model(x).square().mean()
            loss.backward()
            monitor.observe_loss(loss)
            optimizer.step()
            optimizer.zero_grad()
        assert [n for n, m in model.named_modules() if is_paused(m)] == ["down"]
        seen[how] = same_on_ranks(logged)
        monitor.close()
    whole, parts = seen.values()
    assert parts.keys() == whole.keys()
    for name in ("gate/input/amax", "down/input/amax", "up/weight/amax", "swiglu/alignment"):
        assert parts[f"fp8/{name}"] == pytest.approx(whole[f"fp8/{name}"], rel=0.02), name
    for name, room in (("down/input/sqnr", 0.8), ("gate/grad_output/sqnr", 2.0)):
        assert parts[f"fp8/{name}"] == pytest.approx(whole[f"fp8/{name}"], abs=room), name
    assert parts["fp8/loss"] == pytest.approx(whole["fp8/loss"], rel=0.01)
