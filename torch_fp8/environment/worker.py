"""The process of one check: ``python -m torch_fp8.environment.worker REQUEST``.

The request is JSON: the function, its arguments, its limit in seconds, and the file for the
outcome, which is JSON, too. Standard output and error are left to the checked function.
"""

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from torch_fp8.environment.result import FAILED, NOT_RUN, OK, NotRun, last_line, one_line


def run_one(function: str, arguments: list[Any]) -> dict[str, Any]:
    """Call the function of a `Check`; returns the fields of a `Result` but its name."""
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
    }


if __name__ == "__main__":
    _function, _arguments, _limit_s, _file = json.loads(sys.argv[1])
    faulthandler.dump_traceback_later(_limit_s, exit=True)  # shows where it hangs
    Path(_file).write_text(json.dumps(run_one(_function, _arguments)))
    sys.stdout.flush()
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)  # threads of a host may never end
