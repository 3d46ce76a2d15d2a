"""A check that goes wrong turns its own line red and no other; nothing is left behind."""

import contextlib
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest

from torch_fp8.environment.check import Check, run_parts
from torch_fp8.environment.runner import run_checks

pytestmark = pytest.mark.long


FAULTS = """
import ctypes, os, subprocess, sys, tempfile, time
from torch_fp8.environment.result import NotRun

def fine(word):
    print("on standard output")
    tempfile.mkstemp()
    return word

def wrong():
    print("what a host says")
    raise ValueError("the scale is wrong")

def quits():
    sys.exit("I am a host")

def crashes():
    print("before the crash", flush=True)
    ctypes.string_at(0)

def hangs(file):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(file, "w") as out:
        out.write(str(child.pid))
    time.sleep(600)

def cannot():
    raise NotRun("no card")
"""


@pytest.fixture
def faults(tmp_path, monkeypatch):
    """``faults(name, *arguments)``: a check that calls a function of FAULTS."""
    (tmp_path / "planted_faults.py").write_text(FAULTS)
    search = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(search))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))

    def check(name, *arguments, **options):
        return Check("planted", name, f"planted_faults:{name}", arguments, **options)

    return check


def test_each_check_is_isolated(faults, tmp_path):
    checks = [
        faults("fine", "yes"),
        faults("wrong"),
        faults("quits"),
        faults("crashes"),
        faults("hangs", str(tmp_path / "pid"), limit_s=2.0),
        faults("cannot"),
        Check("planted", "absent", "planted_faults:absent"),
        Check("planted", "skipped", "planted_faults:fine", not_run="not installed"),
        Check("planted", "still", "planted_faults:fine", ("still",)),
    ]
    by_name = {result.name: result for result in run_checks(checks)}
    results = [by_name[check.name] for check in checks]
    assert [result.status for result in results] == [
        *("ok", "failed", "failed", "failed", "failed", "not run", "failed", "not run", "ok")
    ]
    _, wrong, quits, crashes, hangs, cannot, absent, skipped, still = results
    assert wrong.detail == "ValueError: the scale is wrong"
    assert "Traceback" in wrong.log
    assert "what a host says" in wrong.log
    assert quits.detail == "SystemExit: I am a host"
    assert crashes.detail == "its process was ended by SIGSEGV"
    assert "before the crash" in crashes.log
    assert hangs.detail == "took more than 2 s"
    assert "in hangs" in hangs.log
    assert (cannot.detail, skipped.detail) == ("no card", "not installed")
    assert "AttributeError" in absent.detail
    assert still.detail == "still"
    assert _is_gone(int((tmp_path / "pid").read_text()))
    assert list((tmp_path / "temporary").iterdir()) == []


def test_all_parts_of_a_check_run_and_those_that_fail_are_named():
    def wrong():
        raise ValueError("no such recipe")

    parts = {"eager": lambda: "31.5 dB", "compiled": wrong, "few tokens": lambda: "28.1 dB"}
    with pytest.raises(RuntimeError, match=r"^compiled: ValueError: no such recipe$"):
        run_parts(parts)
    del parts["compiled"]
    assert run_parts(parts) == "eager: 31.5 dB; few tokens: 28.1 dB"


def test_an_interrupt_leaves_nothing_behind(faults, tmp_path):
    """As Ctrl-C: what ran is there, the process that hangs and its child are not."""
    file = tmp_path / "pid"

    def interrupt():
        while not (file.exists() and file.read_text()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    results = []
    checks = [faults("fine", "yes"), faults("hangs", str(file))]
    # Whoever runs the tests may ignore it, as nohup does.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            _collect(checks, results)
    finally:
        signal.signal(signal.SIGINT, before)
    assert [result.detail for result in results] == ["yes"]
    assert _is_gone(int(file.read_text()))
    assert list((tmp_path / "temporary").iterdir()) == []


def _collect(checks, results):
    with contextlib.closing(run_checks(checks)) as running:
        for result in running:
            results.append(result)


def _is_gone(pid):
    for _ in range(100):
        status = Path(f"/proc/{pid}/status")
        if not status.exists() or "State:\tZ" in status.read_text():
            return True
        time.sleep(0.05)
    return False
