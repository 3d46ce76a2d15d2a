"""Properties that every random program has, and a command that looks for programs without them.

``python -m tests.random_properties 0 100`` prints the programs of these seeds that fail, and why.
"""

import io
import sys
import traceback
import warnings
from collections import Counter
from typing import Any

import torch
from torch import Tensor

import torch_fp8
from tests.random_programs import Program, draw
from tests.random_runs import MIDDLE, Run

REFUSALS = (ValueError, TypeError, ImportError)


BAND = 0.05
"""Largest mean difference of two loss curves, relative to their mean."""


CONVERTING = ("convert", "pickle", "restore", "revert")
"""Events that convert again, and may warn again."""


class Fault(AssertionError):
    """A property that a program does not have."""


def _same(want: dict[str, Tensor], got: dict[str, Tensor]) -> list[str]:
    names = sorted(set(want) ^ set(got))
    for name in set(want) & set(got):
        a, b = want[name], got[name]
        if a.dtype != b.dtype or not torch.equal(a, b):
            both_nan = a.is_floating_point() and torch.equal(a.nan_to_num(), b.nan_to_num())
            if a.dtype != b.dtype or not both_nan:
                names.append(name)
    return sorted(names)


def _check_same(what: str, one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    (losses, weights), (other_losses, other_weights) = one, other
    names = _same(weights, other_weights)
    if losses != other_losses or names:
        raise Fault(f"{what}: losses {losses} and {other_losses}, weights {names[:6]}")


def _outcome(
    program: Program, fp8: bool = True, **changes: Any
) -> tuple[list[float], dict[str, Tensor]]:
    run = Run(program, fp8, **changes)
    return run.train(), run.weights()


def _check_near(what: str, program: Program, want: list[float], got: list[float]) -> None:
    off = sum(abs(a - b) for a, b in zip(want, got, strict=True)) / sum(map(abs, want))
    if not off < (4 if program.model == "images" else 1) * BAND:
        raise Fault(f"{what}: {off:.3f}\n  {want}\n  {got}")


def _file(state: dict[str, Any]) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def _check_plain(value: Any, place: str) -> None:
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, torch.nn.Parameter):
            raise Fault(f"saved: {place} is a {type(value).__name__}")
    elif isinstance(value, dict):
        for name, item in value.items():
            _check_plain(item, f"{place}.{name}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _check_plain(item, f"{place}[{i}]")


def _check_resumed(program: Program, want: tuple[Any, Any]) -> None:
    """A run that is saved and loaded in the middle, with FP8 and without."""
    first = Run(program)
    losses = first.train(0, MIDDLE)
    file = _file(first.state())
    second = Run(program)
    second.load(torch.load(file, weights_only=True))
    losses += second.train(MIDDLE)
    _check_same("resumed", want, (losses, second.weights()))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    _check_plain(saved, "state")
    if program.options.get("checkpoint_states") == "fp8":
        return
    stock = Run(program, fp8=False)
    names = set(saved["model"]) ^ set(stock.model.state_dict())
    if names:
        raise Fault(f"saved: keys {sorted(names)[:6]}")
    stock.load(saved)
    losses = losses[: len(losses) - len(second_half := stock.train(MIDDLE))] + second_half
    _check_near("continued without FP8", program, want[0], losses)


def _check_left(run: Run) -> None:
    """Weights after `merged_state_dict` and `revert` are those that the user reads."""
    want = {n: p.detach().clone() for n, p in run.model.state_dict().items()}
    merged = torch_fp8.merged_state_dict(run.model, run.optimizers, dtype=torch.float32)
    for name, value in want.items():
        got = merged[name].to(value.dtype) if value.is_floating_point() else merged[name]
        exact = value.dtype == torch.float32
        if exact and not torch.equal(got, value):
            raise Fault(f"merged: {name}")
        if not exact and value.is_floating_point():
            ulp = value.abs().float() * 2**-7
            if not bool(((merged[name] - value.float()).abs() <= ulp).all()):
                raise Fault(f"merged: {name} is {(merged[name] - value.float()).abs().max()} off")
    torch_fp8.revert(run.model)
    left = {n: p.detach().to(want[n].dtype) for n, p in run.model.state_dict().items()}
    if names := _same(want, left):
        raise Fault(f"reverted: {names[:6]}")
    for name, parameter in run.model.named_parameters():
        if type(parameter) is not torch.nn.Parameter:
            raise Fault(f"reverted: {name} is a {type(parameter).__name__}")


def _ours(caught: list[warnings.WarningMessage]) -> list[str]:
    known = ("lr_scheduler.step()", "use_reentrant", "None of the inputs have requires_grad")
    texts = [str(w.message) for w in caught]
    return [t for t in texts if not any(k in t for k in known)]


def check(program: Program, notes: Counter[str] | None = None) -> str:
    """Check all properties of a program; return what became of it.

    Raises:
        Fault: a property does not hold.
    """
    stock = Run(program, fp8=False).train()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run = Run(program)
    except REFUSALS as error:
        return f"refused: {type(error).__name__}: {error}"
    with warnings.catch_warnings(record=True) as later:
        warnings.simplefilter("always")
        try:
            losses = run.train()
        except RuntimeError as error:
            if "needs gradient_release=False" in str(error):
                return f"refused: {error}"
            raise
    said = _ours([*caught, *later])
    if notes is not None:
        notes.update(said)
    conversions = len(run.optimizers) + (program.loop.get("event") in CONVERTING)
    if twice := [text for text, count in Counter(said).items() if count > conversions]:
        raise Fault(f"warned twice: {twice}")
    want = losses, run.weights()
    _check_near("loss", program, stock, losses)
    _check_left(run)
    if "compile" not in program.loop:
        other = None if "recompute" in program.loop else "plain"
        _check_same("recomputed", want, _outcome(program, recompute=other))
    else:
        _check_near("compiled", program, losses, Run(program, compile=None).train())
    if program.loop.get("event"):
        _check_same("without the event", want, _outcome(program, event=None))
    _check_resumed(program, want)
    return "ran"


def main(first: int, last: int) -> int:
    """Check the programs of some seeds; print faults and warnings; return how many failed."""
    notes, outcomes, failed = Counter[str](), Counter[str](), 0
    for seed in range(first, last):
        program = draw(seed)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                outcome = check(program, notes)
        except Exception as error:
            failed += 1
            outcome = type(error).__name__
            text = str(error) if isinstance(error, Fault) else traceback.format_exc(limit=-6)
            print(f"{program}\n  {text}", flush=True)
        outcomes[outcome] += 1
    for text, count in [*notes.most_common(), *outcomes.most_common()]:
        print(count, text)
    return failed


if __name__ == "__main__":
    sys.exit(bool(main(int(sys.argv[1]), int(sys.argv[2]))))
