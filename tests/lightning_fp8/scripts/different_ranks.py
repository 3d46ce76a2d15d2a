"""different_ranks.py HOST KIND: TORCH_FP8_CONFIG is set on rank 1 of 2 alone; what each is told.

KIND is sharded (a Trainer with ModelParallelStrategy) or fabric.
"""

import datetime
import importlib
import os
import sys

host, kind = sys.argv[1:]
L = importlib.import_module(host)

import torch  # noqa: E402  (the host comes first, as in most scripts)
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

# Lightning starts rank 1 itself, with this set.
RANK = int(os.environ.get("LOCAL_RANK", 0))


def say(text):
    os.write(1, f"rank {RANK}: {text}\n".encode())  # at once: the ranks share one pipe


class Regression(L.LightningModule if kind != "fabric" else nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(32, 32)

    def configure_model(self):
        say("went on")

    def training_step(self, batch, _):
        return self.net(batch).sum()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def main():
    if RANK == 1:
        os.environ["TORCH_FP8_CONFIG"] = '{"opt_level": "O1", "communication": "off"}'
    strategies = importlib.import_module(f"{host}.strategies")
    name = "ModelParallelStrategy" if kind == "sharded" else "DDPStrategy"
    strategy = getattr(strategies, name)(timeout=datetime.timedelta(seconds=60))
    options = {"accelerator": "cpu", "devices": 2, "strategy": strategy, "precision": "fp8-mixed"}
    try:
        if kind == "fabric":
            fabric = L.Fabric(**options)
            fabric.launch()
            fabric.setup(Regression())
        else:
            quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
            trainer = L.Trainer(**options, max_steps=1, enable_checkpointing=False, **quiet)
            trainer.fit(Regression(), DataLoader(torch.randn(4, 32)))
    except ValueError as error:
        say(error)
    os._exit(0)


main()
