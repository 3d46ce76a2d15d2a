"""Fixtures for the engine's tests."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist


@pytest.fixture
def single_process_group(tmp_path):
    """A gloo process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _run_cases(folder, script, module, ranks, variables):
    here = Path(__file__).parent
    search = os.pathsep.join(filter(None, [str(here.parents[1]), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": search, **variables}
    paths = [folder / f"{rank}.json" for rank in range(ranks)]
    command = [sys.executable, "-W", "ignore", here / script]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), module, folder / "store", path],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, path in enumerate(paths)
    ]
    try:
        errors = [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks, errors
    results = [json.loads(path.read_text()) for path in paths]
    failed = [case["error"] for result in results for case in result.values() if "error" in case]
    assert not failed, failed[0]
    return {name: [result[name]["value"] for result in results] for name in results[0]}


@pytest.fixture(scope="session")
def run_fsdp_cases(tmp_path_factory):
    """``run_fsdp_cases(module, ranks)``: what its cases returned, ``{name: [of each rank]}``.

    Environment variables may be given by name; ``ONLY`` has parts of the names of cases to run.
    """

    def run(module, ranks, **variables):
        folder = tmp_path_factory.mktemp("fsdp")
        return _run_cases(folder, "fsdp_ranks.py", module, ranks, variables)

    return run


@pytest.fixture(scope="session")
def run_parallel_cases(tmp_path_factory):
    """As `run_fsdp_cases`, of tensor, sequence and pipeline parallelism."""

    def run(module, ranks, **variables):
        folder = tmp_path_factory.mktemp("parallel")
        return _run_cases(folder, "parallel_ranks.py", module, ranks, variables)

    return run


@pytest.fixture
def scaled_mm_calls(monkeypatch):
    """The keyword arguments of each call of torch's scaled matmul.

    torch 2.11 has ``F.scaled_mm`` for CUDA only; on the CPU the engine calls its predecessor there.
    """
    calls = []
    for owner, name in ((torch.nn.functional, "scaled_mm"), (torch, "_scaled_mm")):
        monkeypatch.setattr(owner, name, _recording(getattr(owner, name), calls))
    return calls


def _recording(function, calls):
    def recorded(*args, **kwargs):
        calls.append(kwargs)
        return function(*args, **kwargs)

    return recorded
