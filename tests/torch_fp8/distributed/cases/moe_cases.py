"""Cases of fused experts on two ranks: DDP, FSDP2, and transformers' expert parallelism."""

import tempfile

import torch
import torch.distributed as dist
from parallel_ranks import RANK, RANKS, db, full
from torch.nn.parallel import DistributedDataParallel

from tests.moe_models import moe_model
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8
from torch_fp8.distributed.ddp.wrap import connect_ddp, ddp_options
from torch_fp8.distributed.fsdp.connect import connect_fsdp
from torch_fp8.distributed.fsdp.split_weights import split_sharded

STEPS = 2


def _saved():
    """Return the folder of a model that every rank loads."""
    folder = [tempfile.mkdtemp()] if RANK == 0 else [None]
    dist.broadcast_object_list(folder)
    if RANK == 0:
        torch.manual_seed(0)
        model = moe_model("Qwen3Moe", num_hidden_layers=1)
        for parameter in model.parameters():
            if parameter.ndim == 3:
                torch.nn.init.normal_(parameter, std=0.05)
        model.save_pretrained(folder[0])
    dist.barrier()
    return folder[0]


def _loaded(folder, **options):
    from transformers import Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM.from_pretrained(folder, **options)


def _batch():
    return torch.randint(1, 64, (2 * RANKS, 16), generator=torch.Generator().manual_seed(0))


def _train(model, optimizer, batches):
    """Return the losses of each step, averaged over `batches`, and the first gradients."""
    losses, first = [], {}
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for x in batches:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=x, labels=x).loss / len(batches)
            loss.backward()
            total += loss.item()
        grads = {n: full(p.grad).float() for n, p in model.named_parameters() if p.grad is not None}
        first = first or grads
        optimizer.step()
        losses.append(total)
    return losses, first


def _one_process(folder, config):
    model = _loaded(folder)
    convert_to_float8(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    convert_optimizer(optimizer, config, model=model)
    return _train(model, optimizer, _batch().chunk(RANKS))


def _compared(folder, config, parallel):
    """Return the losses of both, and the least agreement of the experts' gradients in dB."""
    want, want_grads = _one_process(folder, config)
    losses, grads = parallel
    mean = torch.tensor(losses)
    dist.all_reduce(mean)
    names = [name for name in want_grads if "experts" in name]
    ours = {name.removeprefix("module."): grad for name, grad in grads.items()}
    return want, (mean / RANKS).tolist(), min(db(want_grads[n], ours[n]) for n in names)


def case_ddp():
    folder, config = _saved(), FP8Config(recipe="rowwise", opt_level="O3")
    model = _loaded(folder)
    convert_to_float8(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    report = convert_optimizer(optimizer, config, model=model)
    ddp = DistributedDataParallel(model, **ddp_options(model, [optimizer]))
    connect_ddp(ddp, [optimizer])
    parallel = _train(ddp, optimizer, [_batch().chunk(RANKS)[RANK]])
    return *_compared(folder, config, parallel), report.num_fp8_gradients


def _sharded(**options):
    from transformers.distributed import DistributedConfig

    folder, config = _saved(), FP8Config(recipe="rowwise")
    model = _loaded(folder, distributed_config=DistributedConfig(**options))
    report = convert_to_float8(model, config)
    assert len(report.experts) == 2
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    split_sharded(model, [optimizer], config)
    connect_fsdp(model, config)
    parallel = _train(model, optimizer, [_batch().chunk(RANKS)[RANK]])
    return _compared(folder, config, parallel)


def case_fsdp2():
    return _sharded(fsdp_size=RANKS)


def case_expert_parallel():
    return _sharded(fsdp_size=RANKS, ep_size=RANKS)
