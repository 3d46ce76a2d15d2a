"""Two processes on gloo: DDP, and FSDP2."""

import re
from collections.abc import Callable

FP8 = ("--mixed_precision", "fp8")
DELAYED = {"TORCH_FP8_CONFIG": '{"recipe": "delayed"}'}


def test_ddp_runs_fp8_gemms_and_keeps_replicas_equal(run: Callable) -> None:
    done = run("loop.py", launch=FP8, processes=2)
    assert done.processes == 2
    # 8 micro-batches over both ranks, 3 layers; dgrad for all but the first.
    assert (done.fp8, done.linear) == (8 * (3 + 3 + 2), 0)
    weights = re.findall(r"rank (\d): weights (\S+)", done.stdout)
    assert sorted(rank for rank, _ in weights) == ["0", "1"]
    assert len({value for _, value in weights}) == 1
    # The summary comes from rank zero only.
    assert re.findall(r"\[RANK (\d)\] FP8: 3 of 3 linear layers", done.stderr) == ["0"]


def test_fsdp2_converts_before_sharding_and_restores_histories(run: Callable) -> None:
    done = run("fsdp2.py", launch=FP8, processes=2, **DELAYED)
    # 3 steps and 1 on each rank.
    assert (done.fp8, done.linear) == (2 * 4 * (3 + 3 + 2), 0)
    assert "sharded True" in done.stdout
    assert "loss finite True" in done.stdout
    names = ["0.bias", "0.weight", "2.bias", "2.weight", "4.bias", "4.weight"]
    assert f"state {names} {{'Tensor'}}" in done.stdout
    assert re.findall(r"\[RANK (\d)\] FP8: 3 of 3 linear layers", done.stderr) == ["0"]
    restored = re.findall(r"rank (\d): 6 buffers moved True restored True", done.stdout)
    assert sorted(restored) == ["0", "1"]


def test_ddp_leaves_each_rank_the_amaxes_of_its_own_data(run: Callable) -> None:
    done = run("uneven_ranks.py", launch=FP8, processes=2, **DELAYED)
    # The ranks share one pipe: a line of one may follow the other's without a line break.
    amaxes = re.findall(r"rank (\d): amaxes (\[.*?\])", done.stdout)
    assert sorted(amaxes) == [("0", "[1.0, 1.0, 1.0]"), ("1", "[10.0, 10.0, 10.0]")]
