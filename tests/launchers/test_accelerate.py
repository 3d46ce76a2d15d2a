"""``accelerate launch`` and ``notebook_launcher`` on two machines, or what passes for them."""

import pytest

from tests.launchers.conftest import SCRIPTS, losses
from tests.processes import free_port

pytestmark = pytest.mark.long

# The launcher starts several processes as on GPUs; the script asks Accelerate for the CPU.
LAUNCH = ("accelerate.commands.launch", "--multi_gpu", "--mixed_precision", "fp8")


def machines(backend="static"):
    both = (*LAUNCH, "--num_processes", 2, "--num_machines", 2, "--rdzv_backend", backend)
    meet = (*both, "--main_process_ip", "127.0.0.1", "--main_process_port", free_port())
    commands = [[*meet, "--machine_rank", rank] for rank in range(2)]
    if backend == "c10d":  # each would take itself for the host of 127.0.0.1
        for rank, words in enumerate(commands):
            words += ["--rdzv_conf", f"is_host={1 - rank}"]
    return commands


@pytest.fixture(scope="module")
def of_one_machine():
    return {}


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_two_machines_train_as_one_with_two_processes(outputs, of_one_machine, backend):
    if not of_one_machine:
        port = ("--main_process_port", free_port())
        one = (*LAUNCH, "--num_processes", 2, *port, SCRIPTS / "train.py")
        of_one_machine.update(losses(outputs(one)))
    # Without it two launchers on one machine wait for each other in some runs of c10d.
    apart = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    commands = [[*words, SCRIPTS / "train.py", apart] for words in machines(backend)]
    found = losses(outputs(*commands))
    assert sorted(found) == ["0", "1"]
    assert found["0"][:2] == ["Float8Linear", "2"]
    assert found == of_one_machine


def test_notebook_launcher_trains_as_one_machine(outputs, of_one_machine):
    found = losses(outputs([SCRIPTS / "notebook.py", free_port(), "fp8"]))
    assert found["0"][:2] == ["Float8Linear", "2"]
    assert found == (of_one_machine or found)
