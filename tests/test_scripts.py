"""Set-up by scripts/setup.sh, with a Python that only notes what it is asked for."""

import functools
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.processes import ran

ROOT = Path(__file__).resolve().parent.parent
PYTHON = r"""#!/usr/bin/env bash
echo "$*" >>"$NOTES"
case "$*" in
  "-m pip --version") [ -e "$(dirname "$0")/pip" ] ;;
  "-m venv "*) touch "$VENV/bin/pip" ;;
  "-c import importlib.metadata"*) exit "${HAS_TORCH:-1}" ;;
  *--dry-run*) echo "$REPORT" ;;
  *"download.pytorch.org"*) exit "${PYTORCH_INDEX:-1}" ;;
  *"torch==2.13.0+cpu"*) exit "${LOCAL_CPU:-1}" ;;
  *"install"*) [ -z "${SLEEP:-}" ] || { sleep 60 & echo "$!" >"$NOTES.pid"; wait; } ;;
esac
"""


@pytest.fixture
def project(tmp_path):
    """A copy of the scripts beside a virtual environment of `PYTHON`, and no NVIDIA driver."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/pip").touch()
    python = tmp_path / "venv/bin/python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    (tmp_path / "uname").write_text("#!/bin/sh\necho Linux\n")
    (tmp_path / "uname").chmod(0o755)
    return tmp_path


def environment(project: Path, **settings: str) -> dict[str, str]:
    """What the scripts see: no setting of whoever runs the tests, such as CUDA_BUILD."""
    return {
        "HOME": os.environ.get("HOME", "/"),
        "PATH": f"{project}:/usr/bin:/bin",
        "VENV": str(project / "venv"),
        "PYTHON": str(project / "venv/bin/python"),
        "NOTES": str(project / "notes"),
        **settings,
    }


def installed(project: Path, **settings: str) -> tuple[int, list[str], str]:
    run = subprocess.run(
        ["bash", str(project / "scripts/finetune.sh")],
        env=environment(project, **settings),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    notes = (project / "notes").read_text().splitlines()
    return run.returncode, [n for n in notes if " install " in n and "dry-run" not in n], run.stderr


pytestmark = pytest.mark.skipif(
    shutil.which("nvidia-smi", path="/usr/bin:/bin") is not None,
    reason="this is about the CPU build",
)


@pytest.mark.parametrize(
    ("settings", "torch"),
    [
        ({"HAS_TORCH": "0"}, []),
        ({"LOCAL_CPU": "0"}, ["torch==2.13.0+cpu"]),
        ({"PYTORCH_INDEX": "0"}, ["torch==2.13.0+cpu"] * 2),
        ({"REPORT": '{"name": "filelock"}'}, ["torch==2.13.0+cpu"] * 2 + ["torch==2.13.0"]),
    ],
    ids=["there already", "index at hand", "PyTorch's index", "plain version is a CPU build"],
)
def test_the_cpu_build_is_found_wherever_it_is(project, settings, torch):
    status, commands, _ = installed(project, **settings)
    assert status == 0
    asked = [w for c in commands for w in c.split() if w.startswith("torch==")]
    assert asked == torch
    assert commands[-1].endswith("-e .[examples]")
    started = (project / "notes").read_text().splitlines()[-1]
    assert started == "benchmarks/comparison/finetune.py"


def test_cuda_is_never_downloaded_without_a_driver(project):
    status, commands, error = installed(project, REPORT='{"name": "nvidia-cublas"}')
    assert status == 1
    assert not any(c.endswith("torch==2.13.0 triton==3.6.0") for c in commands)
    assert "There is no CPU build of torch 2.13.0" in error


def test_what_is_set_up_is_not_set_up_again(project):
    installed(project, HAS_TORCH="0")
    (project / "notes").unlink()
    assert installed(project)[1] == []


def test_an_environment_that_was_cut_off_is_made_again(project):
    (project / "venv/bin/pip").unlink()
    status, _, _ = installed(project, HAS_TORCH="0")
    assert status == 0
    assert f"-m venv {project / 'venv'}" in (project / "notes").read_text()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_installation_and_is_the_status(project, signum):
    run = subprocess.Popen(
        ["bash", str(project / "scripts/finetune.sh")],
        env=environment(project, HAS_TORCH="0", SLEEP="1"),
        stdout=subprocess.DEVNULL,
        preexec_fn=functools.partial(signal.signal, signum, signal.SIG_DFL),
    )
    pid = project / "notes.pid"
    deadline = time.monotonic() + 30
    while not (pid.exists() and pid.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    run.send_signal(signum)
    assert run.wait(timeout=30) == 128 + signum
    state = Path(f"/proc/{pid.read_text().strip()}/stat")
    time.sleep(0.2)
    assert not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z"
    assert not (project / "venv/installed-examples").exists()


def test_a_python_on_the_path_that_does_not_run_is_passed_over(tmp_path):
    """pyenv's shims are there for versions that are not chosen, and fail."""
    shim, real = tmp_path / "python3.10", tmp_path / "pyenv/versions/3.10.1/bin/python"
    real.parent.mkdir(parents=True)
    for path, status in ((shim, 127), (real, 0)):
        path.write_text(f"#!/bin/sh\nexit {status}\n")
        path.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/bin", "PYENV_ROOT": str(tmp_path / "pyenv")}
    found = ran("bash", "-c", "source scripts/setup.sh && find_python 3.10", cwd=ROOT, env=env)
    assert found.stdout.strip() == str(real)
