"""Runs Python blocks of the documents, one after the other in this process, each as a script.

Standard input: a JSON list of codes. Standard output: a JSON list of [error or None, what it
printed]. Blocks of one host share a process: importing a host takes longer than most blocks.
"""

import contextlib
import json
import os
import runpy
import sys
import tempfile
import traceback
from pathlib import Path


def main() -> None:
    sys.path.pop(0)  # this folder: tests/lightning_fp8 is not lightning_fp8
    codes = json.load(sys.stdin)
    answer = os.dup(1)  # whatever is printed goes into a file
    results = []
    for code in codes:
        with _apart():
            results.append(_run(code))
    with os.fdopen(answer, "w") as file:
        json.dump(results, file)


def _run(code):
    Path("block.py").write_text(code)
    with open("output.txt", "w+") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        error = None
        try:
            runpy.run_path("block.py", run_name="__main__")
        except BaseException:
            error = traceback.format_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        output.seek(0)
        return error, output.read()


@contextlib.contextmanager
def _apart():
    """A folder and an environment of its own; then what a script leaves to its end is undone."""
    environment, before = dict(os.environ), Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        yield
        os.chdir(before)
    os.environ.clear()
    os.environ.update(environment)
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    torch._dynamo.reset()
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(True)


if __name__ == "__main__":
    main()
