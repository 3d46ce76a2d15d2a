"""Fixtures for the engine's tests."""

import json
import os
from pathlib import Path

import pytest
import torch

from tests.processes import side_by_side


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory, forked_hosts):
    """``run_ranks(script, ranks, *arguments)``: the JSON that each of its processes has written.

    Each is ``python script <rank> <ranks> <file of the store> <file of the result> <arguments>``;
    environment variables may be given by name.
    """

    def run(script, ranks, *arguments, **variables):
        folder = tmp_path_factory.mktemp(Path(script).stem)
        here = Path(__file__).parent / "distributed" / "cases"
        search = os.pathsep.join(filter(None, [str(here.parents[3]), os.environ.get("PYTHONPATH")]))
        environment = {"PYTHONPATH": search, **variables}
        results = [folder / f"{rank}.json" for rank in range(ranks)]
        command = [forked_hosts, "-W", "ignore", here / script]
        side_by_side(
            (
                [*command, rank, ranks, folder / "store", result, *arguments],
                {**environment, "TEST_RANK": f"{rank} {ranks}"},
            )
            for rank, result in enumerate(results)
        )
        return [json.loads(result.read_text()) for result in results]

    return run


@pytest.fixture(scope="session")
def run_cases(run_ranks):
    """``run_cases(modules, ranks, *names)``: what cases returned, ``{name: [of each rank]}``.

    Environment variables may be given by name; names are parts of those of the cases to run.
    """

    def run(modules, ranks, *names, **variables):
        results = run_ranks("run_cases.py", ranks, modules, *names, **variables)
        failed = [
            case["error"] for result in results for case in result.values() if "error" in case
        ]
        assert not failed, failed[0]
        return {name: [result[name]["value"] for result in results] for name in results[0]}

    return run


@pytest.fixture(scope="module")
def ranks(request, run_ranks):
    """Return the errors of each test of this file `on_ranks`, by name: one for each rank, or ""."""
    items = [i for i in request.session.items if i.path == request.path and hasattr(i, "callspec")]
    tests = [i.originalname for i in items if i.callspec.params.get("ranks") == request.param]
    module = ".".join(request.path.relative_to(request.config.rootpath).with_suffix("").parts)
    results = run_ranks("run_cases.py", request.param, module, *tests)
    not_run = {"error": "not run, because another test failed"}
    return {t: [result.get(t, not_run).get("error", "") for result in results] for t in tests}


@pytest.fixture
def scaled_mm_calls(monkeypatch):
    """The keyword arguments of each call of torch's scaled matmul.

    torch 2.11 has ``F.scaled_mm`` for CUDA only; on the CPU the engine calls its predecessor there.
    """
    calls = []
    for name in ("_scaled_mm_v2", "_scaled_mm"):
        monkeypatch.setattr(torch, name, _recording(getattr(torch, name), calls))
    return calls


@pytest.fixture
def weight_casts(monkeypatch):
    """The shapes of what has 64 rows or more and is cast, in order: of weights."""
    from tests.internals import halves_module, quantizer

    shapes = []
    for module in (quantizer, halves_module):

        def counted(x, *args, original=module.quantize_layouts, **kwargs):
            if len(x) >= 64:
                shapes.append(tuple(x.shape))
            return original(x, *args, **kwargs)

        monkeypatch.setattr(module, "quantize_layouts", counted)
    return shapes


def _recording(function, calls):
    def recorded(*args, **kwargs):
        last = zip(("bias", "output_dtype", "", "use_fast_accum"), args[8:], strict=False)
        calls.append(dict(last) | kwargs)
        return function(*args, **kwargs)

    return recorded
