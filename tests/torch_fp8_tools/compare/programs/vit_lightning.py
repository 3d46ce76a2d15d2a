"""A small vision transformer under the Lightning Trainer, in BF16, on images drawn at random."""

import lightning.pytorch as L
import torch
from torch import nn


class VisionTransformer(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 4, 4)
        self.place = nn.Parameter(0.02 * torch.randn(64, 64))
        layer = nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 16)

    def training_step(self, batch, _):
        images, labels = batch
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.place
        loss = nn.functional.cross_entropy(self.head(self.layers(tokens).mean(1)), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def images():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(16, (512,), generator=generator)
    means = torch.randn(16, 3, 32, 32, generator=generator)
    noise = torch.randn(512, 3, 32, 32, generator=generator)
    return torch.utils.data.TensorDataset(means[labels] + noise, labels)


if __name__ == "__main__":
    L.seed_everything(0)
    loader = torch.utils.data.DataLoader(images(), 16, shuffle=True)
    L.Trainer(precision="bf16-mixed", max_epochs=1).fit(VisionTransformer(), loader)
