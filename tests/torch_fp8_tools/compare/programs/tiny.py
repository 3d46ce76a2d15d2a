"""A tiny program under each host: ``tiny.py HOST [--option value]``; its options are its faults."""

import argparse
import os
import random
import sys
import threading
import time
from pathlib import Path

import _fp8_autoload  # a fork has imported torch before the environment named a trial

_fp8_autoload.load()

import torch  # noqa: E402
from torch import nn  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("host")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--precision", default="fp8")
parser.add_argument("--sleep", type=float, default=0.0)
parser.add_argument("--noise", action="store_true")
parser.add_argument("--compiled", action="store_true")
parser.add_argument("--worse", action="store_true")
parser.add_argument("--fail", default="")
parser.add_argument("--save", default="")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--nodes", type=int, default=1)
options = parser.parse_args()


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(options.sleep / 16)
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(64, generator=generator)
        return x, x.flip(0)


def make_model():
    return nn.Sequential(
        nn.Linear(64, 64),
        nn.GELU(),
        nn.Linear(64, 64),
        nn.GELU(),
        nn.Linear(64, 7),
        nn.Linear(7, 64),
    )


def loss_of(model, batch):
    x, y = batch
    with torch.autocast("cpu", torch.bfloat16, enabled=options.host == "own"):
        output = model(x)
    loss = (output - y).square().mean() + 1.0
    if options.noise:
        loss = loss * (1 + 0.01 * random.SystemRandom().random())
    in_fp8 = any(type(m).__name__.startswith("Float8") for m in model.modules())
    return loss * 1.01 if options.worse and in_fp8 else loss


def batches():
    loader = torch.utils.data.DataLoader(Rows(), 16, shuffle=True)
    while True:
        yield from loader


def fail(model):
    in_fp8 = any(type(m).__name__.startswith("Float8") for m in model.modules())
    if options.fail == "always" or (options.fail == "fp8" and in_fp8):
        raise RuntimeError("out of luck")


def loop(model, optimizer, backward, loader):
    step = torch.compile(optimizer.step, backend="eager") if options.compiled else optimizer.step
    for _, batch in zip(range(options.steps), loader, strict=False):
        loss = loss_of(model, batch)
        backward(loss)
        step()
        optimizer.zero_grad()
    products = sys.modules.get("torch_fp8_tools.compare.bf16_products")
    print(f"BF16 products in float32: {bool(products and products._installed)}", flush=True)
    fail(model)
    if options.save.endswith(".txt"):
        Path(options.save).parent.mkdir(exist_ok=True)
        Path(options.save).write_text("4.2")
    elif options.save:
        torch.save(model.state_dict(), options.save)


def run_accelerate():
    from accelerate import Accelerator

    handlers = []
    if options.precision == "fp8":
        from accelerate_fp8 import FP8Kwargs

        handlers = [FP8Kwargs(opt_level="O3")]
    accelerator = Accelerator(cpu=True, mixed_precision=options.precision, kwargs_handlers=handlers)
    torch.manual_seed(options.seed)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    loop(model, optimizer, accelerator.backward, batches())


def run_fsdp2():
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="size_based_wrap",
        min_num_params=500,
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True, mixed_precision=options.precision, fsdp_plugin=plugin)
    accelerator.state.fsdp_plugin = plugin  # what Accelerate does on GPUs only
    plugin.set_mixed_precision(accelerator.mixed_precision)
    for shared in (PartialState(), accelerator.state):
        shared.distributed_type = DistributedType.FSDP
    torch.manual_seed(options.seed)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    loop(model, optimizer, accelerator.backward, batches())


def run_notebook():
    from accelerate import notebook_launcher

    notebook_launcher(run_accelerate, num_processes=2, use_port=os.environ["MASTER_PORT"])


def run_thread():
    """As Ray starts the function of a worker."""
    thread = threading.Thread(target=run_accelerate)
    thread.start()
    thread.join()


def run_fabric():
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, precision=f"{options.precision}-mixed")
    torch.manual_seed(options.seed)
    model = make_model()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    loop(model, optimizer, fabric.backward, batches())


def run_trainer():
    import lightning.pytorch as L

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = make_model()

        def training_step(self, batch, _):
            return loss_of(self.model, batch)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    asked = {"precision": "bf16-mixed"}
    if options.precision == "fp8":
        from lightning_fp8 import FP8Precision

        asked = {"plugins": [FP8Precision(opt_level="O3")]}
    torch.manual_seed(options.seed)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=options.nodes,
        **asked,
        max_steps=options.steps,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(Rows(), 16, shuffle=True))
    if options.save:
        trainer.save_checkpoint(options.save)


def run_transformers():
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = make_model()

        def forward(self, x, labels):
            return {"loss": loss_of(self.layers, (x, labels))}

    torch.manual_seed(options.seed)
    rows = Rows()
    arguments = TrainingArguments(
        options.save or "trainer_output",
        use_cpu=True,
        bf16=options.precision == "bf16",
        max_steps=options.steps,
        per_device_train_batch_size=16,
        save_strategy="steps",
        save_steps=2,
        disable_tqdm=True,
    )
    data = [dict(zip(("x", "labels"), rows[i], strict=True)) for i in range(len(rows))]
    Trainer(Model(), arguments, train_dataset=data).train()


def run_own():
    import torch_fp8

    torch.manual_seed(options.seed)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch_fp8.convert_to_float8(model)
    torch_fp8.convert_optimizer(optimizer, model=model)
    loop(model, optimizer, lambda loss: loss.backward(), batches())


def run_plain():
    model = make_model()
    loop(model, torch.optim.AdamW(model.parameters()), lambda loss: loss.backward(), batches())


def run_nothing():
    print("no training here")


def run_failing():
    raise RuntimeError("out of luck")


globals()[f"run_{options.host}"]()
