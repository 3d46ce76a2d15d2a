"""data_parallel.py HOST STRATEGY LEVEL KIND: two ranks train as one process does on all the data.

KIND is automatic, accumulate, manual, "manual hook" (with a communication hook of the user), unused
(``find_unused_parameters``), or fabric. The ranks start from different weights, of which rank 0's
count, and have half of each batch.
"""

import importlib
import sys

host, strategy, level, kind = sys.argv[1:]
L = importlib.import_module(host)

import torch  # noqa: E402  (the host comes first, as in most scripts)
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import torch_fp8  # noqa: E402
from lightning_fp8 import FP8Config, FP8Precision  # noqa: E402
from torch_fp8.tensor.split_weight import SplitWeight  # noqa: E402

CONFIG = FP8Config(opt_level=level)
STEPS, MICRO_BATCHES = 12, 2 if kind == "accumulate" else 1


def make_net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.LayerNorm(128), nn.Linear(128, 64))


def batch(step, rank=0, world_size=1):
    torch.manual_seed(100 + step)
    return torch.randn(16, 64)[rank::world_size]


def loss(net, x):
    return (net(x) - x).float().pow(2).mean()


def expected():
    net = make_net(0)
    torch_fp8.convert_to_float8(net, CONFIG)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    torch_fp8.convert_optimizer(optimizer, CONFIG, model=net)
    for step in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            (loss(net, batch(step)) / MICRO_BATCHES).backward()
        if (step + 1) % MICRO_BATCHES == 0:
            optimizer.step()
            optimizer.zero_grad()
    torch_fp8.restore_weights(optimizer)
    return net


def check(net, optimizer, ddp, gradient):
    weight = net[0].weight
    eight_bit = level == "O3" and kind != "unused"
    assert isinstance(weight, SplitWeight) == (level != "O1")
    hook = ddp._get_ddp_logging_data().get("comm_hook")
    assert hook == (None if kind == "manual hook" else "average_bucket"), hook
    narrow = "WideGrad" if level == "O2" and kind != "unused" else "Tensor"
    assert gradient == ("Float8Grad" if eight_bit else narrow), gradient
    assert ddp.gradient_as_bucket_view
    assert ddp.find_unused_parameters == (kind == "unused")
    for tensor in weight.halves.tensors if level != "O1" else [weight]:
        every = [torch.empty_like(tensor.view(torch.uint8)) for _ in range(2)]
        dist.all_gather(every, tensor.detach().view(torch.uint8))
        assert torch.equal(*every)  # bit for bit
    merged = torch_fp8.merged_state_dict(net, optimizer)
    start = make_net(0).state_dict()
    ours, theirs = (
        torch.cat([(state[name] - start[name]).flatten() for name in start])
        for state in (merged, expected().state_dict())
    )
    similarity = torch.cosine_similarity(ours, theirs, dim=0)
    assert similarity > 0.97, similarity  # 0.984 and more
    print("ranks agree")


class Regression(L.LightningModule if kind != "fabric" else nn.Module):
    def __init__(self):
        super().__init__()
        self.net = make_net(0)
        self.automatic_optimization = "manual" not in kind
        self.gradient = None

    def on_fit_start(self):
        assert "configure_ddp" not in vars(self.trainer.strategy)

    def setup(self, stage):
        self.net = make_net(self.global_rank)

    def training_step(self, _, step):
        value = loss(self.net, batch(step, self.global_rank, 2))
        if "manual" in kind:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(value)
            self.gradient = type(self.net[0].weight.grad).__name__
            optimizer.step()
        return value

    def on_before_optimizer_step(self, optimizer):
        self.gradient = type(self.net[0].weight.grad).__name__

    def on_train_end(self):
        check(self.net, self.trainer.optimizers[0], self.trainer.model, self.gradient)
        assert "gradient_as_bucket_view" not in self.trainer.strategy._ddp_kwargs

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit():
    chosen = strategy
    if kind in ("unused", "manual hook"):
        options = {"find_unused_parameters": True}
        if kind == "manual hook":
            options = {"ddp_comm_hook": allreduce_hook}
        ddp = importlib.import_module(f"{host}.strategies").DDPStrategy
        chosen = ddp(start_method=strategy.partition("_")[2] or "popen", **options)
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=chosen,
        devices=2,
        max_epochs=1,
        accumulate_grad_batches=MICRO_BATCHES,
        plugins=[FP8Precision(CONFIG)],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Regression()
    trainer.fit(model, DataLoader(range(STEPS), batch_size=1))
    # The weights are back: in this process, or from the one that ddp_spawn and ddp_fork started.
    assert model.net[0].weight.dtype == torch.float32
    assert (model.net[0].weight != model.net[0].weight.bfloat16().float()).any()
    start = make_net(0)[0].weight
    assert 0.1 < (model.net[0].weight - start).norm() / start.norm() < 1


def train(fabric):
    net = make_net(fabric.global_rank)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(net, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        fabric.backward(loss(model, batch(step, fabric.global_rank, 2)))
        gradient = type(net[0].weight.grad).__name__
        optimizer.step()
    check(net, optimizer.optimizer, model._forward_module, gradient)
    assert not fabric.strategy._ddp_kwargs


def main():
    if kind != "fabric":
        fit()
        return
    fabric = L.Fabric(
        accelerator="cpu", strategy=strategy, devices=2, plugins=[FP8Precision(CONFIG)]
    )
    fabric.launch(train)


if __name__ == "__main__":
    main()
