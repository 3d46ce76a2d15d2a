import re

import pytest

pytestmark = pytest.mark.long


def test_a_killed_rank_ends_the_others_and_a_restart_goes_on(run):
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    # Else a rank may find the address of the other's first process in the launcher's store:
    # github.com/pytorch/pytorch/issues/167288.
    fresh_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    (result,) = run([*command, "--max-restarts=1", "dying_rank.py", ".", fresh_store])
    lines = re.findall(r"^attempt (\d) rank (\d) (.*)$", result.output, re.M)
    said = {(int(attempt), int(rank)): [] for attempt, rank, _ in lines}
    for attempt, rank, text in lines:
        said[int(attempt), int(rank)].append(text)
    end = ["trained steps [3, 4, 5]", "trained steps [0, 1, 2, 3, 4, 5]", "is equal True"]
    assert said == {(0, 1): ["is killed"], (1, 0): end, (1, 1): [*end, "is killed"]}, result.output
    # The second time nothing is left to restart: the launcher says who it was.
    assert result.returncode != 0
    assert "fp8_grad_reducer.py" in result.output  # what waits for the other rank
    assert re.search(r"rank +: 1 \(local_rank: 1\)\s+exitcode +: -9", result.output)
