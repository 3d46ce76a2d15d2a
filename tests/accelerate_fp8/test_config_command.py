"""`accelerate config`, answered through its real prompts in a terminal."""

import os
import pty
import select
import signal
import sys
import time

import pytest
import yaml

from tests.internals import accelerate_register as _register

ENTER = "\r"
FOURTH = "3"  # fp8, behind no, fp16 and bf16
ANSWERS = {"CPU only": "yes" + ENTER, "mixed precision": FOURTH + ENTER}
"""What is pressed at these questions; at all others it is Enter, for the default."""


def _answer(command, environment):
    """Run a command in a terminal and answer its questions; return what it wrote."""
    child, terminal = pty.fork()
    if child == 0:
        os.execve(command[0], command, environment)
    output, answered, end = "", 0, time.monotonic() + 120
    while time.monotonic() < end:
        if select.select([terminal], [], [], 0.5)[0]:
            try:
                output += os.read(terminal, 4096).decode(errors="replace")
            except OSError:  # the command has closed its terminal
                break
            continue
        question, answered = output[answered:], len(output)
        if question:  # it has gone silent: it waits
            keys = next((keys for text, keys in ANSWERS.items() if text in question), ENTER)
            os.write(terminal, keys.encode())
    else:
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.close(terminal)
    assert status == 0, output
    return output


@pytest.mark.long
def test_fp8_chosen_at_the_prompts_runs_this_engine(run, environment, tmp_path):
    file = tmp_path / "chosen.yaml"
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "config"]
    output = _answer([*command, "--config_file", str(file)], environment)
    assert "torch_fp8" in output
    assert f"saved at {file}" in output
    written = yaml.safe_load(file.read_text())
    assert written["mixed_precision"] == "fp8"
    assert written["fp8_config"] == {"backend": "TORCH_FP8"}
    done = run("loop.py", launch=("--config_file", str(file)))
    assert done.fp8 > 0


def test_other_backends_and_other_questions_are_as_in_stock(monkeypatch):
    from accelerate.commands.config import cluster

    def ask(question, options, convert, default):
        asked.append((question, options, default))
        row = rows.pop(0)
        return row if convert is None else convert(row)

    asked: list[tuple[str, list[str], int]] = []
    rows = [0, 1, 2, 3, 1]
    monkeypatch.setattr(cluster, "_ask_options", ask)
    _register.extend(cluster)
    theirs = ["ao", "te", "msamp"]
    question = ("Which FP8 backend?", theirs, cluster._convert_fp8_backend)
    assert [cluster._ask_options(*question) for _ in range(4)] == ["TORCH_FP8", "AO", "TE", "MSAMP"]
    assert asked[0] == ("Which FP8 backend?", ["torch_fp8", *theirs], 0)
    assert cluster._ask_options("Which?", ["a", "b"], lambda row: "ab"[row], default=1) == "b"
    assert asked[-1] == ("Which?", ["a", "b"], 1)
