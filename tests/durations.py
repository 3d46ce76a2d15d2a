"""What tests take: the rule for long ones, the record, and the order in which they are handed out.

The measure is processor time, that of the processes a test starts and waits for included, so that
what else the machine does hardly counts. A test that takes more than `LIMIT_S` with its set-up must
have the marker ``long``; ``scripts/test.sh --fast`` leaves those out, but for the ones marked
``smoke``. Of a parametrized test that is in the record, ``scripts/test.sh`` runs the `samples`; the
other items get the marker ``combination`` and run with ``--all``, or if you name the file. The
``--fast`` run takes as many samples as last `FAST_S`, at least one; the others are ``costly``.

Every run with ``--junit-xml=FILE`` writes the seconds into FILE. ``python -m tests.durations FILE``
makes durations.json of it. With that, pytest-xdist is handed the longest files first: files stay
together, for their tests share what they set up.
"""

import functools
import json
import os
import sys
import time
import xml.etree.ElementTree
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

LIMIT_S = 5.0
FAST_S = 0.5
"""What ``--fast`` spends on one parametrized test, unless its first sample takes longer."""
LOOP_S = 0.06
"""What `slowness` takes on the machine that durations.json is of."""
NEW_MODULES = 50
"""A test that imports more than these pays for a library, which another would pay for otherwise."""
RECORD = Path(__file__).with_name("durations.json")
PROPERTY = "cpu_seconds"
SERVERS = []  # of tests.forked_python
STARTED = pytest.StashKey[tuple[float, int]]()


def processor_seconds() -> float:
    """Of this process, of the children it waited for, and of what `SERVERS` have started."""
    return sum(os.times()[:4]) + sum(server.processor_seconds() for server in SERVERS)


@functools.cache
def slowness() -> float:
    """How many times as long this machine takes as the one that durations.json is of, at least 1.

    Half as much again is for what others do to its caches meanwhile.
    """
    start = time.process_time()
    for _ in range(3_000_000):
        pass
    return 1.5 * max(1.0, (time.process_time() - start) / LOOP_S)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item):
    item.stash[STARTED] = processor_seconds(), len(sys.modules)
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item):
    before, modules = item.stash[STARTED]
    # Before the teardown: that of the last test ends the servers, whose own start is no test's.
    seconds = processor_seconds() - before
    result = yield
    item.user_properties.append((PROPERTY, round(seconds, 2)))
    too_long = seconds > LIMIT_S and seconds > LIMIT_S * slowness()
    if too_long and not is_long(item) and len(sys.modules) - modules <= NEW_MODULES:
        pytest.fail(
            f"{item.nodeid} took {seconds:.1f} s of processor time. Make it shorter, or mark it "
            f"`long`: a test without that marker takes at most {LIMIT_S:g} s.",
            pytrace=False,
        )
    return result


def is_long(item: pytest.Item) -> bool:
    """Whether ``scripts/test.sh --fast`` leaves it out by its markers, but for ``smoke``."""
    return any(item.get_closest_marker(name) for name in ("long", "slow", "gpu"))


def function_of(nodeid: str) -> str:
    """``tests/a.py::test_b[c]`` -> ``tests/a.py::test_b``."""
    return nodeid.partition("[")[0]


def samples(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """A few items of one parametrized test that together have each value of each parameter.

    Those marked ``smoke`` are among them.
    """
    missing = {item: {(k, id(v)) for k, v in item.callspec.params.items()} for item in items}
    smoke = [item for item in items if item.get_closest_marker("smoke")]
    chosen = []
    while smoke or any(missing.values()):
        item = smoke.pop(0) if smoke else max(missing, key=lambda item: len(missing[item]))
        values = missing.pop(item)  # of the first of equals
        chosen.append(item)
        missing = {other: rest - values for other, rest in missing.items()}
    return chosen


def mark_samples(items: Sequence[pytest.Item], recorded: dict[str, float]) -> None:
    """Mark all but the samples of a parametrized test that `recorded` has, and costly samples."""
    functions = defaultdict(list)
    for item in items:
        function = function_of(item.nodeid)
        ordinary = not any(map(item.get_closest_marker, ("slow", "gpu", "combination")))
        if function in recorded and hasattr(item, "callspec") and ordinary:
            functions[function].append(item)
    for function, parametrized in functions.items():
        chosen = samples(parametrized)
        for item in set(parametrized) - set(chosen):
            item.add_marker("combination")
        number = max(1, int(FAST_S / recorded[function] * len(chosen)))
        for item in [item for item in chosen if not is_long(item)][number:]:
            item.add_marker("costly")


def pytest_collection_modifyitems(config, items):
    """Before pytest selects by markers."""
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    mark_samples(items, recorded)
    if hasattr(config, "workerinput"):
        items[:] = longest_first(items, recorded)


def longest_first(items: Sequence[pytest.Item], recorded: dict[str, float]) -> list[pytest.Item]:
    """Files by what they take, for workers of pytest-xdist that take one file after the other."""
    of_file = Counter()
    # Sorted, for every worker has to come to the same order, and sums of floats depend on theirs.
    for function in sorted({function_of(item.nodeid) for item in items}):
        of_file[function.partition("::")[0]] += recorded.get(function, 0)
    files = [(-of_file[file], file) for file in (i.nodeid.partition("::")[0] for i in items)]
    return [item for _, item in sorted(zip(files, items, strict=True), key=lambda x: x[0])]


def seconds_of(junit: Path) -> dict[str, float]:
    """Function of a test -> its processor seconds with all its parameters, from a JUnit file."""
    found = Counter()
    for case in xml.etree.ElementTree.parse(junit).iter("testcase"):
        file = case.get("classname").replace(".", "/") + ".py"
        for given in case.iter("property"):
            if given.get("name") == PROPERTY:
                found[function_of(f"{file}::{case.get('name')}")] += float(given.get("value"))
    return dict(found)


def record(files: Iterable[Path], least: float = 0.5) -> None:
    """Writes what the runs took into durations.json; functions they did not run keep their line."""
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for file in files:
        recorded.update(seconds_of(file))
    kept = {name: round(s, 1) for name, s in sorted(recorded.items()) if s >= least}
    RECORD.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    record(map(Path, sys.argv[1:]))
