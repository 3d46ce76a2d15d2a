"""Trains with a monitor on two ranks, with DDP and sharded; run by run_cases.py."""

import tempfile
from pathlib import Path

import torch
from run_cases import RANK, RANKS
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.internals import FILE_NAME, is_paused
from torch_fp8 import FP8Config, Monitor, convert_to_float8
from torch_fp8.distributed import Float8ColwiseParallel, Float8RowwiseParallel, connect_fsdp


def case_data_parallel():
    config = FP8Config(
        recipe="tensorwise", opt_level="O1", monitor=1, on_alarm="bf16", fallback_steps=2
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    convert_to_float8(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    logged, paused = {}, {}
    folder = tempfile.mkdtemp()
    monitor = Monitor(
        model,
        [optimizer],
        config,
        folder=folder,
        log=lambda series, step: logged.update({step: series}),
    )
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
    return {
        "paused": {step: paused[step] for step in (2, 3, 4)},
        "series": logged[20],
        "amax": amax,
        "loss": loss_of_three,
        "lines": (Path(folder) / FILE_NAME).exists(),
    }


def case_sharded():
    config = FP8Config(recipe="tensorwise", opt_level="O1", monitor=1, communication="fp8")
    generator = torch.Generator().manual_seed(7)
    whole = torch.randn(64, 64, generator=generator)
    whole[60, 3] = 40.0  # on the second rank
    seen = {}
    for how in ("whole", "sharded"):
        model = nn.Sequential(nn.Linear(64, 64, bias=False))
        model[0].weight.data.copy_(whole)
        convert_to_float8(model, config)
        if how == "sharded":
            fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
            connect_fsdp(model, config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        logged = {}
        monitor = Monitor(model, [optimizer], config, log=lambda s, _, to=logged: to.update(s))
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
        model(x).square().mean().backward()
        optimizer.step()
        monitor.close()
        seen[how] = logged
    return seen


def _train(model, config, x, steps=1):
    """Train a model's only layer for some steps, each on this rank's x; return what is logged."""
    optimizer, logged = torch.optim.SGD(model.parameters(), lr=0.0), {}
    monitor = Monitor(model, [optimizer], config, log=lambda s, step: logged.update({step: s}))
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


def case_outgrown():
    """A weight that FSDP2 gathers in FP8, whole and sharded, of several recipes."""
    seen = {}
    for recipe in ("rowwise", "blockwise", "mxfp8", "delayed"):
        config = FP8Config(recipe=recipe, opt_level="O1", monitor=1, communication="fp8")
        for how in ("whole", "sharded"):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(160, 208, bias=False))
            model[0].weight.data.mul_(2.0 ** torch.randint(-9, 9, (208, 1)))
            convert_to_float8(model, config)
            if how == "sharded":
                fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
                connect_fsdp(model, config)
            x = torch.randn(16, 160)
            seen[f"{recipe} {how}"] = _train(model, config, x, 3 if recipe == "delayed" else 1)
    return seen


def case_gathered():
    """Inputs and gradients whose tokens two ranks gather in FP8, beside the whole ones."""
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
            name = "whole" if style is None else style.__name__
            seen[f"{recipe} {name}"] = _train(model, config, x)[0]
    return seen


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


def case_tensor_parallel():
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
        seen[how] = [logged, [n for n, m in model.named_modules() if is_paused(m)]]
        monitor.close()
    return seen
