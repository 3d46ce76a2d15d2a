import itertools
import os
import socket
import time
import warnings
from unittest import mock

import pytest
import torch.distributed as dist

import torch_fp8
from tests.comm_counter import count_communication
from tests.internals import agreement, check_same_config
from tests.torch_fp8.distributed.ranks import RANK, RANKS, of_ranks, on_ranks
from torch_fp8 import FP8Config

pytestmark = pytest.mark.long
ON_TWO_HOSTS = mock.patch.object(socket, "gethostname", return_value=f"node-{RANK // 2}")


def refusal(config, group=None):
    """Return the error of a check that needs no collective."""
    with count_communication() as count, pytest.raises(ValueError, match="rank") as raised:
        check_same_config(config, group)
    assert count.calls == 0  # whoever is missing is in a collective of its own
    return str(raised.value)


@on_ranks(4)
def test_every_rank_is_told_the_fields_the_values_and_the_ranks():
    check_same_config(FP8Config(recipe="rowwise", skip=("a", "b")))
    several = FP8Config(recipe="rowwise", communication="off" if RANK == 1 else "fp8")
    skips = ("lm_head", "embed") if RANK == 3 else ("lm_head",)
    variable = {"TORCH_FP8_CONFIG": '{"seed": 3}'} if RANK == 1 else {}
    with mock.patch.dict(os.environ, variable):
        said = refusal(FP8Config.from_env() or FP8Config())
    for message, difference in (
        (
            refusal(FP8Config(opt_level="O3" if RANK == 2 else "O2")),
            "opt_level is 'O2' on ranks 0-1, 3, 'O3' on rank 2. ",
        ),
        (
            refusal(several if RANK else FP8Config()),
            "recipe is 'auto' on rank 0, 'rowwise' on ranks 1-3; "
            "communication is 'auto' on rank 0, 'off' on rank 1, 'fp8' on ranks 2-3. ",
        ),
        (
            refusal(FP8Config(skip=skips)),
            "skip is ('lm_head',) on ranks 0-2, ('lm_head', 'embed') on rank 3. ",
        ),
        (
            said,
            "seed is 0 on ranks 0, 2-3, 3 on rank 1 (TORCH_FP8_CONFIG is not set on ranks 0, 2-3, "
            "set on rank 1). ",
        ),
    ):
        expected = f"ranks have different FP8Configs: {difference}Use the same FP8Config on all"
        assert message == f"{expected} ranks"
    check_same_config(FP8Config())  # after an error checks go on


@on_ranks(4)
def test_ranks_of_a_group_have_their_global_numbers():
    pair = dist.new_group([1, 3])
    if RANK in (1, 3):
        assert "seed is 1 on rank 1, 3 on rank 3. " in refusal(FP8Config(seed=RANK), pair)


@on_ranks(4)
def test_other_versions_are_named_with_their_hosts():
    version = "0.0.9" if RANK == 3 else torch_fp8.__version__
    with ON_TWO_HOSTS, mock.patch.object(agreement, "__version__", version):
        assert refusal(FP8Config()) == (
            f"ranks have different versions: torch-fp8 is {torch_fp8.__version__} on node-0 "
            "(ranks 0-1), node-1 (rank 2), 0.0.9 on node-1 (rank 3). Install the same versions "
            "on all hosts"
        )


@on_ranks(4)
def test_several_kinds_of_cards_are_refused_for_auto_and_one_warning_for_a_named_recipe():
    cards = mock.patch.object(agreement, "card_name", return_value=f"H{RANK // 2}00 (sm_90)")
    with ON_TWO_HOSTS, cards, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert refusal(FP8Config()).startswith(
            "recipe 'auto' measures one kind of card, but the card is H000 (sm_90) on node-0 "
            "(ranks 0-1), H100 (sm_90) on node-1 (ranks 2-3). Name a recipe that all of them "
            "support"
        )
        assert not warned
        check_same_config(FP8Config(recipe="rowwise"))
    assert len(warned) == (RANK == 0)
    assert all("H000 (sm_90) on node-0" in str(warning.message) for warning in warned)


@on_ranks(4)
def test_comparisons_that_follow_each_other_are_kept_apart():
    """None may take a rank's description of the one before."""
    for seed in range(200):
        check_same_config(FP8Config(seed=seed))


@on_ranks(4)
def test_a_rank_that_comes_too_late_raises_as_the_others_do():
    dist.barrier()
    if RANK == 3:
        time.sleep(4)  # it comes when the others have given up
    slow = mock.patch.object(agreement, "_WARN_AFTER", 1)
    with ON_TWO_HOSTS, slow, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        message = refusal(FP8Config(agreement_timeout=2))
    others = "rank 3 did not enable FP8 while node-0 (ranks 0-1), node-1 (ra"
    late = "ranks 0-2 did not enable FP8 while node-1 (rank 3) did, or did not get"
    assert message.startswith(late if RANK == 3 else others)
    *texts, of_late = of_ranks([str(warning.message) for warning in warned])
    said = "FP8 is waiting for rank{} to enable it too, for up to 2 s"
    assert list(itertools.chain(*texts)) == [said.format(" 3")]  # one rank warns
    assert of_late == [said.format("s 0-2")]


@on_ranks(4)
def test_a_rank_that_does_not_ask_for_fp8_is_named_after_the_timeout():
    """It goes on as a script without FP8 does, into a collective that nobody else comes to."""
    store = dist.distributed_c10d._get_default_store()
    for missing in (3, 0):
        store.add(f"before {missing}", 1)
        while store.add(f"before {missing}", 0) < RANKS:
            time.sleep(0.01)
        if missing == RANK:
            continue
        start = time.monotonic()
        with ON_TWO_HOSTS:
            message = refusal(FP8Config(agreement_timeout=2))
        # The first rank whose time is over tells the others.
        assert 1.8 < time.monotonic() - start < 20
        assert message.startswith(f"rank {missing} did not enable FP8 while node-0 (rank")


def test_one_process_checks_nothing(single_process_group):
    with count_communication() as count:
        check_same_config(FP8Config())
    assert count.calls == 0
