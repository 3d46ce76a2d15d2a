"""The Python that scripts of the tests start from: what they may not notice."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.processes import ran

SEEN = """
import json, os, sys
hosts = ("torch_fp8", "accelerate", "lightning", "transformers.trainer", "trl")
print(json.dumps([
    sys.argv[1:], os.getcwd(), os.environ.get("MINE"), "HOME" in os.environ, sys.path[0],
    [name for name in hosts if name in sys.modules], __name__, "__file__" in globals(),
    sys.stdin.read(),
]))
sys.exit(7)
"""


@pytest.fixture
def seen(forked_python, tmp_path):
    (tmp_path / "script.py").write_text(SEEN)

    def run(python, *arguments):
        words, env = [*arguments, "one", "two words"], {"MINE": "1", "PYTHONPATH": "/nowhere"}
        done = ran(python, *words, cwd=tmp_path, env=env, input="typed", fails=True)
        return done.returncode, json.loads(done.stdout)

    return run


@pytest.mark.parametrize("how", [["script.py"], ["-m", "script"], ["-c", SEEN]], ids=str)
def test_a_script_sees_what_it_sees_in_a_python_of_its_own(seen, forked_python, how):
    found = seen(forked_python, *how)
    assert found == seen(sys.executable, *how)
    assert found[0] == 7
    assert found[1][5] == []  # neither the hosts nor this package


def test_hosts_are_imported_and_extended_before(seen, forked_hosts):
    found, own = seen(forked_hosts, "script.py"), seen(sys.executable, "script.py")
    assert found[1][5] == ["torch_fp8", "accelerate", "lightning", "transformers.trainer", "trl"]
    del found[1][5], own[1][5]
    assert found == own
    code = """
        import gc, json, sys
        from lightning_utilities.core.rank_zero import rank_zero_only
        import _fp8_autoload
        status = _fp8_autoload._finder.status
        imported = {status[name] for name in status if name in sys.modules}
        print(json.dumps([sorted(imported), rank_zero_only.rank, gc.get_freeze_count()]))
    """
    done = ran(forked_hosts, "-c", code, RANK="3")
    assert json.loads(done.stdout) == [["extended"], 3, 0]


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_the_autoload_sees_the_environment_of_the_script(forked_python, precision):
    """Whether FP8 was requested is looked up at the end of ``import torch``."""
    code = "import torch, sys; print('_fp8_check' in sys.modules)"
    done = ran(forked_python, "-c", code, ACCELERATE_MIXED_PRECISION=precision)
    assert done.stdout == f"{precision == 'fp8'}\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
def test_a_signal_reaches_it(forked_python, tmp_path, number):
    """A caller that is killed leaves nothing behind."""
    code = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(60)"
    process = subprocess.Popen([forked_python, "-c", code], cwd=tmp_path)
    deadline = time.monotonic() + 30
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(timeout=30) == -number
    pid = int((tmp_path / "pid").read_text())
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
