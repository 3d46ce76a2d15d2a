"""Fused experts on two ranks against one process, trained, frozen and watched.

All tests share two processes: most of what one takes is what the first one in a process takes.
"""

import contextlib
import dataclasses
import tempfile
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.comm_counter import count_communication
from tests.internals import (
    Float8Experts,
    Float8FrozenWeight,
    expert_gather,
    local,
    transposed_stacked,
)
from tests.moe_experts import E, H, K, experts
from tests.moe_models import moe_model
from tests.steps import adamw
from tests.torch_fp8.distributed.cases.parallel_ranks import db, full
from tests.torch_fp8.distributed.ranks import RANK, RANKS, on_ranks
from torch_fp8 import FP8Config, Monitor, convert_to_float8, memory_report, thaw
from torch_fp8.distributed import connect_ddp, connect_fsdp, ddp_options, split_sharded

pytestmark = pytest.mark.long
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


def assert_as_in_one_process(folder, config, parallel, part="experts"):
    """Compare losses, and gradients of names with `part`."""
    want, want_grads = _one_process(folder, config)
    losses, grads = parallel
    mean = torch.tensor(losses)
    dist.all_reduce(mean)
    names = [name for name in want_grads if part in name]
    ours = {name.removeprefix("module."): grad for name, grad in grads.items()}
    assert (mean / RANKS).tolist() == pytest.approx(want, rel=0.005)
    assert min(db(want_grads[n], ours[n]) for n in names) > 20


@on_ranks(2)
def test_experts_under_ddp_have_8_bit_gradients():
    folder, config = _saved(), FP8Config(recipe="rowwise", opt_level="O3")
    model = _loaded(folder)
    optimizer, report = adamw(model, config, lr=1e-3)
    ddp = DistributedDataParallel(model, **ddp_options(model, [optimizer]))
    connect_ddp(ddp, [optimizer])
    parallel = _train(ddp, optimizer, [_batch().chunk(RANKS)[RANK]])
    # Gradients in 8 bits are summed once more over ranks.
    assert_as_in_one_process(folder, config, parallel)
    assert report.num_fp8_gradients >= 2


def _sharded(batches, name="Qwen3Moe", skipped=(), part="experts", **options):
    """Train a model that transformers shards, as in one process; return its report.

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
    assert_as_in_one_process(folder, whole, parallel, part)
    return report.summary()


@on_ranks(2)
def test_sharded_experts_train_as_in_one_process():
    """Expert parallelism weights rows behind the second GEMM, not before its cast."""
    for options in ({}, {"ep_size": RANKS}):
        _sharded([_batch().chunk(RANKS)[RANK]], fsdp_size=RANKS, **options)


def _sharing_a_batch(**options):
    """Expert parallelism of ranks that compute the same tokens.

    In one micro-batch: transformers sums gradients of norms between ranks in each, those of earlier
    micro-batches once more.
    """
    sizes = {"tp_size": RANKS, "ep_size": RANKS, "ep_implementation": "all_reduce"}
    return _sharded([_batch()], part="", **sizes, **options)


@on_ranks(2)
def test_ranks_that_share_a_batch_sum_the_outputs_of_their_experts():
    """Expert parallelism by an all-reduce, of a model of which no FP8 layer is cut."""
    summary = _sharing_a_batch(name="GptOss")
    assert "6 of 7 linear layers" in summary
    assert "tp_plan" not in summary


@on_ranks(2)
def test_layers_that_transformers_cuts_stay_in_bf16_beside_experts_in_fp8():
    summary = _sharing_a_batch(skipped=("self_attn",))
    assert "2 fused weights in FP8" in summary
    assert "and 1 more: its forward was replaced on the instance, for tensor" in summary


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
    """Compare with one process; return what is equal, and the number of transposed payloads."""
    config, turned = FP8Config(recipe="rowwise"), []

    def note(x, *more):
        turned.append(x.qdata.shape)
        return transposed_stacked(x, *more)

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
    assert report.num_gathers == 2
    assert ours <= 0.57 * plain
    for (name, a), b in zip(whole.named_parameters(), sharded.parameters(), strict=True):
        dist.all_reduce(a.grad)
        if "bias" not in name:
            assert db(a.grad.float() / RANKS, full(b.grad).float()) > 20  # in 8 bits
    assert type(next(sharded.parameters())._local_tensor) is torch.Tensor
    return same, len(turned)


@on_ranks(2)
def test_payloads_are_gathered_as_each_gemm_takes_them():
    for layout in ("plain", "gpt-oss"):
        assert _gathered(layout) == ([[True, True]] * 2, 0)


@on_ranks(2)
def test_what_is_gathered_once_for_both_is_transposed():
    """Forward is the same; backward's payload has been rounded by rows before."""
    for options in ({"checkpoints": True}, {"reshard": False}):
        same, turned = _gathered("plain", **options)
        assert [forward for forward, _ in same] == [True, True]
        assert turned >= 4


@on_ranks(2)
def test_experts_that_do_not_divide_travel_as_they_are():
    torch.manual_seed(0)
    block = nn.Sequential(experts("plain", num_experts=3, num_local_experts=3)).bfloat16()
    config = FP8Config(recipe="rowwise")
    convert_to_float8(block, config)
    fully_shard(block)
    report = connect_fsdp(block, config)
    assert report.num_gathers == 0
    assert "3 experts are not divisible by 2 ranks" in str(report)


@on_ranks(2)
def test_a_gathered_weight_reads_as_a_tensor():
    block, reads = _block("gpt-oss"), []
    want = block.experts.down_proj.detach().clone()
    fully_shard(block, reshard_after_forward=True)
    connect_fsdp(block, FP8Config(recipe="rowwise"))

    def read(*_):
        weight = block.experts.down_proj
        reads.append((weight.shape, weight.dtype, db(want.float(), weight.float()) > 30.5))

    block.experts.register_forward_pre_hook(read)
    block.experts.register_full_backward_hook(read)
    _pass(block, 0)
    assert reads == [(want.shape, torch.bfloat16, True)] * 2


@on_ranks(2)
def test_a_graph_finds_in_backward_what_it_has_saved():
    """Eager code gathers the transposed payload in backward, a graph the forward's again.

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
    for (y, grad), (other, other_grad) in zip(want, got, strict=True):
        assert torch.equal(y, other)
        assert db(grad.float(), other_grad.float()) > 35
    assert flips == [False, False, True, True] + [False] * 8


"""Frozen experts on two ranks, below adapters, by DDP and FSDP2."""


def _adapted(layout, frozen=True):
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(0)
    block = _Block(layout).bfloat16()
    targets = ["experts.gate_up_proj", "experts.up_proj", "experts.down_proj"]
    targets = [t for t in targets if hasattr(block.experts, t.partition(".")[2])]
    inject_adapter_in_model(LoraConfig(target_parameters=targets, r=8, lora_alpha=8), block)
    for name, parameter in block.named_parameters():
        if "lora" in name:
            nn.init.normal_(parameter, std=0.1)
            parameter.data = parameter.data.bfloat16()
    rule = {} if frozen else {"frozen_weights": "keep"}
    return block, FP8Config(recipe="rowwise", **rule)


def _experts_of(block):
    return next(m for m in block.modules() if isinstance(m, Float8Experts))


def _trained_adapters(block, wrapped):
    optimizer = torch.optim.SGD([p for p in block.parameters() if p.requires_grad], lr=0.01)
    outputs = []
    for seed in range(2):
        y, _ = _pass(wrapped, seed)
        outputs.append(y)
        if wrapped is block and not isinstance(block, FSDPModule):
            for p in block.parameters():
                if p.grad is not None:
                    dist.all_reduce(p.grad)
                    p.grad /= RANKS
        optimizer.step()
        optimizer.zero_grad()
    adapters = [full(p.detach()).float() for n, p in block.named_parameters() if "lora" in n]
    return outputs, adapters


def assert_adapters_train_as_in_one_process(layout, wrap):
    (whole, config), (block, _), (plain, kept) = (
        _adapted(layout),
        _adapted(layout),
        _adapted(layout, frozen=False),
    )
    for one, options in ((whole, config), (block, config), (plain, kept)):
        report = convert_to_float8(one, options)
        assert len(report.frozen.frozen) == (0 if one is plain else 2), report.frozen
    wrapped, connected = wrap(block, config)
    before, _ = wrap(plain, kept)
    held = [local(w) for w in _experts_of(block)._parameters.values() if local(w).ndim == 3]
    bytes_held = sum(w.payload.num_bytes for w in held if isinstance(w, Float8FrozenWeight))
    numel = sum(local(w).numel() for w in held)
    assert 1 < bytes_held / numel <= 1 + 4 / 48
    # BF16 becomes a byte; scales count apart.
    assert memory_report(plain).weights - memory_report(block).weights == numel
    want, want_adapters = _trained_adapters(whole, whole)
    with count_communication() as count:
        got, adapters = _trained_adapters(block, wrapped)
    with count_communication() as plain_count:
        _trained_adapters(plain, before)
    gathers = [c.of("all-gather").bytes_sent for c in (count, plain_count)]
    assert torch.equal(want[0], got[0]), layout
    assert min(db(a, b) for a, b in zip(want_adapters, adapters, strict=True)) > 40, layout
    if connected is not None:
        assert connected.num_frozen == 2
        assert gathers[0] <= gathers[1]


def _by_fsdp(block, config):
    fully_shard(block, reshard_after_forward=True)
    return block, connect_fsdp(block, config)


def _by_ddp(block, config):
    ddp = DistributedDataParallel(block, **ddp_options(block, []))
    return ddp, None


@on_ranks(2)
def test_adapters_over_frozen_experts_train_as_in_one_process():
    for layout in ("plain", "gpt-oss", "no-gate"):
        assert_adapters_train_as_in_one_process(layout, _by_fsdp)
    for layout in ("plain", "gpt-oss"):
        assert_adapters_train_as_in_one_process(layout, _by_ddp)


@on_ranks(2)
def test_sharded_experts_are_frozen_in_place_and_saved_plain():
    (block, config), (alone, _) = _adapted("plain"), _adapted("plain")
    values = {n: p.detach().clone() for n, p in block.named_parameters()}
    convert_to_float8(alone, config)
    fully_shard(block, reshard_after_forward=True)
    report = convert_to_float8(block, config)
    connect_fsdp(block, config)
    held = [local(w) for w in _experts_of(block)._parameters.values()]
    states = get_model_state_dict(block, options=StateDictOptions(full_state_dict=True))
    saved = {n: v for n, v in states.items() if v.ndim == 3}
    assert min(db(values[n].float(), v.float()) for n, v in saved.items()) > 30.5
    set_model_state_dict(block, states, options=StateDictOptions(full_state_dict=True))
    assert torch.equal(_pass(block, 0)[0], _pass(alone, 0)[0])
    with pytest.raises(RuntimeError, match="thaw the model before fully_shard"):
        thaw(block)
    frozen = sum(isinstance(w, Float8FrozenWeight) for w in held)
    assert len(report.frozen.frozen) == frozen == 2


@on_ranks(2)
def test_experts_that_do_not_divide_are_not_frozen():
    torch.manual_seed(0)
    block = nn.Sequential(experts("plain", num_experts=3, num_local_experts=3)).bfloat16()
    block.requires_grad_(False)
    fully_shard(block)
    report = convert_to_float8(block, FP8Config(recipe="rowwise", frozen_weights="fp8"))
    assert not report.frozen.frozen
    reasons = {reason for _, reason in report.frozen.kept}
    assert reasons == {"3 experts are not divisible by 2 ranks"}


@on_ranks(2)
def test_experts_of_other_ranks_are_not_frozen():
    from transformers.distributed import DistributedConfig

    distributed = DistributedConfig(fsdp_size=RANKS, ep_size=RANKS)
    model = _loaded(_saved(), distributed_config=distributed).requires_grad_(False)
    report = convert_to_float8(model, FP8Config(recipe="rowwise", frozen_weights="fp8"))
    kept = [(name, reason) for name, reason in report.frozen.kept if "experts" in name]
    held = [local(p) for p in model.parameters() if p.ndim == 3]
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=_batch(), labels=_batch()).loss
    assert len(kept) == 2
    assert all("ranks" in reason for _, reason in kept), kept
    assert not any(isinstance(w, Float8FrozenWeight) for w in held)
    assert not loss.isnan()


"""Experts on two ranks that a monitor, a replay and ``auto`` look at."""


@on_ranks(2)
def test_a_monitor_counts_the_tokens_of_all_ranks():
    torch.manual_seed(0)
    config = FP8Config(recipe="rowwise", opt_level="O1", monitor=1)
    block, logged = experts(), {}
    convert_to_float8(block, config)
    ddp = DistributedDataParallel(block)
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-4)
    log = lambda series, step: logged.update({step: series})  # noqa: E731
    monitor = Monitor(block, [optimizer], config, log=log, ddp=lambda: ddp)
    x, scores = torch.randn(64, H), torch.full((64, K), 1 / K)
    for choice in ([2 * RANK, 2 * RANK + 1], [0, 2 * RANK]):
        index = torch.tensor(choice).expand(64, K)
        with torch.autocast("cpu", torch.bfloat16):
            y = ddp(x, index, scores)
        y.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    place = "fp8/experts/"
    assert [logged[i][f"{place}tokens_least"] for i in (1, 2)] == [64, 0]
    assert [logged[i][f"{place}empty"] for i in (1, 2)] == [0, 2]
    assert logged[2][f"{place}tokens_most"] == 192
    assert "no token since step 1 for experts 1, 3" in monitor.events[-1]["what"]


@on_ranks(2)
def test_a_monitor_looks_at_sharded_experts():
    for options in ({}, {"ep_size": RANKS}):
        series = _monitored(fsdp_size=RANKS, **options)
        place = "fp8/model.layers.0.mlp.experts"
        for weight in ("gate_up_proj", "down_proj"):
            for kind in ("input", "weight", "grad_output"):
                assert series[f"{place}.{weight}/{kind}/sqnr"] > 29, (weight, kind)
        assert 128 / 4 <= series[f"{place}/experts/tokens_most"] <= 128


def _monitored(**options):
    from transformers.distributed import DistributedConfig

    config, logged = FP8Config(recipe="rowwise", monitor=1), {}
    model = _loaded(_saved(), distributed_config=DistributedConfig(**options))
    convert_to_float8(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    split_sharded(model, [optimizer], config)
    connect_fsdp(model, config)

    def log(series, step):
        logged.update(series)

    monitor = Monitor(model, [optimizer], config, log=log)
    _train(model, optimizer, [_batch().chunk(RANKS)[RANK]])
    monitor.close()
    assert not monitor._events.has_failed
    return {name: value for name, value in logged.items() if "experts" in name}
