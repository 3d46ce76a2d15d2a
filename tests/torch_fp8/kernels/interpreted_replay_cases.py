"""Plays calls of every operator's launcher under Triton's interpreter; prints what differs.

Run by test_replayed_interpreted.py in a process of its own: the interpreter is chosen when Triton
decorates the kernels.
"""

import functools
import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime import interpreter

from tests.interpreter import mend
from tests.kernel_cases import played
from tests.kernel_cases.comparison import Mismatch
from torch_fp8.kernels.launch_tape import recording


def unseen(kernel, grid, how, dtypes, *args):
    """Run an interpreted kernel, which takes pointers for what their tensors' dtypes are."""
    with _disable_current_modes():
        args = [x if d is None else x.view(d) for x, d in zip(args, dtypes, strict=True)]
        kernel.run(*args, grid=grid, warmup=False, **how)


def reported(kernel, grid):
    """Launch as `QuickKernel` does."""

    def launch(*args, **how):
        dtypes = [x.dtype if isinstance(x, torch.Tensor) else None for x in args]
        run = functools.partial(unseen, kernel, grid, how, dtypes)
        run(*args)
        recorder = recording()
        if recorder is not None:
            recorder.launched(kernel, args, (run, ()))

    return launch


def results():
    for rows, cols in played.SHAPES:
        odd = (rows, cols) == played.ODD
        for call in played.calls(rows, cols, "cpu"):
            if odd and not call.name.startswith(("cast", "swiglu")):
                continue
            found = ""
            try:
                played.check_played(call)
            except Mismatch as mismatch:
                found = str(mismatch)
            yield f"{call.name}, {rows} x {cols}", found


mend()
interpreter.InterpretedFunction.__getitem__ = reported
np.seterr(all="ignore")
torch.manual_seed(0)
json.dump(dict(results()), sys.stdout)
