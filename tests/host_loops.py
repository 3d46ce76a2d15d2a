"""A small model, and the loops of one's own and of each host that train it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torch_fp8

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


def own_loop(
    config: Any, visit: Visit, folder: Path, model: nn.Module | None = None
) -> dict[str, Tensor]:
    model = model or Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch_fp8.convert_to_float8(model, config)
    torch_fp8.convert_optimizer(optimizer, config, model=model)
    for i, (x,) in enumerate(DataLoader(data(), batch_size=8)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x)["loss"]
        loss.backward()
        optimizer.step()
        if i == 1:
            visit(model, optimizer)
        optimizer.zero_grad()
    torch.save(model.state_dict(), folder / "model.pt")
    return torch.load(folder / "model.pt")


def accelerate(
    config: Any, visit: Visit, folder: Path, model: nn.Module | None = None
) -> dict[str, Tensor]:
    from accelerate import Accelerator

    from accelerate_fp8 import FP8Kwargs

    accelerator = Accelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=[FP8Kwargs(config)])
    model = model or Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(data(), batch_size=8)
    )
    for i, (x,) in enumerate(loader):
        accelerator.backward(model(x)["loss"])
        optimizer.step()
        if i == 1:
            visit(accelerator.unwrap_model(model), optimizer)
        optimizer.zero_grad()
    accelerator.save_model(model, folder)
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def fabric(
    config: Any, visit: Visit, folder: Path, model: nn.Module | None = None
) -> dict[str, Tensor]:
    from lightning.fabric import Fabric

    from lightning_fp8 import FP8Precision

    fabric = Fabric(accelerator="cpu", devices=1, plugins=[FP8Precision(config)])
    model = model or Net()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for i, (x,) in enumerate(DataLoader(data(), batch_size=8)):
        fabric.backward(model(x)["loss"])
        optimizer.step()
        if i == 1:
            visit(model.module, optimizer)
        optimizer.zero_grad()
    fabric.save(folder / "model.ckpt", {"model": model, "optimizer": optimizer})
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
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, plugins=[FP8Precision(config)], enable_checkpointing=True,
        callbacks=[L.pytorch.callbacks.ModelCheckpoint(folder, filename="model")],
    )  # fmt: skip
    trainer.fit(Task(), DataLoader(data(), batch_size=8))
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
        output_dir=str(folder), per_device_train_batch_size=8, num_train_epochs=1, use_cpu=True,
        learning_rate=1e-2, report_to=[], save_strategy="no", disable_tqdm=True, bf16=True,
    )  # fmt: skip
    rows = [{"x": x} for (x,) in data()]
    host = Trainer(model or Net(), arguments, train_dataset=rows, callbacks=[Visitor()])
    host.label_names = []
    host.train()
    host.save_model(str(folder))
    return load_file(folder / "model.safetensors")


WAYS = {f.__name__: f for f in (own_loop, accelerate, fabric, lightning, trainer)}
