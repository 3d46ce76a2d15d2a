"""Two processes on gloo: DDP, and FSDP2."""

import re
from collections.abc import Callable

FP8 = ("--mixed_precision", "fp8")


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


def test_fsdp2_converts_before_sharding(run: Callable) -> None:
    done = run("fsdp2.py", launch=FP8, processes=2)
    # 3 steps on each rank.
    assert (done.fp8, done.linear) == (2 * 3 * (3 + 3 + 2), 0)
    assert "sharded True" in done.stdout
    assert (
        "state ['0.bias', '0.weight', '2.bias', '2.weight', '4.bias', '4.weight'] {'Tensor'}"
        in (done.stdout)
    )
    assert re.findall(r"\[RANK (\d)\] FP8: 3 of 3 linear layers", done.stderr) == ["0"]


def test_ddp_leaves_each_rank_the_amaxes_of_its_own_data(run: Callable) -> None:
    delayed = {"TORCH_FP8_CONFIG": '{"recipe": "delayed"}'}
    done = run("uneven_ranks.py", launch=FP8, processes=2, **delayed)
    amaxes = re.findall(r"rank (\d): amaxes (.*)", done.stdout)
    assert sorted(amaxes) == [("0", "[1.0, 1.0, 1.0]"), ("1", "[10.0, 10.0, 10.0]")]
