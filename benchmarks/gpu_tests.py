"""The pytest plugin of `benchmarks.run_gpu`, which orders the GPU tests and writes a CSV.

Tests that have passed on a card before (benchmarks/results/gpu_tests.csv) come last. Among these,
and among the others, the first case of each test function comes first, from the kernels to the
hosts, and then the other cases: when time runs out, every function has run once. From the
beginning the CSV has a row "not run" for each test; it is rewritten whenever a test ends.
"""

import csv
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measurement import ENVIRONMENT, default_device, environment, write_rows
from benchmarks.rows import RESULTS, read_rows

ORDER = (
    *("quantize_gpu", "producers_gpu", "adamw_gpu", "grad_codec_gpu", "messages_gpu"),
    *("experts_gpu",),
    *("replayed_gpu", "mechanisms_gpu", "triton_gemm", "torch_fp8/test_cuda", "layer_benchmark"),
    "autotune",
    *("entries", "trl_frozen", "fsdp/test_cuda", "tensor_parallel", "transformer_engine"),
)
"""Parts of the files' names: kernels, GEMMs, layers and steps, conversion, hosts, several ranks."""
COLUMNS = ("test", "result", "seconds", "note", *ENVIRONMENT)
NOT_RUN = "not run"
COMMITTED = RESULTS / "gpu_tests.csv"


class Results:
    """The rows of a CSV, one for each test."""

    def __init__(self, path: Path) -> None:
        self.path, self.about = path, environment(default_device())
        self.rows: dict[str, dict[str, object]] = {}

    def add(self, tests: list[str]) -> None:
        """Add tests that have not run yet."""
        for test in tests:
            self.rows.setdefault(test, {"test": test, "result": NOT_RUN, **self.about})
        write_rows(self.path, COLUMNS, list(self.rows.values()))

    def pytest_collection_finish(self, session: Any) -> None:
        self.add([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self.add(ids)

    def pytest_runtest_logreport(self, report: Any) -> None:
        row = self.rows[report.nodeid]
        row["seconds"] = round(float(str(row.get("seconds", 0))) + report.duration, 2)
        if report.when == "call" or not report.passed:
            failed = "failed" if report.when == "call" else "error"
            row["result"] = failed if report.failed else report.outcome
            lines = str(report.longrepr or "").strip().splitlines() or [""]
            row["note"] = lines[-1][:200] if report.failed else ""
        if report.when == "teardown" or report.failed:
            self.add([])


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--results", type=Path, help="CSV with a row for each test")


def pytest_configure(config: Any) -> None:
    path = config.getoption("--results")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Results(path))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[Any]) -> None:
    passed = {row["test"] for row in read_rows(COMMITTED) if row["result"] == "passed"}
    cases: Counter[tuple[bool, str]] = Counter()
    keys = {}
    for item in items:
        function, again = item.nodeid.partition("[")[0], item.nodeid in passed
        cases[again, function] += 1
        rank = next((i for i, name in enumerate(ORDER) if name in function), len(ORDER))
        keys[item] = again, cases[again, function] > 1, rank
    items.sort(key=keys.__getitem__)


def counted(path: Path) -> dict[str, int]:
    """Return how many tests had each result; nothing if none was collected."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return dict(Counter(row["result"] for row in csv.DictReader(file)))
