"""``torch-fp8 compare``: its variants, from the user's words, its machines and its trials.

It runs once in front of a launcher, or on each of several machines: launchers that start all ranks
themselves (``srun``, ``mpirun``) run behind the command, and those that are started on each machine
(``torchrun --nnodes 2``) run behind a command on each machine.
"""

import argparse
import json
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_fp8.config import FP8Config
from torch_fp8.quantization.options import read_json
from torch_fp8.quantization.recipe import RECIPES
from torch_fp8.quantization.wording import suggestion
from torch_fp8_tools.compare.bf16_products import SLOW, slowness
from torch_fp8_tools.compare.outcome import Advice, Outcome, advise, outcome
from torch_fp8_tools.compare.tables import as_json, as_text, draw, steps_csv, summary_csv
from torch_fp8_tools.compare.trial import VARIABLE, Trial
from torch_fp8_tools.compare.trial_record import TrialRecord
from torch_fp8_tools.compare.trials import INTERRUPTED, run_trial, trials_of

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
        ValueError: the folder exists and is not one of a comparison.
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


_COUNT = re.compile(r"--(?:nnodes|num[_-]machines)(?:=(.+))?$")
_NUMBER = re.compile(r"--(?:node|machine)[_-]rank(?:=(.+))?$")
QUEUES = {
    "sbatch": "it only queues a script. Call torch-fp8 compare in that script, in front of srun",
    "salloc": "its session has the cards. Call torch-fp8 compare in it, in front of srun",
    "ray": "the cluster does not get this environment. Submit the comparison: ray job submit -- "
    "torch-fp8 compare -- python train.py",
    "sky": "other machines run the task. Call torch-fp8 compare in the task's run: section",
}
"""Commands that start a program in processes without our environment, and what to do."""
_TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE")


def machine(command: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Return a name for this machine, if the command runs on each of several machines.

    Args:
        command: the user's command, which starts the ranks of one machine or of all.
        environment: environment variables.
    Returns:
        ``machine-`` and its number, or its host name, or None if the command starts all ranks.
    Raises:
        ValueError: the command only queues a program, or torch-fp8 compare itself runs once for
            each rank.
    """
    name = Path(command[0]).name
    if name in QUEUES:
        raise ValueError(f"{name} starts no process of this comparison: {QUEUES[name]}")
    count = _value_of(command, _COUNT)
    if count not in (None, "1", "1:1"):
        return f"machine-{_value_of(command, _NUMBER) or socket.gethostname()}"
    for variable in _TASKS:
        tasks = environment.get(variable, "")
        if tasks.isdecimal() and int(tasks) > 1:
            raise ValueError(
                f"torch-fp8 compare runs in each of {tasks} processes ({variable}={tasks}). Put it "
                "in front of the launcher: torch-fp8 compare -- srun python train.py"
            )
    return None


def _value_of(command: Sequence[str], pattern: re.Pattern[str]) -> str | None:
    """Return the value of the first option that matches, after ``=`` or as the next word."""
    for word, following in zip(command, [*command[1:], ""], strict=True):
        if option := pattern.match(word):
            return option[1] or following
    return None


BF16 = "bf16"
_LEVELS = ("O1", "O2", "O3")


@dataclass(frozen=True)
class Variant:
    """A way to run the program.

    Attributes:
        name: name, as the user wrote it.
        options: fields of FP8Config that it sets, or None for BF16.
    """

    name: str
    options: Mapping[str, Any] | None

    @property
    def folder(self) -> str:
        return re.sub(r"[^\w.-]+", "-", self.name).strip("-.") or "variant"


def variants(texts: Sequence[str]) -> list[Variant]:
    """Return the variants, BF16 first.

    Args:
        texts: "bf16", "fp8", or levels, recipes and ``field=value`` separated by commas, JSON, or
            the path of a JSON file.
    Raises:
        ValueError, TypeError: a text is no variant, an option is not valid, or two variants are
            the same.
    """
    parsed = [Variant(text, _options(text)) for text in texts]
    if not any(variant.options is None for variant in parsed):
        parsed.insert(0, Variant(BF16, None))
    folders = [variant.folder for variant in parsed]
    twice = next((v.name for i, v in enumerate(parsed) if v.folder in folders[:i]), None)
    if twice is not None:
        raise ValueError(f"--variants names {twice!r} twice; every variant runs once for each seed")
    if len(parsed) == 1:
        raise ValueError("--variants names only BF16; add a level or a recipe, such as O2")
    return sorted(parsed, key=lambda variant: variant.options is not None)


def _options(text: str) -> dict[str, Any] | None:
    if text.lower() == BF16:
        return None
    if text.lstrip().startswith("{") or text.endswith(".json"):
        options = dict(read_json(Path(text) if text.endswith(".json") else text))
        FP8Config(**options)
        return options
    options = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        name, mark, value = word.partition("=")
        if mark:
            options[name.strip()] = _value(value.strip())
        elif word.upper() in _LEVELS:
            options["opt_level"] = word.upper()
        elif word.lower() in ("auto", *RECIPES):
            options["recipe"] = word.lower()
        elif word.lower() != "fp8":
            known = (BF16, "fp8", *_LEVELS, "auto", *RECIPES)
            raise ValueError(
                f"--variants: {word!r} is no level, recipe or field=value"
                f"{suggestion(word, known)}; write for example bf16 O2 'O3, rowwise'"
            )
    FP8Config(**options)
    return options


def _value(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return tuple(value) if isinstance(value, list) else value
