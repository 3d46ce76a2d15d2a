"""The command ``torch-fp8``: its sub-commands and their options.

Exit status: 0 all is well, 1 something failed, 2 a mistake in the call, 130 interrupted.
"""

import argparse
import contextlib
import dataclasses
import datetime
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch_fp8
from torch_fp8.advisor import command as check_command
from torch_fp8.checkpoint.export_checkpoint import export_checkpoint
from torch_fp8.config import FP8Config
from torch_fp8.environment import display
from torch_fp8.environment.autoload import autoload
from torch_fp8.environment.cards import cards, usable_device
from torch_fp8.environment.host_models import model_class
from torch_fp8.environment.hosts import hosts
from torch_fp8.environment.result import FAILED, Result, exit_status, last_line
from torch_fp8.environment.runner import run_checks
from torch_fp8.environment.self_test import SECTIONS, self_test
from torch_fp8.environment.versions import versions
from torch_fp8.monitor import command as report_command
from torch_fp8.planner import command as plan_command
from torch_fp8.quantization.recipe import RECIPES, SAVE_FORMATS
from torch_fp8.quantization.suggestions import suggestion

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a sub-command and return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal may know fewer letters than a path has
            stream.reconfigure(errors="backslashreplace")
    if options.command is None:
        parser.print_help(sys.stderr)
        return 2
    with _terminated_as_interrupted():
        status: int = options.run(options)
    return status


class _Parser(argparse.ArgumentParser):
    """A parser whose errors name what a misspelled option or choice may have meant."""

    def error(self, message: str) -> NoReturn:
        words = re.findall(r"--?[\w-]+|'[^']*'", message)
        commands = [a for a in self._actions if isinstance(a, argparse._SubParsersAction)]
        parsers = [self, *(p for action in commands for p in action.choices.values())]
        known = {name for parser in parsers for name in parser._option_string_actions}
        if message.startswith("unrecognized arguments: -"):
            message += suggestion(words[0], known)
        elif "invalid choice: '" in message:
            wrong, *choices = [word.strip("'") for word in words if not word.startswith("-")]
            choices = choices or re.findall(r"[\w.-]+", message.partition("choose from")[2])
            message += suggestion(wrong, choices)
        super().error(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="torch-fp8", description="FP8 training on this machine.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {torch_fp8.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_env(commands)
    _add_export(commands)
    plan_command.add_parser(commands)
    check_command.add_parser(commands)
    report_command.add_parser(commands)
    return parser


def _add_env(commands: Any) -> None:
    env = commands.add_parser(
        "env",
        help="versions, cards, recipes, autoload and hosts of this machine; --self-test tries all",
        description=(
            "What this machine has for FP8 training. Exit status: 0 all is well, 1 something "
            "failed, 2 a mistake in the call."
        ),
    )
    env.add_argument(
        "--self-test",
        action="store_true",
        help="try the kernels, the recipes, the hosts and the exchange between processes; "
        "about two minutes on a card, three on a CPU",
    )
    env.add_argument(
        "--only",
        nargs="+",
        choices=SECTIONS,
        metavar="PART",
        help=f"only these parts of the self-test: {', '.join(SECTIONS)}",
    )
    env.add_argument(
        "--all",
        action="store_true",
        help="a line for everything, extension points of the hosts included",
    )
    env.add_argument("--json", action="store_true", help="print JSON instead of tables")
    env.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="write a report to attach to an issue; with --self-test one is written anyway",
    )
    env.set_defaults(run=_env, parser=env)


def _add_export(commands: Any) -> None:
    exported = commands.add_parser(
        "export",
        help="write a checkpoint in an FP8 format that inference engines load",
        description=(
            "Write a Hugging Face checkpoint as an FP8 one, with the bytes that training with this "
            "recipe multiplies by. Tensors are read, cast and written one after the other. Exit "
            "status: 0 all is well, 1 something failed, 2 a mistake in the call."
        ),
    )
    exported.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="its folder")
    exported.add_argument("path", type=Path, metavar="OUTPUT", help="a folder that does not exist")
    exported.add_argument("--format", required=True, choices=list(SAVE_FORMATS))
    exported.add_argument("--recipe", choices=RECIPES, help="that training ran")
    exported.add_argument(
        "--config", metavar="JSON", help="options of FP8Config, as JSON or the path of a file"
    )
    exported.add_argument("--device", default="cpu", help="where tensors are cast (default: cpu)")
    exported.add_argument("--max-shard-size", default="5GB", metavar="SIZE")
    exported.set_defaults(run=_export, parser=exported)


def _export(options: argparse.Namespace) -> int:
    try:
        config = FP8Config() if options.config is None else FP8Config.from_json(options.config)
        if options.recipe is not None:
            config = dataclasses.replace(config, recipe=options.recipe)
        report = export_checkpoint(
            model_class(options.checkpoint),
            options.checkpoint,
            options.path,
            options.format,
            config,
            device=usable_device(options.device),
            max_shard_size=options.max_shard_size,
        )
    except (ValueError, TypeError) as error:
        options.parser.error(str(error))
    except (OSError, ImportError, RuntimeError) as error:
        print(f"torch-fp8 export: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return INTERRUPTED
    print(report)
    return 0


def _env(options: argparse.Namespace) -> int:
    if options.only and not options.self_test:
        options.parser.error("--only chooses parts of --self-test")
    report = _report_path(options)
    checks = self_test(options.only) if options.self_test else []
    rich = display.use_rich(sys.stderr)
    results: list[Result] = []
    interrupted = False
    try:
        for describe in (versions, cards, autoload):
            results += _guarded(describe)
        with (
            display.Progress(len(checks), rich=rich) as progress,
            contextlib.closing(run_checks(checks, progress.begin)) as running,
        ):
            if not options.only or "hosts" in options.only:
                progress.begin("importing the hosts")
                results += _guarded(hosts)
            for result in running:
                results.append(result)
                progress.end(result)
    except KeyboardInterrupt:
        interrupted = True
    order = {(check.section, check.name): i for i, check in enumerate(checks)}
    results.sort(key=lambda result: order.get((result.section, result.name), -1))
    if interrupted:
        report = None
    elif report is not None:
        command = shlex.join(["torch-fp8", *sys.argv[1:]])
        display.write_whole(report, display.report_text(results, command))
    _print(results, options, report)
    if interrupted:
        print("interrupted: the rest did not run, and no report was written", file=sys.stderr)
        return INTERRUPTED
    return exit_status(results)


def _guarded(describe: Callable[[], list[Result]]) -> list[Result]:
    """Describe a part of the machine; where that fails, the failure is the result."""
    try:
        return describe()
    except Exception as error:
        name = getattr(describe, "__name__", "machine")
        return [Result(name, name, FAILED, last_line(error), log=traceback.format_exc())]


def _print(results: Sequence[Result], options: argparse.Namespace, report: Path | None) -> None:
    try:
        if options.json:
            print(display.as_json(results, report))
        elif not (options.all or options.self_test):
            sys.stdout.write(display.brief_text(results, shutil.get_terminal_size().columns))
        else:
            display.show(results, sys.stdout, rich=display.use_rich(sys.stdout))
        if report is not None and not options.json:
            print(f"report: {report}")
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe: `torch-fp8 env | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report_path(options: argparse.Namespace) -> Path | None:
    """Return where the report goes, None for nowhere; raise at once for a folder that cannot take
    it.
    """
    path: Path | None = options.report
    if path is not None:
        path = path.absolute()
        if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            options.parser.error(f"--report {options.report}: no file can be written there")
        return path
    if not options.self_test:
        return None
    here = Path.cwd()
    folder = here if os.access(here, os.W_OK) else Path(tempfile.gettempdir())
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return folder / f"torch-fp8-env-{now}.txt"


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """End the command on SIGTERM as on Ctrl-C, so that children and temporary folders are cleaned
    up.
    """

    def interrupt(*signal_and_frame: object) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
