import json

import pytest
import torch

from tests.host_loops import WAYS, Net
from tests.processes import free_port, side_by_side
from tests.weight_walk import walk
from torch_fp8 import FP8Config

WAYS_APART = ("own_loop", "trainer", "accelerate", "fabric", "lightning")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("way", WAYS)
def test_user_code_finds_float32_weights(way, level, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FP8_CONFIG", _chosen(level)["TORCH_FP8_CONFIG"])
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8" if way == "trainer" else "no")
    walk(way, level, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("level", "ways"), [("O2", WAYS_APART[:2]), ("O3", WAYS_APART[2:])], ids=["O2", "O3"]
)
def test_user_code_finds_float32_weights_on_two_ranks(level, ways, tmp_path, forked_hosts):
    environment = {**_chosen(level), "WORLD_SIZE": "2"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment |= {"TORCHELASTIC_RUN_ID": "none"}  # hosts start no processes of their own
    command = [forked_hosts, "-W", "ignore", "-m", "tests.user_code_ranks", level, tmp_path, *ways]
    ranks = [{"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    side_by_side((command, {**environment, **rank}) for rank in ranks)


def _chosen(level):
    choices = {"opt_level": level, "emulate": True, "recipe": "tensorwise"}
    return {"TORCH_FP8_CONFIG": json.dumps(choices)}  # of the Trainer, by its flag


SEQUENCES = [
    ("own_loop", "trainer"),
    ("trainer", "trainer"),
    ("trainer", "lightning"),
    ("lightning", "accelerate"),
    ("accelerate", "accelerate"),
    ("fabric", "fabric"),
    ("lightning", "lightning"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("ways", "level"), [(ways, "O2") for ways in SEQUENCES] + [(SEQUENCES[1], "O3")]
)
def test_a_second_host_goes_on_from_what_the_first_has_trained(ways, level, tmp_path, monkeypatch):
    """Phase two, folds, SFT and then DPO: over one model, without a file in between."""
    choices = {"opt_level": level, "emulate": True, "recipe": "tensorwise"}
    monkeypatch.setenv("TORCH_FP8_CONFIG", json.dumps(choices))
    model, seen = Net(), []
    for i, way in enumerate(ways):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8" if way == "trainer" else "no")
        before = {name: x.detach().clone() for name, x in model.state_dict().items()}
        begun = []

        def notice(module, args, options, begun=begun):
            if not begun:
                begun.append(module.weight.detach().clone())

        handle = model.wide.register_forward_pre_hook(notice, with_kwargs=True)
        folder = tmp_path / str(i)
        folder.mkdir()
        saved = WAYS[way](
            FP8Config(**choices), lambda model, optimizer: seen.append(model), folder, model
        )
        handle.remove()
        state = model.state_dict()
        if i:  # the first conversion rounds to 24 bits
            assert torch.equal(begun[0], before["wide.weight"])
        assert {x.dtype for x in saved.values()} == {torch.float32}
        assert all(torch.equal(saved[name], state[name]) for name in state)
        assert (saved["wide.weight"] != before["wide.weight"]).float().mean() > 0.9
    assert len(seen) == 2


AROUND = ("lightning", "accelerate", "fabric", "lightning", "fabric", "accelerate", "lightning")
"""All six orders of two hosts; the first three have both orders of Accelerate and Lightning's."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("level", "ways"), [("O1", AROUND[:3]), ("O2", AROUND), ("O3", AROUND[:3])]
)
def test_hosts_in_one_process_leave_nothing_to_each_other(level, ways, tmp_path, monkeypatch):
    """Hosts before and behind each other: all train as a loop of one's own."""
    config = FP8Config(opt_level=level, emulate=True, recipe="tensorwise")
    for variable in ("TORCH_FP8_CONFIG", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(variable, raising=False)
    want = WAYS["own_loop"](config, lambda model, optimizer: None, tmp_path)
    for i, way in enumerate(ways):
        folder = tmp_path / str(i)
        folder.mkdir()
        saved = WAYS[way](config, lambda model, optimizer: None, folder)
        assert all(torch.equal(saved[name], x) for name, x in want.items()), (i, way)
