"""Runs the trials of ``torch-fp8 compare``, and writes and prints what came out."""

import argparse
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from torch_fp8_tools.compare.advice import Advice, advise
from torch_fp8_tools.compare.bf16_products import SLOW, slowness
from torch_fp8_tools.compare.figure import draw
from torch_fp8_tools.compare.machines import machine
from torch_fp8_tools.compare.outcome import Outcome, outcome
from torch_fp8_tools.compare.tables import as_json, as_text, steps_csv, summary_csv
from torch_fp8_tools.compare.trial import VARIABLE, Trial
from torch_fp8_tools.compare.trial_record import TrialRecord
from torch_fp8_tools.compare.trials import INTERRUPTED, run_trial, trials_of
from torch_fp8_tools.compare.variants import variants

CONFIG, COMMAND = "fp8_config.json", "command.json"
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_LAUNCHERS = {"launch", "run", "accelerate", "torchrun", "srun", "mpirun", "env"}


def compare(options: argparse.Namespace) -> int:
    """Run all trials and report them; returns the exit status.

    Raises:
        ValueError: the call contradicts itself, or torch-fp8 is switched off in the environment.
        FileNotFoundError: the command does not exist.
    """
    command = list(options.program)
    chosen = variants(options.variants)
    if os.environ.get(VARIABLE):
        raise ValueError(f"{VARIABLE} is set: this already runs in a trial of a comparison")
    if os.environ.get(_AUTOLOAD) == "0":
        raise ValueError(f"{_AUTOLOAD}=0 switches torch-fp8 off in the trials; unset it")
    place = machine(command, os.environ)
    folder = (options.output or Path("fp8_compare") / _name(command)).absolute()
    folder = folder / place if place else folder
    _begin(folder, command)
    options.fast_cpu = options.fast_cpu and _is_slow()
    trials = trials_of(
        chosen, folder, options.steps, options.seeds, options.fast_cpu, not options.no_repeat
    )
    _say(f"{len(trials)} trials of at most {options.steps} steps; everything goes to {folder}")
    records: list[TrialRecord] = []
    try:
        for number, trial in enumerate(trials, 1):
            records.append(_run(command, trial, options, f"[{number}/{len(trials)}]"))
            if records[0].error is not None:
                break  # every other variant would fail as well
    except KeyboardInterrupt:
        done = len(records)
        _say(f"interrupted; {done} of {len(trials)} trials are complete, and the same command")
        _say("continues with the next one")
        records += [TrialRecord(t, {"error": INTERRUPTED}) for t in trials[done : done + 1]]
        if any(record.rows for record in records):
            result = outcome(records)
            _write(folder, command, result, advise(result), options)
        raise
    result = outcome(records)
    advice = advise(result)
    _write(folder, command, result, advice, options)
    ran = [v for v in result.variants[1:] if v.error is None]
    return 0 if result.variants[0].error is None and ran else 1


def _is_slow() -> bool:
    """Return whether this machine has no GPU, and no fast BF16 products on its CPU."""
    import torch

    return not torch.cuda.is_available() and slowness() >= SLOW


def _run(
    command: Sequence[str], trial: Trial, options: argparse.Namespace, number: str
) -> TrialRecord:
    kind = " again" if trial.is_repeat else f", seed {trial.seed}" if options.seeds > 1 else ""
    label = f"{number} {trial.variant}{kind}"
    shown = [0.0]

    def progress(_: Trial, step: int, loss: float | None) -> None:
        if time.monotonic() - shown[0] < 5.0 and step < trial.steps:
            return
        shown[0] = time.monotonic()
        _say(f"{label}: step {step}" + (f", loss {loss:.4f}" if loss is not None else ""))

    _say(label)
    result = run_trial(command, trial, 60.0 * options.stall, progress)
    if result["error"]:
        _say(f"{label}: failed: {result['error']}")
    return TrialRecord(trial, result)


def _begin(folder: Path, command: Sequence[str]) -> None:
    """Create the folder; if it has trials of another command, they are deleted.

    Raises:
        FileNotFoundError: the command does not exist.
        ValueError: the folder exists and is no folder of comparisons.
    """
    beside = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    if shutil.which(command[0], path=beside) is None:
        raise FileNotFoundError(f"{command[0]}: there is no such command")
    path = folder / COMMAND
    if folder.is_dir() and any(folder.iterdir()) and not path.exists():
        raise ValueError(f"--output {folder} has other files; choose a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"command": list(command), "folder": os.getcwd()})
    if path.exists() and path.read_text(encoding="utf-8") != text:
        for trial in folder.glob("*/trial.json"):
            shutil.rmtree(trial.parent)
    path.write_text(text, encoding="utf-8")


def _name(command: Sequence[str]) -> str:
    """Return the name of the user's program in a command, for a folder."""
    scripts = [Path(word).stem for word in command if word.endswith((".py", ".ipynb"))]
    words = [w for w in command[1:] if not w.startswith("-") and w not in _LAUNCHERS]
    name = (scripts or words or [Path(command[0]).name])[0]
    return re.sub(r"[^\w.-]+", "-", name)


def _write(
    folder: Path,
    command: Sequence[str],
    result: Outcome,
    advice: Advice,
    options: argparse.Namespace,
) -> None:
    """Write the report as JSON, CSV and PNG, and the advised configuration; print the tables."""
    values = as_json(result, advice, command, options.fast_cpu)
    files = {
        "report.json": (json.dumps(values, indent=2) + "\n").encode(),
        "variants.csv": summary_csv(result).encode(),
        "steps.csv": steps_csv(result).encode(),
    }
    config = None if advice.variant is None else advice.variant.config
    (folder / CONFIG).unlink(missing_ok=True)
    if config is not None:
        files[CONFIG] = (json.dumps(json.loads(config), indent=2) + "\n").encode()
    text = as_text(result, advice, options.fast_cpu)
    files["report.txt"] = (text + "\n").encode()
    try:
        files["comparison.png"] = draw(result, advice, _name(command))
    except ImportError as error:
        _say(str(error))
    for name, content in files.items():
        (folder / name).write_bytes(content)
    print(json.dumps(values, indent=2) if options.json else f"\n{text}\n")
    if not options.json:
        print(f"{folder}: {', '.join(files)}, and a folder for each trial")
        if config is not None:
            print(f"To train so: TORCH_FP8_CONFIG={folder / CONFIG}")


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
