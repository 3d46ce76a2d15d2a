"""fsdp_fabric.py HOST CASE...: `FP8FSDPStrategy` in Fabric on two processes, as in one process."""

import importlib
import sys
import tempfile

host, *cases = sys.argv[1:]
L = importlib.import_module(host)

import torch  # noqa: E402  (the host comes first, as in most scripts)
from fsdp_task import STEPS, loss, make_net, similarity, tokens, whole  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from lightning_fp8 import FP8Config, FP8FSDPStrategy, FP8Precision  # noqa: E402
from torch_fp8.tensor.split_shard import SplitShard  # noqa: E402


def fabric_of(config, strategy=None):
    fabric = L.Fabric(
        accelerator="cpu",
        devices=2,
        strategy=strategy or FP8FSDPStrategy(),
        plugins=[FP8Precision(config)],
    )
    fabric.launch()
    return fabric


def set_up(fabric, together=True):
    net = make_net()
    if together:
        return fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    model = fabric.setup_module(net)
    return model, fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))


def train(fabric, model, optimizer, steps, accumulate=1, clip=None):
    for step in steps:
        waits = (step + 1) % accumulate != 0
        with fabric.no_backward_sync(model, enabled=waits):
            value = loss(model, tokens(step, fabric.global_rank, 2)) / accumulate
            fabric.backward(value)
        if not waits:
            if clip:
                fabric.clip_gradients(model, optimizer, max_norm=clip)
            optimizer.step()
            optimizer.zero_grad()


def level(name, together=True, accumulate=1, clip=None):
    config = FP8Config(opt_level=name)
    fabric = fabric_of(config)
    model, optimizer = set_up(fabric, together)
    sharded = [type(m).__name__ for m in model.modules() if isinstance(m, FSDPModule)]
    assert sharded == ["FSDPNet", "FSDPBlock", "FSDPBlock"], sharded
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(type(p) is DTensor for p in model.parameters())
    split = [p for p in model.parameters() if isinstance(p._local_tensor, SplitShard)]
    assert bool(split) == (name != "O1")
    train(fabric, model, optimizer, range(STEPS), accumulate, clip)
    reached = similarity(model.parameters(), config, accumulate=accumulate, clip=clip)
    assert reached > 0.95, reached
    return f"similarity {reached:.3f}"


def apart():
    return level("O2", together=False)


def resume():
    config = FP8Config()
    fabric = fabric_of(config)
    model, optimizer = set_up(fabric)
    train(fabric, model, optimizer, range(STEPS))
    uninterrupted = whole(model.parameters())
    for sharded in (True, False):
        strategy = FP8FSDPStrategy(save_distributed_checkpoint=sharded)
        path = fabric.broadcast(f"{tempfile.mkdtemp()}/state")
        fabric = fabric_of(config, strategy)
        model, optimizer = set_up(fabric)
        train(fabric, model, optimizer, range(STEPS // 2))
        fabric.save(path, {"model": model, "optimizer": optimizer, "step": STEPS // 2})
        fabric.barrier()
        model, optimizer = set_up(fabric)
        state = {"model": model, "optimizer": optimizer, "step": 0}
        fabric.load(path, state)
        train(fabric, model, optimizer, range(state["step"], STEPS))
        assert all(map(torch.equal, whole(model.parameters()), uninterrupted)), sharded
    return "bit for bit"


def stock():
    """Float32 weights, with a state and alone: nothing of them is lost, nor kept of the others."""
    config = FP8Config()
    whole_net = make_net()
    with torch.no_grad():
        for parameter in whole_net.parameters():
            parameter.mul_(1.1)
    fabric = fabric_of(config)
    folder = fabric.broadcast(tempfile.mkdtemp())
    state = {"weights": whole_net.state_dict(), "step": 7}
    if fabric.global_rank == 0:
        torch.save(state, f"{folder}/state")
        torch.save(state["weights"], f"{folder}/alone")
    fabric.barrier()
    for name in ("state", "alone"):
        model, optimizer = set_up(fabric)
        if name == "alone":
            fabric.load_raw(f"{folder}/alone", model)
        else:
            loaded = {"weights": model, "step": 0}
            fabric.load(f"{folder}/state", loaded)
            assert loaded["step"] == 7
        assert any(isinstance(p._local_tensor, SplitShard) for p in model.parameters())
        assert all(map(torch.equal, whole(model.parameters()), whole_net.parameters()))
        train(fabric, model, optimizer, range(2))
    return "exact"


CASES = {
    "O1": lambda: level("O1"),
    "O3": lambda: level("O3", accumulate=2, clip=0.5),
    "apart": apart,
    "resume": resume,
    "stock": stock,
}


if __name__ == "__main__":
    for case in cases:
        said = CASES[case]()
        print(f"rank {torch.distributed.get_rank()}: {case} {said}\n", end="", flush=True)
        torch.distributed.barrier()
