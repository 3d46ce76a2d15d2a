"""Two ranks at O2 under torchrun, of which one is killed, and a run that goes on where it was.

Attempt 0: rank 1 is killed in the middle of backward of the fourth step, while rank 0 waits for its
gradients. Attempt 1: goes on from the last checkpoint to the sixth step, compares itself with a run
that nothing happened to, and is killed in the same way.
"""

import os
import signal
import sys
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

RANK, ATTEMPT = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
FOLDER, STEPS = Path(sys.argv[1]), 6


class Regression(L.LightningModule):
    def __init__(self, dies_at=None):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 96))
        self.dies_at = dies_at
        self.steps = []

    def training_step(self, *_):
        # Lightning starts the loader anew: the step says what to read.
        self.steps.append(self.global_step)
        x = torch.randn(4, 96, generator=torch.Generator().manual_seed(2 * self.global_step + RANK))
        y = self.net[0](x)
        if self.global_step == self.dies_at and RANK == 1:
            y.register_hook(die)
        return (self.net[1:](y).float() - x).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def die(_):
    say("is killed")
    os.kill(os.getpid(), signal.SIGKILL)


def say(text):
    os.write(1, f"attempt {ATTEMPT} rank {RANK} {text}\n".encode())


def fit(folder, dies_at=None, steps=STEPS):
    module = Regression(dies_at)
    checkpoint = ModelCheckpoint(
        folder, "last", every_n_train_steps=1, enable_version_counter=False
    )
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        precision="fp8-mixed",
        max_steps=steps,
        callbacks=[checkpoint],
        use_distributed_sampler=False,
        **quiet,
    )
    last = folder / "last.ckpt"
    trainer.fit(module, DataLoader(range(12)), ckpt_path=last if last.exists() else None)
    return module


def main():
    module = fit(FOLDER / "dying", dies_at=3 if ATTEMPT == 0 else None)
    say(f"trained steps {module.steps}")
    whole = fit(FOLDER / "whole")
    say(f"trained steps {whole.steps}")
    pairs = zip(module.state_dict().values(), whole.state_dict().values(), strict=True)
    say(f"is equal {all(torch.equal(a, b) for a, b in pairs)}")
    dist.barrier()
    fit(FOLDER / "again", dies_at=0)


main()
