import lightning.fabric
import lightning.pytorch
import lightning_fabric
import pytest
import pytorch_lightning
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from lightning_fp8 import FP8Config, FP8Precision
from tests.fp8_checkpoints import exact, write_llama
from torch_fp8 import merged_state_dict

TOKENS = torch.arange(32).view(2, 16) * 7 % 256


def _loaded(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def _worst(model, optimizer, fp8):
    merged = merged_state_dict(model, optimizer)
    worst = 0.0
    for key, (qdata, scale, block) in fp8.items():
        true = exact(qdata, scale, block)
        error = (merged[key] - true).abs() / true.abs().clamp(min=1e-300)
        worst = max(worst, float(error.max()))
    return worst


def _tuning(host, folder, fp8):
    class Tuning(host.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = _loaded(folder)
            self.worst = None

        def on_train_start(self):
            self.worst = _worst(self.model, self.optimizers().optimizer, fp8)

        def training_step(self, batch, batch_idx):
            return self.model(batch, labels=batch).loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    return Tuning()


@pytest.mark.parametrize(
    "host", [lightning.pytorch, pytorch_lightning], ids=lambda host: host.__name__
)
def test_a_trainer_tunes_an_fp8_checkpoint_and_stock_opens_it(host, tmp_path):
    fp8 = write_llama(tmp_path / "source")
    model = _tuning(host, tmp_path / "source", fp8)
    before = model.model.lm_head.weight.detach().clone()
    trainer = host.Trainer(
        accelerator="cpu", precision="fp8-mixed", max_steps=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(TOKENS, batch_size=2))
    assert 2.0**-10 < model.worst <= 2.0**-8

    model.model.save_pretrained(tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    trained = model.model.state_dict()
    assert not torch.equal(trained["lm_head.weight"], before)
    assert stored.keys() == trained.keys()
    assert all(torch.equal(stored[key], trained[key]) for key in stored)
    with torch.no_grad():
        logits = model.model.eval()(TOKENS).logits
        assert torch.equal(_loaded(tmp_path / "out")(TOKENS).logits, logits)


@pytest.mark.parametrize(
    "host", [lightning.fabric, lightning_fabric], ids=lambda host: host.__name__
)
def test_fabric_starts_from_the_hosts_values(host, tmp_path):
    fp8 = write_llama(tmp_path)
    fabric = host.Fabric(accelerator="cpu", plugins=FP8Precision(FP8Config(opt_level="O3")))
    model = _loaded(tmp_path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    fabric.setup(model, optimizer)
    assert 2.0**-10 < _worst(model, optimizer, fp8) <= 2.0**-8
