"""Programs that torch.compile compiles under Lightning have as many graphs in FP8 as in BF16."""

from collections.abc import Callable
from typing import Any

import lightning
import pytest
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from lightning_fp8 import FP8Precision
from tests.compiled_graphs import Graphs, count_graphs
from tests.models import llama
from torch_fp8 import FP8Config

pytestmark = pytest.mark.slow


def _compiled(model: Any) -> Any:
    return torch.compile(model, backend="aot_eager")


class _Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = _compiled(llama(num_hidden_layers=1))

    def training_step(self, ids: Any, index: int) -> Any:
        return self.model(input_ids=ids, labels=ids).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def _trainer(precision: dict[str, Any]) -> None:
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options: dict[str, Any] = dict.fromkeys(quiet, False)
    trainer = lightning.Trainer(accelerator="cpu", devices=1, max_steps=2, **options, **precision)
    trainer.fit(_Module(), DataLoader(torch.randint(0, 64, (4, 16)), batch_size=2))


def _fabric(precision: dict[str, Any], compiled_first: bool = True) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, **precision)
    model: Any = llama(num_hidden_layers=1)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    if compiled_first:
        model, optimizer = fabric.setup(_compiled(model), optimizer)
    else:
        model, optimizer = fabric.setup(model, optimizer)
        model = _compiled(model)
    ids = torch.randint(0, 64, (2, 16))
    for _ in range(2):
        fabric.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()


def _wrapper(precision: dict[str, Any]) -> None:
    _fabric(precision, compiled_first=False)


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("program", [_trainer, _fabric, _wrapper])
def test_as_many_as_in_bf16(program: Callable[..., None], level: str) -> None:
    def graphs(precision: dict[str, Any]) -> Graphs:
        torch.manual_seed(0)
        found = count_graphs(lambda: program(precision))
        # Dynamo breaks Fabric's wrapper at one place: it drops BF16's frame, and cuts FP8's in two.
        return found._replace(breaks=found.breaks + found.dropped, dropped=0)

    plugin = FP8Precision(FP8Config(recipe="tensorwise", opt_level=level))
    assert graphs({"plugins": plugin}) == graphs({"precision": "bf16-mixed"})
