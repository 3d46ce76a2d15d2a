import re

import pytest


@pytest.mark.parametrize(
    ("host", "kind"), [("lightning.pytorch", "sharded"), ("lightning_fabric", "fabric")]
)
def test_ranks_with_different_configurations_are_told_before_anything_can_hang(run, host, kind):
    (result,) = run(["different_ranks.py", host, kind])
    assert result.returncode == 0, result.output
    lines = re.findall(r"^rank (\d): (.*)$", result.output, re.M)
    assert sorted(rank for rank, _ in lines) == ["0", "1"], result.output
    for _, message in lines:
        assert message.startswith("ranks have different FP8Configs: "), message
        assert "opt_level is 'O2' on rank 0, 'O1' on rank 1" in message
        assert "communication is 'auto' on rank 0, 'off' on rank 1" in message
        assert "TORCH_FP8_CONFIG is not set on rank 0, set on rank 1)" in message
