"""Lightning's averages read, write and exchange split weights; no code of ours is for them.

tests/weight_properties.py has what they do to a weight, bit for bit.
"""

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, callbacks
from torch.utils.data import DataLoader

from lightning_fp8 import FP8Precision
from tests.lightning_fp8.hosts import QUIET, make_net

LR = 1e-6
CALLBACKS = {
    "O2 EMA": lambda: callbacks.EMAWeightAveraging(decay=0.9),
    "O3 mean": lambda: callbacks.WeightAveraging(),
    "O2 SWA": lambda: callbacks.StochasticWeightAveraging(LR, swa_epoch_start=1),
}


class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = make_net()

    def training_step(self, batch, batch_idx):
        return (self.net(batch) - batch).float().pow(2).mean()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=LR, weight_decay=0.0)


def averaged(level, callback):
    options = {"max_epochs": 4, "callbacks": [callback], "enable_checkpointing": False}
    trainer = Trainer(plugins=[FP8Precision(opt_level=level)], **QUIET, **options)
    model = Regression()
    torch.manual_seed(1)
    x = torch.randn(64, 64)
    trainer.fit(model, DataLoader(x, batch_size=8), DataLoader(x, batch_size=64))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    return model.net[0].weight


@pytest.mark.parametrize("kind", CALLBACKS)
def test_average_follows_that_of_float32_weights(kind):
    """Over steps far below a BF16 ulp: 32 of 1e-6, where an ulp is 5e-4.

    Measured cosine 0.945 and more, norms within 6 %, which is what 8-bit states do to 32 steps;
    0.14 and four times the norm where the callbacks see BF16 weights alone.
    """
    start = make_net()[0].weight
    ours, theirs = (
        averaged(level, CALLBACKS[kind]()) - start for level in (kind.partition(" ")[0], "O1")
    )
    assert torch.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0) > 0.92
    torch.testing.assert_close(ours.norm(), theirs.norm(), rtol=0.1, atol=0)
