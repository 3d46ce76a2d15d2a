"""The examples import one another by their folder, as scripts do, and share one set of assets."""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "benchmarks/comparison"
sys.path.insert(0, str(EXAMPLES))

import assets as example_assets  # noqa: E402


@pytest.fixture(scope="session")
def once(tmp_path_factory) -> Callable[[str, Callable[[Path], None]], Path]:
    """`once(name, make)`: a folder that `make` filled, for all workers of the session."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent

    def make_once(name: str, make: Callable[[Path], None]) -> Path:
        folder = base / f"examples_{name}"
        folder.mkdir(exist_ok=True)
        with (base / f"examples_{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "made").exists():
                make(folder)
                (folder / "made").touch()
        return folder

    return make_once


@pytest.fixture(scope="session")
def assets_cache(once) -> Path:
    """The cache that `--assets` takes, holding the quick preset."""
    return once("assets", lambda folder: example_assets.prepare(example_assets.QUICK, folder, 25))


def environment_in(folder: Path) -> dict[str, str]:
    """One thread, no network, and the probe that counts GEMMs into folder/probe."""
    (folder / "probe").mkdir(exist_ok=True)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "TORCH_FP8_"))}
    return {
        **kept,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests/probe"), str(ROOT)]),
        "FP8_PROBE_OUT": str(folder / "probe"),
    }


def run_example(command: list[str], folder: Path) -> str:
    """Run it in `folder` to its end and return what it printed."""
    run = subprocess.run(
        command,
        env=environment_in(folder),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout[-6000:]
    return run.stdout


def gemm_counts(folder: Path, ending: str) -> dict[str, int]:
    """Sum the probe's counts over the processes of which an argument ends with `ending`."""
    counts = {"scaled_mm": 0, "linear": 0}
    for path in (folder / "probe").glob("*.json"):
        seen = json.loads(path.read_text())
        if any(argument.endswith(ending) for argument in seen["argv"]):
            for name in counts:
                counts[name] += seen[name]
    return counts
