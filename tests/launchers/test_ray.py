"""Lightning as Ray starts it, with classes of the same bases: Ray is not installed."""

import pytest

from tests.launchers.conftest import SCRIPTS, free_port, losses

pytestmark = pytest.mark.long


def workers(kind):
    """One command for each of two workers, with the variables that Ray sets."""
    both = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    script = SCRIPTS / "ray_classes.py"
    return [[script, kind, {**both, "RANK": str(i), "LOCAL_RANK": str(i)}] for i in range(2)]


def test_ddp_and_model_parallel_train_alike(outputs):
    found = {kind: losses(outputs(*workers(kind))) for kind in ("ddp", "model-parallel")}
    for of_ranks in found.values():
        assert sorted(of_ranks) == ["0", "1"]
        assert of_ranks["0"][1:] == of_ranks["1"][1:]
        assert of_ranks["0"][0] == "True"  # it ran in FP8
    ddp, sharded = ([float.fromhex(x) for x in of["0"][1:]] for of in found.values())
    assert sharded == pytest.approx(ddp, rel=0.02)


def test_fsdp1_is_refused_by_name(outputs):
    for text in outputs(*workers("fsdp")):
        assert "refused: " in text
        assert "ModelParallelStrategy" in text
