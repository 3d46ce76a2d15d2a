"""Optimizers of other libraries step weights in two halves; each test skips without its library."""

import pytest
import torch
from torch import nn

from tests.internals import SplitWeight
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8, memory_report

STEPS = 8
GALORE = {"rank": 8, "update_proj_gap": 4, "scale": 0.25, "proj_type": "std"}
APOLLO = {**GALORE, "proj": "random", "scale_type": "channel", "scale": 1.0}
FIXED = {"relative_step": False, "scale_parameter": False, "warmup_init": False}
OPTIMIZERS = {
    "galore adamw": ("galore_torch", "GaLoreAdamW", GALORE, {"lr": 1e-2}),
    "galore adafactor": ("galore_torch", "GaLoreAdafactor", GALORE, {"lr": 1e-2, **FIXED}),
    "apollo": ("apollo_torch", "APOLLOAdamW", APOLLO, {"lr": 1e-2}),
    "bnb adamw": ("bitsandbytes.optim", "AdamW8bit", {}, {"lr": 1e-3}),
    "bnb paged": ("bitsandbytes.optim", "PagedAdamW8bit", {}, {"lr": 1e-3}),
    "bnb lion": ("bitsandbytes.optim", "Lion8bit", {}, {"lr": 1e-3}),
    "bnb ademamix": ("bitsandbytes.optim", "AdEMAMix8bit", {}, {"lr": 1e-3}),
}


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.up = nn.Embedding(128, 128), nn.Linear(128, 256)
        self.head = nn.Linear(256, 128)

    def forward(self, tokens):
        return self.head(self.up(self.embedding(tokens)).relu())


def _optimizer(model, name):
    module, cls, of_matrices, options = OPTIMIZERS[name]
    library = pytest.importorskip(module)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": matrices, **of_matrices}, {"params": others}]
    return getattr(library, cls)(groups, **options)


def _step(model, optimizer, step):
    tokens = torch.randint(0, 128, (64,), generator=torch.Generator().manual_seed(step))
    loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 128)
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_and_gradients_take_5_bytes_and_losses_stay(name):
    losses = {}
    for level in ("O1", "O2"):
        model = _Net()
        optimizer, config = _optimizer(model, name), FP8Config(opt_level=level)
        convert_to_float8(model, config)
        convert_optimizer(optimizer, config, model=model)
        losses[level] = []
        for step in range(STEPS):
            optimizer.zero_grad()
            losses[level].append(_step(model, optimizer, step))
        report = memory_report(model, optimizer)
        numel = sum(p.numel() for p in model.parameters() if p.ndim == 2)
        small = sum(p.numel() for p in model.parameters() if p.ndim != 2)
        parts = report.weights + report.master + report.gradients
        assert parts == (5 if level == "O2" else 8) * numel + 8 * small
    assert sum(isinstance(p, SplitWeight) for p in model.parameters()) == 3
    assert losses["O2"] == pytest.approx(losses["O1"], rel=5e-3)
    assert losses["O2"][-1] < losses["O2"][0]


def test_bitsandbytes_has_options_of_single_weights():
    bnb = pytest.importorskip("bitsandbytes")
    model, manager = _Net(), bnb.optim.GlobalOptimManager.get_instance()
    manager.initialize()
    optimizer = bnb.optim.AdamW8bit(model.parameters())
    manager.register_module_override(model.embedding, "weight", {"optim_bits": 32})
    manager.override_config(model.head.weight, "optim_bits", 32)
    convert_to_float8(model)
    convert_optimizer(optimizer, model=model)
    _step(model, optimizer, 0)
    dtypes = [optimizer.state[m.weight]["state1"].dtype for m in model.children()]
    manager.initialize()
    assert dtypes == [torch.float32, torch.uint8, torch.float32]
