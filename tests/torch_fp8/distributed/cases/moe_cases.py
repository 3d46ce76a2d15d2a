"""Cases of fused experts on two ranks: DDP, FSDP2, and transformers' expert parallelism."""

import contextlib
import dataclasses
import tempfile
from unittest import mock

import torch
import torch.distributed as dist
from parallel_ranks import RANK, RANKS, db, full
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.comm_counter import count_communication
from tests.internals import expert_gather, transposed_stacked
from tests.moe_experts import E, H, K, experts
from tests.moe_models import moe_model
from tests.steps import adamw
from torch_fp8 import FP8Config, convert_to_float8
from torch_fp8.distributed import connect_ddp, connect_fsdp, ddp_options, split_sharded

STEPS = 2


def _saved(name="Qwen3Moe"):
    folder = [tempfile.mkdtemp()] if RANK == 0 else [None]
    dist.broadcast_object_list(folder)
    if RANK == 0:
        # With these weights no token is so near the border of two experts that rounding moves it,
        # which would change all gradients.
        torch.manual_seed(1 if name == "GptOss" else 0)
        model = moe_model(name, num_hidden_layers=1, layer_types=["full_attention"])
        for parameter in model.parameters():
            if parameter.ndim == 3:
                torch.nn.init.normal_(parameter, std=0.05)
        model.save_pretrained(folder[0])
    dist.barrier()
    return folder[0]


def _loaded(folder, **options):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


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
    optimizer, _ = adamw(model, config, lr=1e-3)
    return _train(model, optimizer, _batch().chunk(RANKS))


def _compared(folder, config, parallel, part="experts"):
    """Return the losses of both, and the least agreement of gradients in dB, of names with
    `part`."""
    want, want_grads = _one_process(folder, config)
    losses, grads = parallel
    mean = torch.tensor(losses)
    dist.all_reduce(mean)
    names = [name for name in want_grads if part in name]
    ours = {name.removeprefix("module."): grad for name, grad in grads.items()}
    return want, (mean / RANKS).tolist(), min(db(want_grads[n], ours[n]) for n in names)


def case_ddp():
    folder, config = _saved(), FP8Config(recipe="rowwise", opt_level="O3")
    model = _loaded(folder)
    optimizer, report = adamw(model, config, lr=1e-3)
    ddp = DistributedDataParallel(model, **ddp_options(model, [optimizer]))
    connect_ddp(ddp, [optimizer])
    parallel = _train(ddp, optimizer, [_batch().chunk(RANKS)[RANK]])
    return *_compared(folder, config, parallel), report.num_fp8_gradients


def _sharded(batches, name="Qwen3Moe", skipped=(), part="experts", **options):
    """Train a model that transformers shards; return what `_compared` does, and its report.

    Args:
        batches: those of this rank in each step.
        name: a model of `tests.moe_models`.
        skipped: layers that run in BF16 in one process.
        part: part of the names of the gradients that are compared.
        options: those of transformers' DistributedConfig.
    """
    from transformers.distributed import DistributedConfig

    folder, config = _saved(name), FP8Config(recipe="rowwise")
    model = _loaded(folder, distributed_config=DistributedConfig(**options))
    report = convert_to_float8(model, config)
    assert len(report.experts) == 2
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    split_sharded(model, [optimizer], config)
    connect_fsdp(model, config)
    parallel = _train(model, optimizer, batches)
    whole = dataclasses.replace(config, skip=(*config.skip, *skipped))
    return *_compared(folder, whole, parallel, part), report.summary()


def case_fsdp2():
    return _sharded([_batch().chunk(RANKS)[RANK]], fsdp_size=RANKS)


def case_expert_parallel():
    return _sharded([_batch().chunk(RANKS)[RANK]], fsdp_size=RANKS, ep_size=RANKS)


def _sharing_a_batch(**options):
    """Expert parallelism of ranks that compute the same tokens.

    In one micro-batch: transformers sums gradients of norms between ranks in each, those of earlier
    micro-batches once more.
    """
    sizes = {"tp_size": RANKS, "ep_size": RANKS, "ep_implementation": "all_reduce"}
    return _sharded([_batch()], part="", **sizes, **options)


def case_all_reduce():
    return _sharing_a_batch(name="GptOss")


def case_all_reduce_beside_cut_layers():
    return _sharing_a_batch(skipped=("self_attn",))


class _Block(nn.Module):
    def __init__(self, layout):
        super().__init__()
        self.experts = experts(layout)

    def forward(self, x):
        scores, index = x[:, :E].float().softmax(-1).topk(K)
        if self.training and x.requires_grad and self.checkpoints:
            return checkpoint(self.experts, x, index, scores.to(x.dtype), use_reentrant=False)
        return self.experts(x, index, scores.to(x.dtype))

    checkpoints = False


def _block(layout, seed=0):
    torch.manual_seed(seed)
    block = _Block(layout).bfloat16()
    convert_to_float8(block, FP8Config(recipe="rowwise"))
    return block


def _pass(block, seed):
    """Run forward and backward on this rank's tokens; return output, and gradient of them."""
    generator = torch.Generator().manual_seed(10 * RANK + seed)
    x = torch.randn(40, H, generator=generator).bfloat16().requires_grad_()
    y = block(x)
    y.backward(torch.randn(40, H, generator=generator).bfloat16())
    return y.detach(), x.grad


def _counted(block):
    with count_communication() as count:
        results = [_pass(block, seed) for seed in range(2)]
    return results, count.of("all-gather").bytes_sent


def _gathered(layout, **options):
    """Return what is equal to one process's, and bytes of gathers over those of BF16."""
    config, turned = FP8Config(recipe="rowwise"), []

    def note(x, spec):
        turned.append(x.qdata.shape)
        return transposed_stacked(x, spec)

    whole, sharded, stock = (_block(layout) for _ in range(3))
    for block in (whole, sharded):
        block.checkpoints = options.get("checkpoints", False)
    for block in (sharded, stock):
        fully_shard(block, reshard_after_forward=options.get("reshard", True))
    report = connect_fsdp(sharded, config)
    want = [_pass(whole, seed) for seed in range(2)]
    with mock.patch.object(expert_gather, "transposed_stacked", note):
        got, ours = _counted(sharded)
    _, plain = _counted(stock)
    same = [
        [torch.equal(a, b) for a, b in zip(*both, strict=True)]
        for both in zip(want, got, strict=True)
    ]
    grads = []
    for (name, a), b in zip(whole.named_parameters(), sharded.parameters(), strict=True):
        dist.all_reduce(a.grad)
        if "bias" not in name:
            grads.append(db(a.grad.float() / RANKS, full(b.grad).float()))
    assert type(next(sharded.parameters())._local_tensor) is torch.Tensor
    return report.num_gathers, same, ours / plain, len(turned), min(grads)


def case_gathered_plain():
    return _gathered("plain")


def case_gathered_transposed():
    return _gathered("gpt-oss")


def case_gathered_under_a_checkpoint():
    return _gathered("plain", checkpoints=True)


def case_kept_between():
    return _gathered("plain", reshard=False)


def case_not_gathered():
    torch.manual_seed(0)
    block = nn.Sequential(experts("plain", num_experts=3, num_local_experts=3)).bfloat16()
    config = FP8Config(recipe="rowwise")
    convert_to_float8(block, config)
    fully_shard(block)
    report = connect_fsdp(block, config)
    return report.num_gathers, str(report)


def case_reads_as_a_tensor():
    block, values = _block("gpt-oss"), []
    want = block.experts.down_proj.detach().clone()
    fully_shard(block, reshard_after_forward=True)
    connect_fsdp(block, FP8Config(recipe="rowwise"))

    def read(*_):
        weight = block.experts.down_proj
        values.append((tuple(weight.shape), str(weight.dtype), db(want.float(), weight.float())))

    block.experts.register_forward_pre_hook(read)
    block.experts.register_full_backward_hook(read)
    _pass(block, 0)
    return tuple(want.shape), values


def case_compiled():
    """Return whether a compiled block computes what one process does, and what was gathered.

    One rank compiles. The other has eager code send what a graph does, for both must send alike.
    """
    whole, sharded = (_block("plain") for _ in range(2))
    fully_shard(sharded, reshard_after_forward=True)
    connect_fsdp(sharded, FP8Config(recipe="rowwise"))
    pre, flips = expert_gather.ExpertGather.pre, []

    def note(self, shard):
        inputs, flip = pre(self, shard)
        flips.append(flip)
        return inputs, flip

    want = [_pass(whole, seed) for seed in range(3)]
    with mock.patch.object(expert_gather.ExpertGather, "pre", note):
        got = [_pass(sharded, 0)]
        unread = mock.patch.object(expert_gather.ExpertGather, "_was_read", False)
        if RANK == 0:
            sharded.experts = torch.compile(sharded.experts, backend="aot_eager", fullgraph=True)
        with contextlib.nullcontext() if RANK == 0 else unread:
            got += [_pass(sharded, seed) for seed in (1, 2)]
    forwards = [torch.equal(a, b) for (a, _), (b, _) in zip(want, got, strict=True)]
    agreement = min(db(a.float(), b.float()) for (_, a), (_, b) in zip(want, got, strict=True))
    return forwards, agreement, flips
