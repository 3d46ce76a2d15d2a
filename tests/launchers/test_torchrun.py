import contextlib
import os
import re
import signal
import time

import pytest

from tests.launchers.conftest import SCRIPTS
from tests.processes import free_port

pytestmark = pytest.mark.long
SECONDS = 150
# With a shared store torchrun 2.13 waits for ever for a node that joins later, for an address
# that the first node has written in the first round only.
ALONE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def wait_for(condition, what, processes):
    deadline = time.monotonic() + SECONDS
    while not condition():
        logs = "\n".join(process.log.read_text() for process in processes)
        assert time.monotonic() < deadline, f"{what}\n{logs}"
        time.sleep(0.1)


def starts(process, ranks):
    return process.log.read_text().count(f"ranks {ranks} pid")


def lose(process):
    process.kill()
    for pid in re.findall(r"pid (\d+)", process.log.read_text()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def test_a_node_leaves_and_comes_back(start, tmp_path):
    words = ("torch.distributed.run", "--nnodes", "1:2", "--nproc_per_node", 1)
    meet = ("--rdzv_backend", "c10d", "--rdzv_endpoint", f"localhost:{free_port()}")
    conf = "join_timeout=60,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
    command = (*words, *meet, "--max_restarts", 5, "--monitor_interval", "0.5")
    command = (*command, "--rdzv_conf", conf, SCRIPTS / "elastic.py")
    nodes = [start(*command, **ALONE)]
    try:
        leave_and_come_back(nodes, lambda: start(*command, **ALONE))
        (tmp_path / "stop").touch()
        for node in (nodes[0], nodes[2]):
            assert node.wait(SECONDS) == 0, node.log.read_text()
            assert "done" in node.log.read_text()
    finally:
        for node in nodes:
            lose(node)


def leave_and_come_back(nodes, start):
    (first,) = nodes
    wait_for(lambda: starts(first, 1), "the first node starts alone", [first])
    nodes.append(second := start())
    wait_for(lambda: starts(first, 2) and starts(second, 2), "the second joins", [first, second])
    time.sleep(1)
    lose(second)
    wait_for(lambda: starts(first, 1) == 2, "the first goes on alone", [first, second])
    nodes.append(third := start())
    wait_for(lambda: starts(third, 2), "the second comes back", [first, third])
