import os
import subprocess
import sys

import pytest

from tests.launchers.conftest import SCRIPTS

pytest.importorskip("ray.train")
pytestmark = [pytest.mark.ray, pytest.mark.long]
SETTINGS = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """What the script said, and host -> [class of a layer and losses of each rank]."""
    folder = tmp_path_factory.mktemp("ray")
    search = os.pathsep.join(
        filter(None, [os.getcwd(), str(SCRIPTS), os.environ.get("PYTHONPATH")])
    )
    done = subprocess.run(
        [sys.executable, SCRIPTS / "ray_cluster.py", folder],
        env={**os.environ, **SETTINGS, "HF_HOME": str(folder), "PYTHONPATH": search},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = {}
    for path in sorted(folder.glob("*-[01]")):
        losses.setdefault(path.name.rpartition("-")[0], []).append(path.read_text().split())
    return done.stdout, losses


@pytest.mark.parametrize("host", ["accelerate", "trainer", "ddp", "model-parallel"])
def test_both_workers_train_in_fp8(cluster, host):
    said, losses = cluster
    assert host in losses, said
    ranks = losses[host]
    assert [rank[0] for rank in ranks] == ["Float8Linear", "Float8Linear"]
    first, *_, last = map(float, ranks[0][1:])
    assert last < first
    if host != "trainer":  # whose rank zero alone logs the mean
        assert ranks[0] == ranks[1]


def test_model_parallel_trains_as_ddp(cluster):
    ddp, sharded = (
        [float(x) for x in cluster[1][host][0][1:]] for host in ("ddp", "model-parallel")
    )
    assert sharded == pytest.approx(ddp, rel=0.02)


def test_fsdp1_is_refused_by_name(cluster):
    said, losses = cluster
    assert "fsdp" not in losses
    (line,) = (line for line in said.splitlines() if line.startswith("ValueError: precision"))
    assert "does not run under FSDPStrategy: use ModelParallelStrategy (FSDP2)" in line
