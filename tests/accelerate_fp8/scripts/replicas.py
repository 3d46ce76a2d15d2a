"""DDP at every level: each rank prints what it ends with. Usage: replicas.py MODE..."""

import sys
import warnings

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import DDPCommunicationHookType
from torch import nn

from accelerate_fp8 import FP8Config, FP8Kwargs

LEVELS = {
    "O1": FP8Config(opt_level="O1"),
    "O2": FP8Config(),
    "O3": FP8Config(opt_level="O3"),
    "unused": FP8Config(opt_level="O3"),
    "late": FP8Config(),
    "hook": FP8Config(opt_level="O1"),
}


class Training:
    def __init__(self, mode):
        handlers = [FP8Kwargs(LEVELS[mode])]
        if mode == "unused":
            handlers.append(DistributedDataParallelKwargs(find_unused_parameters=True))
        if mode == "hook":
            users = DDPCommunicationHookType.FP16
            handlers.append(DistributedDataParallelKwargs(comm_hook=users))
        self.accelerator = Accelerator(
            mixed_precision="fp8", kwargs_handlers=handlers, cpu=True, gradient_accumulation_steps=2
        )
        self.rank = self.accelerator.process_index
        torch.manual_seed(self.rank)  # DDP makes the ranks equal
        model = nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 64))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)
        if mode == "late":
            model = self.accelerator.prepare(model)
            optimizer, scheduler = self.accelerator.prepare(optimizer, scheduler)
        else:
            optimizer, model, scheduler = self.accelerator.prepare(optimizer, model, scheduler)
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler

    def steps(self, *numbers):
        """The ranks' mean loss of the last micro-batch; `grad` is then what the step has used."""
        for number in numbers:
            generator = torch.Generator().manual_seed(2 * number + self.rank)
            x = torch.randn(8, 64, generator=generator)
            with self.accelerator.accumulate(self.model):
                loss = nn.functional.mse_loss(self.model(x), x)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                    self.grad = self.model.module[0].weight.grad
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        return self.accelerator.reduce(loss.detach(), "mean").item()

    def sums(self):
        weight = self.model.module[0].weight
        residual = getattr(weight, "residual", torch.zeros(1))
        total = sum(p.detach().double().sum() for p in self.model.parameters())
        return f"{total.item():.17g} {residual.double().sum().item():.0f}"


def run(mode):
    training = Training(mode)
    loss = training.steps(*range(8))
    weight, kind = training.model.module[0].weight, type(training.grad).__name__
    said = (
        f"{mode} rank {training.rank}: "
        f"weight {type(weight).__name__} grad {kind} view {training.model.gradient_as_bucket_view} "
        f"loss {loss:.4f} sums {training.sums()}"
    )
    training.accelerator.save_state(f"state_{mode}")
    expected = training.steps(8, 9, 10, 11), training.sums()
    resumed = Training(mode)
    resumed.accelerator.load_state(f"state_{mode}")
    return f"{said} resumed {(resumed.steps(8, 9, 10, 11), resumed.sums()) == expected}\n"


for mode in sys.argv[1:]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "no gradient has 8 bits")
        print(run(mode), end="", flush=True)
