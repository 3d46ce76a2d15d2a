"""What ``communication="auto"`` measures and decides, on gloo ranks that stand for NCCL's and whose
timers differ; run by run_cases.py.
"""

import contextlib
import warnings
from unittest import mock

import torch
import torch.distributed as dist
from fsdp_ranks import BF16, RANK, batch, loss_of, model_of, train, trained
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from tests.comm_counter import count_communication
from tests.internals import links
from torch_fp8 import (
    FP8Config,
    convert_optimizer,
    convert_to_float8,
    load_scaling_state_dict,
    scaling_state_dict,
)
from torch_fp8.distributed import connect_ddp, connect_fsdp, ddp_options

SLOW_ON_RANK_1 = {"average": (1.0, 0.5), "gather": (0.1, 0.5), "scatter": (0.9, 0.5)}
"""Seconds in 8 bits and in BF16 on rank 1; on rank 0 8 bits take a tenth of BF16's."""
FAST = {"average": (0.1, 0.5), "gather": (0.1, 0.5), "scatter": (0.1, 0.5)}


@contextlib.contextmanager
def timed(seconds):
    """Measure on gloo, by a timer of our own; yields the kinds that were measured."""
    measured, links._times = [], type(links._times)()

    def runs(kind, group, device):
        measured.append(kind)
        return seconds[kind] if RANK == 1 else (0.05, 0.5)  # in place of two functions

    with (
        mock.patch.object(links, "_MEASURED_BACKENDS", ("gloo",)),
        mock.patch.object(links, "_runs", runs),
        mock.patch.object(links, "seconds_of", lambda run, device: run),
    ):
        yield measured


def wrapped(config):
    model = model_of()
    convert_to_float8(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if config.opt_level != "O1":
        convert_optimizer(optimizer, config, model=model)
    ddp = DistributedDataParallel(model, **ddp_options(model, [optimizer]))
    return ddp, optimizer, connect_ddp(ddp, [optimizer], config)


def kinds_of(run):
    with count_communication() as count:
        run()
    return sorted({f"{row.kind} {row.dtype}" for row in count.rows if row.kind != "broadcast"})


def case_ddp():
    results = {}
    for name, seconds, options in (
        ("slow O1", SLOW_ON_RANK_1, {"opt_level": "O1"}),
        ("slow O2", SLOW_ON_RANK_1, {}),
        ("slow O3", SLOW_ON_RANK_1, {"opt_level": "O3"}),
        ("slow fp8", SLOW_ON_RANK_1, {"communication": "fp8"}),
        ("slow off", SLOW_ON_RANK_1, {"communication": "off"}),
        ("fast O1", FAST, {"opt_level": "O1"}),
        ("fast O2", FAST, {}),
    ):
        with timed(seconds) as measured:
            ddp, optimizer, report = wrapped(FP8Config(**options))
            state = scaling_state_dict(ddp.module)
        kinds = kinds_of(lambda ddp=ddp, optimizer=optimizer: train(ddp, optimizer, [0, 1]))
        state = {key: value.tolist() for key, value in state.items()}
        results[name] = [str(report), measured, kinds, state]
    return results


def case_ddp_once():
    with timed(FAST) as measured:
        wrapped(FP8Config())
        wrapped(FP8Config())
    with mock.patch.object(links, "seconds_of", side_effect=AssertionError("measured")):
        _, _, report = wrapped(FP8Config())
    return measured, str(report)


def case_ddp_resumes():
    """The checkpoint of a job with fast casts goes on where casts are slow, and the reverse; loaded
    before the first forward.
    """
    results = {}
    for level in ("O1", "O2"):
        for first, then in ((FAST, SLOW_ON_RANK_1), (SLOW_ON_RANK_1, FAST)):
            with timed(first):
                ddp, _, _ = wrapped(FP8Config(opt_level=level))
                saved = scaling_state_dict(ddp.module)
            with timed(then):
                ddp, optimizer, report = wrapped(FP8Config(opt_level=level))
                load_scaling_state_dict(ddp.module, saved)
                again = scaling_state_dict(ddp.module)
                # A model whose state is loaded before it is wrapped measures nothing.
                model = model_of()
                convert_to_float8(model, FP8Config(opt_level=level))
                load_scaling_state_dict(model, saved)
                links._times.clear()
                early = connect_ddp(DistributedDataParallel(model), [], FP8Config(opt_level=level))
            losses = []
            kinds = kinds_of(
                lambda: losses.extend(train(ddp, optimizer, [s]).item() for s in range(2))  # noqa: B023
            )
            same = torch.equal(saved[links.STATE_KEY], again[links.STATE_KEY])
            fast = first is FAST
            results[f"{level} {fast}"] = [str(report), str(early), kinds, same, losses]
    return results


def case_fsdp():
    """Gathers are faster in 8 bits, scatters slower; kept by a checkpoint; named options."""
    results = {}
    for name, seconds, options in (
        ("slow", SLOW_ON_RANK_1, {}),
        ("fast", FAST, {}),
        ("O3", SLOW_ON_RANK_1, {"opt_level": "O3"}),
        ("fp8", SLOW_ON_RANK_1, {"communication": "fp8"}),
        ("nothing", {"gather": (1.0, 0.5), "scatter": (1.0, 0.5)}, {}),
    ):
        config = FP8Config(**options)
        with timed(seconds) as measured:
            model, optimizer = trained(config, BF16)
            report = connect_fsdp(model, config)
            saved = scaling_state_dict(model)
        kinds = kinds_of(lambda m=model, o=optimizer: train(m, o, [0]))
        with timed(FAST):
            other, optimizer = trained(config, BF16)
            load_scaling_state_dict(other, saved)
            resumed = kinds_of(lambda m=other, o=optimizer: train(m, o, [0]))
        losses = [float(train(one, o, [1])) for one, o in ((other, optimizer),)]
        results[name] = [str(report), measured, kinds, resumed, losses]
    return results


def case_real_timers():
    with (
        mock.patch.object(links, "_MEASURED_BACKENDS", ("gloo",)),
        mock.patch.object(links, "NUMEL", 1 << 12),
    ):
        links._times.clear()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        group = mesh.get_group()
        groups = dict.fromkeys(links.KINDS, group)
        exchanges = links.choose_exchanges(
            nn.Linear(1, 1), FP8Config(), groups, torch.device("cpu")
        )
    times = [[kind, t.eight_bits, t.plain] for kind, t in exchanges.times.items()]
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, (times, exchanges.in_8_bits))
    links._times.clear()
    return times, all(other == every[0] for other in every)


def case_still_trains_mid_run():
    with timed(FAST), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer = trained(FP8Config(), BF16)
        before = kinds_of(lambda: train(model, optimizer, [0]))
        none = dict.fromkeys(links.KINDS, 0)
        state = torch.tensor(list(none.values()), dtype=torch.uint8)
        load_scaling_state_dict(model, {links.STATE_KEY: state})
        after = kinds_of(lambda: train(model, optimizer, [1]))
    return before, after, bool(loss_of(model, batch(2)).isfinite())
