import re

import pytest

pytestmark = pytest.mark.long


FP8 = ("--mixed_precision", "fp8")
DELAYED = {"TORCH_FP8_CONFIG": '{"recipe": "delayed"}'}


def test_levels_under_ddp_keep_replicas_equal_and_resume_bit_for_bit(run):
    modes = ("O1", "O2", "O3", "unused", "late", "hook")
    done = run("replicas.py", *modes, launch=FP8, processes=2)
    assert done.fp8 > 0
    assert done.linear == 0
    assert "[RANK 0] FP8: 2 of 2 linear layers" in done.stderr
    assert "[RANK 1] FP8" not in done.stderr
    line = r"(\w+) rank (\d): (weight \S+ grad \S+ view \S+) loss (\S+) (sums \S+ \S+)"
    lines = re.findall(line, done.stdout)
    of = {mode: sorted(line[1:] for line in lines if line[0] == mode) for mode in modes}
    for mode, ranks in of.items():
        assert [rank for rank, *_ in ranks] == ["0", "1"], mode
        assert ranks[0][1:] == ranks[1][1:], mode
    formats = {mode: ranks[0][1] for mode, ranks in of.items()}
    assert formats == {
        "O1": "weight Parameter grad Tensor view True",
        "O2": "weight SplitWeight grad WideGrad view True",
        "O3": "weight SplitWeight grad Float8Grad view True",
        "unused": "weight SplitWeight grad Tensor view True",
        "late": "weight Parameter grad Tensor view True",
        "hook": "weight Parameter grad Tensor view True",
    }
    losses = {mode: float(ranks[0][2]) for mode, ranks in of.items()}
    assert losses == pytest.approx(dict.fromkeys(modes, losses["O1"]), rel=0.01)
    residuals = {mode: ranks[0][3].split()[-1] for mode, ranks in of.items()}
    assert residuals["O1"] == residuals["late"] == residuals["hook"] == "0"
    assert "0" not in (residuals["O2"], residuals["O3"])
    assert done.stdout.count("resumed True") == 2 * len(modes)
    assert "2 gradients in 8 bits" in done.stderr
    assert done.stderr.count("ranks     2, gradients averaged in FP8, 1.03 bytes each") == 10
    users = "gradients averaged in their dtype: the communication hook fp16_compress_hook is"
    assert done.stderr.count(users) == 2
    assert "no gradients in 8 bits: DistributedDataParallel(find_unused_parameters" in done.stderr
    assert "2 weights stay float32: DistributedDataParallel has wrapped them" in done.stderr


def test_fsdp1_runs_the_gemms_alone_and_says_so(run):
    done = run("fsdp1.py", launch=FP8, processes=2)
    assert (done.fp8, done.linear) == (2 * 4 * (3 + 3 + 2), 0)
    assert done.stdout.count("FullyShardedDataParallel torch.float32") == 2
    assert "AdamW keeps its own states: FSDP1 flattens the weights" in done.stderr


def test_ddp_leaves_each_rank_the_amaxes_of_its_own_data(run):
    done = run("uneven_ranks.py", launch=FP8, processes=2, **DELAYED)
    # The ranks share one pipe: a line of one may follow the other's without a line break.
    amaxes = re.findall(r"rank (\d): amaxes (\[.*?\])", done.stdout)
    assert sorted(amaxes) == [("0", "[1.0, 1.0, 1.0]"), ("1", "[10.0, 10.0, 10.0]")]


def test_ranks_that_ask_for_different_things_are_told(run):
    done = run("different_ranks.py", launch=(), processes=2)
    said = dict(re.findall(r"rank (\d): (.*)", done.stdout))
    for rank in ("0", "1"):
        assert said[rank].startswith("ranks have different FP8Configs: "), said
        assert "recipe is 'auto' on rank 0, 'rowwise' on rank 1" in said[rank]
        assert "TORCH_FP8_CONFIG is not set on rank 0, set on rank 1)" in said[rank]
