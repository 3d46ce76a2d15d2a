"""The process that runs checks: ``python -m torch_fp8.environment.worker FILE_DESCRIPTOR``.

It reads a check from each line of standard input and writes its outcome, a line of JSON, to the
descriptor. Standard output and error belong to what is checked. It ends where its input does.
"""

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from importlib import import_module
from typing import Any, TextIO

import torch

from torch_fp8.environment.result import FAILED, NOT_RUN, OK, NotRun, last_line, one_line

READY = "ready"


def run_one(function: str, arguments: list[Any]) -> dict[str, Any]:
    """Call the function of a `Check`.

    Returns:
        The fields of a `Result` but its name, and ``over``: no other check can run in this process.
    """
    began, log = time.perf_counter(), ""
    try:
        module, _, name = function.partition(":")
        status, detail = OK, getattr(import_module(module), name)(*arguments)
    except NotRun as reason:
        status, detail = NOT_RUN, str(reason)
    except BaseException as error:  # a host may call sys.exit
        status, detail, log = FAILED, last_line(error), traceback.format_exc()
    return {
        "status": status,
        "detail": one_line(str(detail or "")),
        "log": log,
        "seconds": time.perf_counter() - began,
        "over": status == FAILED and _context_is_lost(),
    }


def _context_is_lost() -> bool:
    """Return whether a kernel has broken the CUDA context, in which every later call fails, too."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except Exception:
        return True
    return False


def _serve(requests: TextIO, answers: TextIO) -> None:
    print(json.dumps(READY), file=answers, flush=True)
    for line in requests:
        request = json.loads(line)
        print(json.dumps(run_one(**request)), file=answers, flush=True)


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)  # shows where a check hangs when its time is over
    _serve(sys.stdin, os.fdopen(int(sys.argv[1]), "w"))
