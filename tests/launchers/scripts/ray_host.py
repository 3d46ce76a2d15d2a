"""``ray_host.py {accelerate,trainer}``: a function for Ray's TorchTrainer, with the environment and
the process group that ``ray.train.torch`` 2.60 sets up in each worker before it. Prints the losses.
"""

import datetime
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import torch_fp8

kind = sys.argv[1]
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def set_up():
    """As ``_setup_torch_process_group`` and ``_TorchBackend.on_training_start`` do."""
    dist.init_process_group(
        backend="gloo",
        init_method="env://",
        rank=RANK,
        world_size=WORLD_SIZE,
        timeout=datetime.timedelta(seconds=60),
    )
    os.environ["LOCAL_RANK"] = os.environ["NODE_RANK"] = "0"  # a node for each worker
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    def forward(self, x, labels=None):
        y = self.net(x)
        return {"loss": nn.functional.mse_loss(y.float(), x), "y": y}


def rows():
    torch.manual_seed(1)
    return [{"x": row} for row in torch.randn(64, 64)]


def with_accelerate():
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="fp8", cpu=True)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(rows(), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return model.module.net[0], losses


def with_trainer():
    from transformers import Trainer, TrainerCallback, TrainingArguments

    losses = []

    class Report(TrainerCallback):  # a class made in a function, as RayTrainReportCallback may be
        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" in logs:
                losses.append(logs["loss"])

    arguments = TrainingArguments(
        "out", per_device_train_batch_size=8, num_train_epochs=1, logging_steps=1, use_cpu=True,
        report_to=[], save_strategy="no", learning_rate=1e-2, lr_scheduler_type="constant",
        data_seed=0, disable_tqdm=True,
    )  # fmt: skip
    model = Net()
    trainer = Trainer(model, arguments, train_dataset=rows(), callbacks=[Report()])

    # As ray.train.huggingface.transformers.prepare_trainer does.
    class RayTransformersTrainer(trainer.__class__):
        def get_train_dataloader(self):
            return super().get_train_dataloader()

    trainer.__class__ = RayTransformersTrainer
    trainer.train()
    return model.net[0], losses


set_up()
layer, losses = {"accelerate": with_accelerate, "trainer": with_trainer}[kind]()
in_fp8 = isinstance(layer, torch_fp8.Float8Linear)
text = " ".join(float(value).hex() for value in losses)
os.write(1, f"rank {RANK} losses {in_fp8} {text}\n".encode())
dist.barrier()
os._exit(0)
