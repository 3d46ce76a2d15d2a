"""Runs casts with delayed scaling as interpreted_cases.py: payloads, scales, histories and sums."""

import itertools
import json
import sys

import interpreted_cases as cases  # sets the interpreter up
import torch

from torch_fp8.kernels import quantize_delayed as kernels
from torch_fp8.kernels.arguments import DelayedCastOptions
from torch_fp8.kernels.column_sums import TileSums
from torch_fp8.ops.quantize_delayed import advance_history, quantize_2d_delayed

# (length, algorithm, margin): one chunk, part of one, several; and the inputs that are tried.
HISTORIES = {
    "one": (1, "max", 0),
    "short": (5, "max", 0),
    "most recent": (5, "most_recent", 2),
    "default": (1024, "max", 1),
    "long": (1500, "max", 0),
}
ALL_INPUTS = ("short",)
FEW = ("odd shape", "zeros", "nan", "inf")
LAYOUTS = ((True, True), (True, False), (False, True), (False, False))


class Twin:
    """A history, and the same for the reference."""

    def __init__(self, length, filled):
        generator = torch.Generator().manual_seed(length)
        amaxes = torch.rand(length, generator=generator) * 8 if filled else torch.zeros(length)
        if filled:
            amaxes[-length // 4 :] += 8  # the largest, in the last chunk
        self.ours, self.theirs = amaxes.clone(), amaxes.clone()
        self.last, self.their_last = torch.ones(()), torch.ones(())
        self.progress = torch.zeros(2)

    def differences(self):
        yield "history", cases.difference(self.ours, self.theirs)
        yield "last scale", cases.difference(self.last, self.their_last)
        yield "progress", "left behind" if self.progress.any() else ""


def cast(twin, x, dtype, algorithm, margin, row, col):
    """What differs in one cast, part by part."""
    sums = TileSums()
    how = (twin.progress, dtype, algorithm, margin, row, col)
    ours, theirs = (DelayedCastOptions(amaxes, *how) for amaxes in (twin.ours, twin.theirs))
    q, scale, q_t = kernels.quantize_2d_delayed(x, ours, twin.last, sums)
    want = quantize_2d_delayed.reference(x, theirs, twin.their_last, torch.float32)
    yield "row", cases.difference(q, want[0])
    yield "scale", cases.difference(scale, want[1])
    yield "col", cases.difference(q_t, want[2])
    yield "sums", cases.sum_difference(sums.total(x, torch.float32), x)
    yield from twin.differences()


def advance(twin, x, dtype, algorithm, margin):
    amax = x.abs().amax().float()
    scale = kernels.advance_history(twin.ours, twin.last, amax, dtype, algorithm, margin)
    want = advance_history.reference(twin.theirs, twin.their_last, amax, dtype, algorithm, margin)
    yield "advanced scale", cases.difference(scale, want)
    yield from twin.differences()


def results():
    inputs = dict(cases.matrices(torch.Generator().manual_seed(0)))
    for (name, x), (which, (length, algorithm, margin)) in itertools.product(
        inputs.items(), HISTORIES.items()
    ):
        if x.numel() == 0 or not (which in ALL_INPUTS or name in FEW):
            continue
        failures = []
        formats = list(cases.DTYPES.items())[: 2 if which in ALL_INPUTS else 1]
        for (fmt, dtype), filled in itertools.product(formats, (False, True)):
            twin = Twin(length, filled)
            for step, (row, col) in enumerate(LAYOUTS):
                # The third time the history is full of other things, or still empty for zeros.
                found = [*cast(twin, x, dtype, algorithm, margin, row, col)]
                found += advance(twin, x, dtype, algorithm, margin) if step == 2 else []
                failures += [f"{fmt} {filled=} {step=} {p}: {t}" for p, t in found if t]
        yield f"{which}, {name}", failures


if __name__ == "__main__":
    json.dump(dict(results()), sys.stdout)
