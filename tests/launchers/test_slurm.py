import pytest

from tests.launchers.conftest import SCRIPTS, free_port, losses

pytestmark = pytest.mark.long


def variables(rank, port):
    """What ``srun --nodes=2 --ntasks-per-node=1`` sets for one of the tasks."""
    return {
        "SLURM_JOB_ID": "12345",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_NNODES": "2",
        "SLURM_NODELIST": "localhost",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(rank),
        "SLURM_LOCALID": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def command(*arguments):
    return [SCRIPTS / "slurm.py", *arguments]


def test_two_tasks_train_as_one_node_with_two_processes(outputs):
    one = losses(outputs([*command(1, 2), {"MASTER_PORT": str(free_port())}]))
    port = free_port()
    two = losses(outputs(*[[*command(2, 1), variables(rank, port)] for rank in range(2)]))
    assert {environment for environment, *_ in two.values()} == {"SLURMEnvironment"}
    assert {rank: found[1:] for rank, found in two.items()} == {
        rank: found[1:] for rank, found in one.items()
    }
