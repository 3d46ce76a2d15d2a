"""Hosts as Ray's TorchTrainer starts them, with the environment, the process group and classes of
the bases that it has: Ray itself is not run.
"""

import pytest

from tests.launchers.conftest import SCRIPTS, losses
from tests.processes import free_port

pytestmark = pytest.mark.long


def workers(kind, **variables):
    both = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    both |= variables
    return [
        [SCRIPTS / "ray_worker.py", kind, {**both, "RANK": str(i), "LOCAL_RANK": str(i)}]
        for i in range(2)
    ]


def test_ddp_and_model_parallel_train_alike(outputs):
    found = {kind: losses(outputs(*workers(kind))) for kind in ("ddp", "model-parallel")}
    for of_ranks in found.values():
        assert sorted(of_ranks) == ["0", "1"]
        assert of_ranks["0"][1:] == of_ranks["1"][1:]
        assert of_ranks["0"][0] == "Float8Linear"
    ddp, sharded = ([float.fromhex(x) for x in of["0"][1:]] for of in found.values())
    assert sharded == pytest.approx(ddp, rel=0.02)


@pytest.mark.parametrize("kind", ["accelerate", "trainer"])
def test_accelerate_and_the_trainer_run_in_rays_process_group(outputs, tmp_path, kind):
    """The precision comes by the script, or by ``runtime_env``, for Ray sets none."""
    variables = {"ACCELERATE_MIXED_PRECISION": "fp8"} if kind == "trainer" else {}
    texts = outputs(*workers(kind, **variables))
    of_ranks = losses(texts)
    assert sorted(of_ranks) == ["0", "1"]
    assert {of_rank[0] for of_rank in of_ranks.values()} == {"Float8Linear"}
    mean = [float.fromhex(value) for value in of_ranks["0"][1:]]
    assert len(mean) == 4  # 64 rows, 8 at a time on each of two ranks
    assert mean[-1] < mean[0]
    assert "gradients averaged in FP8" in texts[0]
    if kind == "accelerate":
        assert of_ranks["0"][1:] == of_ranks["1"][1:]
