"""fsdp.py HOST CASE...: `FP8FSDPStrategy` on two processes; every case trains as one process does.

The ranks have half of each batch. A case prints one line per rank, or fails.
"""

import importlib
import sys
import tempfile

host, *cases = sys.argv[1:]
L = importlib.import_module(host)

import pytest  # noqa: E402  (the host comes first, as in most scripts)
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from fsdp_task import STEPS, Net, loss, make_net, similarity, tokens, whole  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import FSDPModule, fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import torch_fp8  # noqa: E402
from lightning_fp8 import FP8Config, FP8FSDPStrategy, FP8Precision  # noqa: E402
from tests.comm_counter import count_communication  # noqa: E402
from torch_fp8.optim.optimizer import Float8Optimizer  # noqa: E402
from torch_fp8.tensor.split_shard import SplitShard  # noqa: E402


class Regression(L.LightningModule):
    def __init__(self, config, kind=""):
        super().__init__()
        self.config, self.kind = config, kind
        self.automatic_optimization = kind != "manual"
        self.losses, self.dtypes, self.streams = [], set(), set()
        self.split = set()
        if kind == "own":  # parameters and a list of layers of its own
            self.scale = nn.Parameter(torch.ones(1))
        net = make_net()
        if kind == "own":
            self.embed, self.layers, self.norm, self.lm_head = (
                net.embed,
                net.layers,
                net.norm,
                net.lm_head,
            )
        else:
            self.net = net

    def forward(self, x):
        return Net.forward(self, x) * self.scale if self.kind == "own" else self.net(x)

    def training_step(self, _, step):
        # No call of the module: where it is its own root, the strategy runs its hooks.
        value = loss(self.forward, tokens(step, self.global_rank, 2))
        self.losses.append(value.item())
        if self.kind == "manual":
            optimizer = self.optimizers()
            self.manual_backward(value)
            optimizer.step()
            optimizer.zero_grad()
        return value

    def on_before_optimizer_step(self, optimizer):
        self.dtypes |= {p.dtype for p in self.parameters()}
        self.split |= {type(p._local_tensor) for p in self.parameters()} & {SplitShard}
        grad = getattr(self.layers if self.kind == "own" else self.net.layers, "0").up.weight.grad
        self.gradient = type(grad._local_tensor).__name__

    def validation_step(self, _, step):
        self.log("loss", loss(self.forward, tokens(step, self.global_rank, 2)), sync_dist=True)

    test_step = validation_step

    def predict_step(self, _, step):
        return self.forward(tokens(step)).float()

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2)


def trainer(config, strategy=None, epochs=1, **options):
    return L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy or FP8FSDPStrategy(),
        plugins=[FP8Precision(config)],
        max_epochs=epochs,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def data(steps=STEPS):
    return DataLoader(range(steps), batch_size=1)


def level(name, **options):
    """Trains as one process; afterwards a stock model in float32 shards."""
    config = FP8Config(opt_level=name)
    host_trainer = trainer(config, **options)
    model = Regression(config)
    host_trainer.fit(model, data(), data(1))
    assert model.dtypes == {torch.float32}, model.dtypes
    assert model.split
    assert model.net.streams == {torch.float32}  # as under bf16-mixed
    kinds = {"O2": "WideGrad", "O3": "Float8Grad"}
    assert model.gradient == kinds[name], model.gradient
    assert isinstance(host_trainer.optimizers[0], Float8Optimizer)
    assert_stock(model)
    options = {
        "accumulate": options.get("accumulate_grad_batches", 1),
        "clip": options.get("gradient_clip_val"),
    }
    reached = similarity(model.net.parameters(), config, **options)
    assert reached > 0.95, reached
    return f"similarity {reached:.3f}"


def assert_stock(model):
    sharded = {type(m).__name__ for m in model.modules() if isinstance(m, FSDPModule)}
    assert sharded >= {"FSDPBlock"}, sharded
    assert not any(isinstance(m, torch_fp8.Float8Linear) for m in model.modules())
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert {p.to_local().dtype for p in model.parameters()} == {torch.float32}
    assert not any(m._forward_hooks for m in model.modules() if isinstance(m, nn.Embedding))
    assert "configure_model" not in vars(model)


def own():
    config = FP8Config()
    model = Regression(config, "own")
    model.streams = set()
    host_trainer = trainer(config)
    host_trainer.fit(model, data(), data(1))
    assert type(model).__name__ == "FSDPRegression"
    assert model.split
    reached = similarity([p for n, p in model.named_parameters() if n != "scale"], config)
    # One parameter more, that scales all logits, and so other steps.
    assert reached > 0.8, reached
    assert len(host_trainer.predict(model, data(2))) == 2
    return f"similarity {reached:.3f}"


def manual():
    config = FP8Config()
    model = Regression(config, "manual")
    trainer(config).fit(model, data())
    reached = similarity(model.net.parameters(), config)
    assert reached > 0.95, reached
    refused = Regression(config, "own")
    refused.automatic_optimization = False
    with pytest.raises(ValueError, match="with manual optimization, move them into a module"):
        trainer(config).fit(refused, data())
    return f"similarity {reached:.3f}"


def evaluate():
    config = FP8Config()
    model = Regression(config)
    first = trainer(config)
    (before,) = first.validate(model, data(2), verbose=False)
    first.fit(model, data())
    (after,) = first.validate(model, data(2), verbose=False)
    (tested,) = first.test(model, data(2), verbose=False)
    predictions = first.predict(model, data(2))
    assert after["loss"] < before["loss"]
    assert after == tested
    x = (tokens(0) * 7 % 64).flatten()
    reached = nn.functional.cross_entropy(predictions[0].flatten(0, 1), x).item()
    assert reached < before["loss"], reached
    assert_stock(model)
    state = [p.clone() for p in whole(model.parameters())]
    trainer(config).fit(model, data())
    assert model.split
    assert model.losses[-1] < model.losses[0]
    assert not all(map(torch.equal, state, whole(model.parameters())))
    assert model.net.streams == {torch.float32}
    return f"loss {before['loss']:.3f} {after['loss']:.3f}"


def resume():
    """Sharded and full checkpoints go on bit for bit, saved during a fit or after it."""
    config = FP8Config(recipe="delayed", amax_history_len=2)
    steps = data(3)
    model = Regression(config)
    trainer(config, epochs=2).fit(model, steps)
    uninterrupted = whole(model.parameters())
    for sharded in (True, False):
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        strategy = FP8FSDPStrategy(save_distributed_checkpoint=sharded)
        callbacks = [SaveAtEnd(f"{folder[0]}/{sharded}-during")]
        first = trainer(config, strategy, callbacks=callbacks)
        first.fit(Regression(config), steps)
        first.save_checkpoint(f"{folder[0]}/{sharded}-after")
        dist.barrier()
        for name in ("during", "after"):
            path = f"{folder[0]}/{sharded}-{name}"
            if not sharded:
                saved = torch.load(path, weights_only=True)
                assert list(saved["state_dict"]) == list(Regression(config).state_dict())
                assert {type(t) for t in saved["state_dict"].values()} == {torch.Tensor}
                dtypes = {t.dtype for t in saved["state_dict"].values()}
                assert dtypes == {torch.float32}, dtypes
            strategy = FP8FSDPStrategy(save_distributed_checkpoint=sharded)
            model = Regression(config)
            trainer(config, strategy, epochs=2).fit(model, steps, ckpt_path=path)
            same = map(torch.equal, whole(model.parameters()), uninterrupted)
            assert all(same), (sharded, name)
    return "bit for bit"


def test_from_checkpoint():
    """A checkpoint of a fit that goes on, tested by its Trainer and by a new one."""
    config = FP8Config()
    trainer(config).validate(Regression(config), data(1), verbose=False)  # starts the ranks
    for sharded in (True, False):
        path = [f"{tempfile.mkdtemp()}/last"]
        dist.broadcast_object_list(path)
        strategy = FP8FSDPStrategy(save_distributed_checkpoint=sharded)
        first = trainer(config, strategy, callbacks=[SaveAtEnd(path[0])])
        model = Regression(config)
        first.fit(model, data(2))
        (fitted,) = first.test(model, data(2), verbose=False)
        (again,) = first.test(model, data(2), ckpt_path=path[0], verbose=False)
        strategy = FP8FSDPStrategy(save_distributed_checkpoint=sharded)
        (fresh,) = trainer(config, strategy).test(
            Regression(config), data(2), ckpt_path=path[0], verbose=False
        )
        assert again == fresh == fitted
    return "tested"


def meta():
    """Weights that are made where they are sharded, of a model without any."""
    config = FP8Config()
    host_trainer = trainer(config)
    with torch.device("meta"):
        model = Regression(config)
    host_trainer.fit(model, data())
    assert model.split
    assert model.losses[-1] < model.losses[0]
    return f"loss {model.losses[0]:.3f} {model.losses[-1]:.3f}"


class SaveAtEnd(L.Callback):
    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, module):
        # The loop has not counted the epoch yet; a checkpoint at its last batch has.
        trainer.fit_loop.epoch_progress.current.completed += 1
        trainer.save_checkpoint(self.path)
        trainer.fit_loop.epoch_progress.current.completed -= 1


def named():
    """Blocks by name; a name that is not there, and a strategy without FP8, are refused."""
    config = FP8Config()
    model = Regression(config)
    trainer(config, FP8FSDPStrategy(blocks=["LayerNorm"])).fit(model, data(1))
    sharded = [n for n, m in model.named_modules() if isinstance(m, FSDPModule)]
    assert sharded == ["net", "net.layers.0.norm", "net.layers.1.norm", "net.norm"], sharded
    with pytest.raises(ValueError, match="Regression has no module of class Blok"):
        trainer(config, FP8FSDPStrategy(blocks=["Blok"])).fit(Regression(config), data(1))
    swa = L.callbacks.StochasticWeightAveraging(swa_lrs=1e-2)
    with pytest.raises(ValueError, match="StochasticWeightAveraging averages whole weights"):
        trainer(config, callbacks=[swa]).fit(Regression(config), data(1))
    with pytest.raises(ValueError, match="set precision='fp8-mixed'"):
        L.Trainer(accelerator="cpu", devices=2, strategy=FP8FSDPStrategy())
    return "as named"


def offload():
    return level("O2", strategy=FP8FSDPStrategy(cpu_offload=True, reshard_after_forward=False))


def users():
    """A ``configure_model`` of the user's, in BF16, under ModelParallelStrategy."""
    config = FP8Config()
    strategies = importlib.import_module(f"{host}.strategies")
    uninterrupted, steps = None, 3
    for sharded in (True, False):
        options = {"data_parallel_size": 2, "tensor_parallel_size": 1}
        options["save_distributed_checkpoint"] = sharded
        path = [f"{tempfile.mkdtemp()}/half"]

        def fit(ckpt_path=None, options=options, **more):
            model = Sharded(config)
            strategy = strategies.ModelParallelStrategy(**options)
            host_trainer = trainer(config, strategy, **more)
            with count_communication() as counted:
                host_trainer.fit(model, data(steps), ckpt_path=ckpt_path)
            # Found again after the host has moved the model: without it, the gathers are BF16.
            run = steps * (1 if ckpt_path else more.get("epochs", 1))
            assert counted.of("all-gather", torch.uint8).calls >= 4 * run, counted
            assert counted.of("all-to-all", torch.uint8).calls == 2 * run, counted
            return model, host_trainer

        if uninterrupted is None:
            model, _ = fit(epochs=2)
            uninterrupted = whole(model.parameters())
        _, first = fit()
        dist.broadcast_object_list(path)
        first.save_checkpoint(path[0])
        dist.barrier()
        model, _ = fit(ckpt_path=path[0], epochs=2)
        assert model.dtypes == {torch.bfloat16}
        assert all(map(torch.equal, whole(model.parameters()), uninterrupted)), sharded
    return "bit for bit"


class Sharded(Regression):
    def configure_model(self):
        if not isinstance(self.net, FSDPModule):
            self.bfloat16()
            mesh = self.device_mesh["data_parallel"]
            for module in (*self.net.layers, self.net):
                fully_shard(module, mesh=mesh)


CASES = {
    "O3": lambda: level("O3", accumulate_grad_batches=2, gradient_clip_val=0.5),
    **{f.__name__: f for f in (own, manual, evaluate, resume, named, users, meta, offload)},
    "tested": test_from_checkpoint,
}


if __name__ == "__main__":
    for case in cases:
        said = CASES[case]()
        print(f"rank {dist.get_rank()}: {case} {said}\n", end="", flush=True)
        dist.barrier()
