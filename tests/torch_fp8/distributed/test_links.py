import contextlib
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from tests.comm_counter import count_communication
from tests.internals import Exchanges, links
from tests.torch_fp8.distributed.cases.fsdp_ranks import (
    BF16,
    batch,
    loss_of,
    model_of,
    train,
    trained,
)
from tests.torch_fp8.distributed.ranks import RANK, on_ranks
from torch_fp8 import (
    FP8Config,
    convert_optimizer,
    convert_to_float8,
    load_scaling_state_dict,
    scaling_state_dict,
)
from torch_fp8.distributed import connect_ddp, connect_fsdp, ddp_options

CODES, GATHERED = "all-to-all torch.uint8", "all-gather torch.uint8"
IN_FLOAT32, SCATTERED = "all-reduce torch.float32", "reduce-scatter torch.bfloat16"
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


@pytest.mark.long
@on_ranks(2)
def test_ranks_decide_by_the_slowest_and_measure_nothing_the_user_has_chosen_or_at_o3():
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
        if name in ("slow O3", "slow fp8", "slow off"):
            assert measured == []
            assert state == {}
        assert (CODES in kinds) == (name not in ("slow O1", "slow O2", "slow off"))
    report, measured, kinds, state = results["slow O1"]
    assert "averaged in their dtype: measured (average 1000.00 ms in 8 bits, 500.00" in report
    assert measured == ["average"]
    assert kinds == [IN_FLOAT32]
    assert state == {links.STATE_KEY: [0, 2, 2, 2]}
    report, measured, kinds, state = results["fast O1"]
    assert "FP8, 1.03 bytes each, measured (average 100.00 ms in 8 bits, 500.00" in report
    assert IN_FLOAT32 not in kinds
    assert state == {links.STATE_KEY: [1, 2, 2, 2]}
    dist.all_gather_object(every := [None] * 2, results)
    assert every[0] == every[1]


@pytest.mark.long
@on_ranks(2)
def test_a_link_is_measured_once():
    with timed(FAST) as measured:
        wrapped(FP8Config())
        wrapped(FP8Config())
    with mock.patch.object(links, "seconds_of", side_effect=AssertionError("measured")):
        _, _, report = wrapped(FP8Config())
    assert measured == ["average"]
    assert str(report) == "2, gradients averaged in FP8, 1.03 bytes each"


@pytest.mark.long
@on_ranks(2)
def test_a_run_that_goes_on_takes_the_choice_of_its_checkpoint():
    """The checkpoint of a job with fast casts goes on where casts are slow, and the reverse; loaded
    before the first forward.
    """
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
            assert torch.equal(saved[links.STATE_KEY], again[links.STATE_KEY])
            fast = first is FAST
            assert ("their dtype: measured" in str(report)) == fast
            assert ("FP8, 1.03 bytes each, as in the checkpoint" in str(early)) == fast
            assert ("their dtype: as in the checkpoint" in str(early)) == (not fast)
            assert (CODES in kinds) == fast
            assert all(loss > 0 for loss in losses)


@pytest.mark.long
@on_ranks(2)
def test_fsdp2s_gathers_and_scatters_are_chosen_apart():
    """Gathers are faster in 8 bits, scatters slower; kept by a checkpoint; named options."""
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
        train(other, optimizer, [1])
        assert (CODES in kinds) == (name in ("fast", "O3", "fp8")), name
        assert (GATHERED in kinds) == (name != "nothing")
        if name in ("O3", "fp8"):
            assert measured == []
        if name in ("slow", "nothing"):
            assert resumed == kinds
        if name == "nothing":
            assert "FSDP2: 0 weights gathered in FP8" in str(report)
        if name == "slow":
            assert measured == ["gather", "scatter"]
            said = "FSDP2: 5 weights gathered in FP8, gradients of 0 modules scattered"
            assert said in str(report)
            said = "measured (gather 100.00 ms in 8 bits, 500.00 in BF16; scatter 900.00"
            assert said in str(report)
            assert SCATTERED in kinds


@pytest.mark.long
@on_ranks(2)
def test_what_is_timed_runs_and_all_ranks_have_the_same_times():
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
    assert [kind for kind, *_ in times] == list(links.KINDS)
    assert all(seconds > 0 for _, *pair in times for seconds in pair)
    assert all(other == every[0] for other in every)


@pytest.mark.long
@on_ranks(2)
def test_a_checkpoint_that_is_loaded_between_steps_is_followed():
    with timed(FAST), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer = trained(FP8Config(), BF16)
        before = kinds_of(lambda: train(model, optimizer, [0]))
        none = dict.fromkeys(links.KINDS, 0)
        state = torch.tensor(list(none.values()), dtype=torch.uint8)
        load_scaling_state_dict(model, {links.STATE_KEY: state})
        after = kinds_of(lambda: train(model, optimizer, [1]))
    assert CODES in before
    assert not {CODES, GATHERED} & set(after)
    assert loss_of(model, batch(2)).isfinite()


def test_a_choice_of_the_user_stays_when_a_checkpoint_has_another():
    named, measured = Exchanges({"average": True}), Exchanges({"average": True}, {}, "measured")
    for exchanges in (named, measured):
        exchanges.adopt({"average": False})
    assert named["average"]
    assert not measured["average"]
    assert measured.note("average") == "as in the checkpoint"


def test_a_single_process_measures_nothing():
    with mock.patch.object(links, "seconds_of", side_effect=AssertionError("measured")):
        model = torch.nn.Linear(2, 2)
        chosen = links.choose_exchanges(model, FP8Config(), {"average": None}, torch.device("cpu"))
    assert all(chosen[kind] for kind in links.KINDS)
    assert links.exchanges_state(model) is None
