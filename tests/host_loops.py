"""A small model, and the loops of one's own and of each host that train it.

Where the environment names several ranks, as torchrun's does, they run under DDP, and the first one
alone saves where its host leaves that to the user.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import torch_fp8
from torch_fp8.distributed import connect_ddp, ddp_options

SIDE = 64
Visit = Callable[[nn.Module, Any], None]


class Net(nn.Module):
    """Embedding, two linear layers and a norm; all weights but the norm's are split."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(SIDE, SIDE)
        self.norm = nn.LayerNorm(SIDE)
        self.wide = nn.Linear(SIDE, 2 * SIDE)
        self.narrow = nn.Linear(2 * SIDE, SIDE)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        y = self.narrow(F.gelu(self.wide(self.norm(self.table(x)))))
        return {"loss": F.mse_loss(y.float(), F.one_hot(x, SIDE).float()), "logits": y}


def data() -> TensorDataset:
    return TensorDataset(
        torch.randint(0, SIDE, (32, 4), generator=torch.Generator().manual_seed(1))
    )


def batch() -> Tensor:
    x: Tensor = data()[:8][0]
    return x


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def loader() -> DataLoader[Any]:
    """Return what a loop of one's own reads on this rank."""
    return DataLoader(data(), sampler=range(rank(), 32, ranks()), batch_size=8 // ranks())


def own_loop(
    config: Any, visit: Visit, folder: Path, model: nn.Module | None = None
) -> dict[str, Tensor]:
    model = model or Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch_fp8.convert_to_float8(model, config)
    torch_fp8.convert_optimizer(optimizer, config, model=model)
    called: nn.Module = model
    if ranks() > 1:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        called = ddp = DistributedDataParallel(model, **ddp_options(model, [optimizer]))
        connect_ddp(ddp, [optimizer], config)
    for i, (x,) in enumerate(loader()):
        with torch.autocast("cpu", torch.bfloat16):
            loss = called(x)["loss"]
        loss.backward()
        optimizer.step()
        if i == 1:
            visit(model, optimizer)
        optimizer.zero_grad()
    if rank() == 0:
        torch.save(model.state_dict(), folder / "model.pt")
    _wait()
    return torch.load(folder / "model.pt")


def _wait() -> None:
    if ranks() > 1:
        dist.barrier()


def accelerate(
    config: Any, visit: Visit, folder: Path, model: nn.Module | None = None
) -> dict[str, Tensor]:
    from accelerate import Accelerator

    from accelerate_fp8 import FP8Kwargs

    accelerator = Accelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=[FP8Kwargs(config)])
    model = model or Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(data(), batch_size=8 // ranks())
    )
    for i, (x,) in enumerate(loader):
        accelerator.backward(model(x)["loss"])
        optimizer.step()
        if i == 1:
            visit(accelerator.unwrap_model(model), optimizer)
        optimizer.zero_grad()
    accelerator.save_model(model, folder)
    accelerator.wait_for_everyone()
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def fabric(
    config: Any, visit: Visit, folder: Path, model: nn.Module | None = None
) -> dict[str, Tensor]:
    from lightning.fabric import Fabric

    from lightning_fp8 import FP8Precision

    strategy = "ddp" if ranks() > 1 else "auto"
    fabric = Fabric(
        accelerator="cpu", devices=ranks(), strategy=strategy, plugins=[FP8Precision(config)]
    )
    fabric.launch()
    model = model or Net()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for i, (x,) in enumerate(loader()):
        fabric.backward(model(x)["loss"])
        optimizer.step()
        if i == 1:
            visit(model.module, optimizer)
        optimizer.zero_grad()
    fabric.save(folder / "model.ckpt", {"model": model, "optimizer": optimizer})
    fabric.barrier()
    return torch.load(folder / "model.ckpt")["model"]


def lightning(
    config: Any, visit: Visit, folder: Path, model: nn.Module | None = None
) -> dict[str, Tensor]:
    import lightning as L

    from lightning_fp8 import FP8Precision

    class Task(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model or Net()

        def training_step(self, batch: Any, index: int) -> Tensor:
            return self.net(batch[0])["loss"]

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            if index == 1:
                visit(self.net, self.optimizers())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    trainer = L.Trainer(
        accelerator="cpu", devices=ranks(), strategy="ddp" if ranks() > 1 else "auto",
        max_epochs=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, plugins=[FP8Precision(config)], enable_checkpointing=True,
        callbacks=[L.pytorch.callbacks.ModelCheckpoint(folder, filename="model")],
    )  # fmt: skip
    trainer.fit(Task(), DataLoader(data(), batch_size=8 // ranks()))
    trainer.strategy.barrier()
    saved = torch.load(folder / "model.ckpt", weights_only=False)["state_dict"]
    return {name.removeprefix("net."): x for name, x in saved.items()}


def trainer(
    config: Any, visit: Visit, folder: Path, model: nn.Module | None = None
) -> dict[str, Tensor]:
    from safetensors.torch import load_file
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Visitor(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, optimizer, **options):  # type: ignore[no-untyped-def]
            if state.global_step == 1:
                visit(model, optimizer)

    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=8 // ranks(),
        num_train_epochs=1, use_cpu=True, learning_rate=1e-2, report_to=[],
        save_strategy="no", disable_tqdm=True, bf16=True,
    )  # fmt: skip
    rows = [{"x": x} for (x,) in data()]
    host = Trainer(model or Net(), arguments, train_dataset=rows, callbacks=[Visitor()])
    host.label_names = []
    host.train()
    host.save_model(str(folder))
    _wait()
    return load_file(folder / "model.safetensors")


WAYS = {f.__name__: f for f in (own_loop, accelerate, fabric, lightning, trainer)}
