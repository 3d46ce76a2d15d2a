"""Process groups that are made again in the processes of the first: torchft, Ray, elastic loops."""

import re

import pytest

from tests.launchers.conftest import SCRIPTS
from tests.processes import free_port

pytestmark = pytest.mark.long
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc_per_node", 2)


def test_ranks_agree_anew_in_each_group_and_train_alike(outputs):
    (text,) = outputs([*TORCHRUN, SCRIPTS / "regroup.py", free_port()])
    lines = re.findall(r"rank (\d) generation (\w+): (.*)", text)
    assert sorted(r for r, g, said in lines if g == "end") == ["0", "1"], text

    def said(rank, generation):
        return [line for r, g, line in lines if (r, g) == (str(rank), str(generation))]

    (left,) = (line for line in said(0, 0) if "did not enable" in line)
    assert left.startswith("rank 1 did not enable FP8 while")
    for rank in (0, 1):
        trained = [line for line in said(rank, 0) if line.startswith(("ddp", "fsdp"))]
        assert len(trained) == 2
        differing, *again = said(rank, 2)
        assert "seed is 0 on rank 0, 1 on rank 1" in differing
        assert again == trained == said(rank, 3)
    assert [line.split()[0] for line in said(0, 1)] == ["ddp", "fsdp"]
    assert said(1, 1) == []
