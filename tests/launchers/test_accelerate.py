"""``accelerate launch`` and ``notebook_launcher`` on two machines, or what passes for them."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.launchers.conftest import SCRIPTS, free_port, losses

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
TORCHRUN = ("torch.distributed.run", "--nnodes", 2, "--rdzv_backend", "c10d", "--max_restarts", 0)
# The launcher starts several processes as on GPUs; the script asks Accelerate for the CPU.
LAUNCH = ("accelerate.commands.launch", "--multi_gpu", "--mixed_precision", "fp8")


def machines(backend="static"):
    """The launcher's words on each of two machines."""
    both = (*LAUNCH, "--num_processes", 2, "--num_machines", 2, "--rdzv_backend", backend)
    meet = (*both, "--main_process_ip", "127.0.0.1", "--main_process_port", free_port())
    commands = [[*meet, "--machine_rank", rank] for rank in range(2)]
    if backend == "c10d":  # each would take itself for the host of 127.0.0.1
        for rank, words in enumerate(commands):
            words += ["--rdzv_conf", f"is_host={1 - rank}"]
    return commands


@pytest.fixture(scope="module")
def of_one_machine():
    """Filled by the first test that needs it."""
    return {}


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_two_machines_train_as_one_with_two_processes(outputs, of_one_machine, backend):
    """Bit for bit, on gloo."""
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


def test_a_machine_without_the_package_is_named_by_the_others(start):
    """Its launcher stops at once where no FP8 library is there; stock torchao would run FP8 of its
    own, and never asks for this package's.
    """
    both = {"TORCH_FP8_CONFIG": '{"agreement_timeout": 5}', "ACCELERATE_MIXED_PRECISION": "fp8"}
    meet = (*TORCHRUN, "--rdzv_endpoint", f"127.0.0.1:{free_port()}")
    host, guest = (("--node_rank", rank, "--rdzv_conf", f"is_host={1 - rank}") for rank in (0, 1))
    first = start(*meet, *host, SCRIPTS / "train.py", **both)
    without = {**both, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    second = start(*meet, *guest, SCRIPTS / "train.py", python=sys.executable, **without)
    assert first.wait(timeout=150) != 0
    assert re.search(r"ValueError: rank [01] did not enable FP8 while", first.log.read_text())
    second.kill()


def test_two_versions_are_refused_by_name(start, tmp_path):
    """The second machine has an environment with another version of this package."""
    older = environment_of("0.0.9", tmp_path / "older")
    words = [[*one, SCRIPTS / "train.py"] for one in machines()]
    first = start(*words[0])
    second = start(*words[1], python=sys.executable, PYTHONPATH=str(older))
    for process in (first, second):
        assert process.wait(timeout=150) != 0
        said = process.log.read_text()
        assert "ranks have different versions: torch-fp8 is " in said
        assert "0.0.9 on rank 1. Install the same versions on all hosts" in said


def environment_of(version, folder):
    """A folder of packages that comes before the installed ones: this one, of another version."""
    for package in ("torch_fp8", "torch_fp8_tools", "lightning_fp8", "accelerate_fp8"):
        shutil.copytree(ROOT / package, folder / package)
    for module in ROOT.glob("_fp8_*.py"):
        shutil.copy(module, folder)
    info = folder / f"torch_fp8-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: torch-fp8\nVersion: {version}\n")
    points = "[torch.backends]\nfp8_autoload = _fp8_autoload:load\n"
    (info / "entry_points.txt").write_text(points)
    return folder
