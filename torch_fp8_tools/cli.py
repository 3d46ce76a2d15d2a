"""The command ``torch-fp8`` with its sub-commands and options.

A sub-command imports what it needs when it runs, so that ``torch-fp8 --help`` is fast.

Exit status: 0 success, 1 failure, 2 usage error, 130 interrupted. A sub-command calls
``set_defaults`` with the function to ``run``, or with its name, and with what differs from the
defaults: the exceptions that are usage errors (``mistakes``), other expected exceptions
(``failures``), and ``is_whole`` if it writes all of its output or nothing.
"""

import argparse
import contextlib
import os
import pkgutil
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

from torch_fp8._version import __version__
from torch_fp8.quantization.wording import REMOVED, suggestion
from torch_fp8_tools.parsers import add_parsers

_REMOVED = {
    **dict.fromkeys(("beside", "compare"), "use torch-fp8 compare, which draws both losses"),
    "check": "run a few steps with FP8Config(monitor=1), and torch-fp8 report",
    "largest": "plan the presets that you consider, one at a time",
    "roles": "plan each trained model, and add a byte for each parameter of a frozen one",
    "report": "write the output to a file: torch-fp8 env --self-test > FILE",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a sub-command and return the exit status."""
    if sys.stdout is None:  # the caller closed it
        with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
            return main(arguments)
    parser = _parser()
    options = parser.parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a path may have characters that a terminal lacks
            stream.reconfigure(errors="backslashreplace")
    if options.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        with _terminated_as_interrupted():
            status: int = pkgutil.resolve_name(options.run)(options)
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("interrupted" + ": nothing was written" * options.is_whole, file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader closed the pipe
        _drop_output()
        return 1
    except options.mistakes as error:
        print(f"torch-fp8 {options.command}: {error}", file=sys.stderr)
        return 2
    except (OSError, *options.failures) as error:  # a full disk, for example
        print(f"torch-fp8 {options.command}: {error}", file=sys.stderr)
        _drop_output()
        return 1
    except Exception as error:
        return _failed(options.command, error)


def _drop_output() -> None:
    """Discard buffered output, so that flushing it at interpreter exit does not fail."""
    with contextlib.suppress(OSError, ValueError):  # a stream in a test has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _failed(command: str, error: Exception) -> int:
    """Report an unexpected exception in one line, and write the traceback to a file."""
    with tempfile.NamedTemporaryFile(
        "w", prefix="torch-fp8-", suffix=".txt", delete=False, encoding="utf-8"
    ) as file:
        file.write("".join(traceback.format_exception(error)))
    text = " ".join(str(error).split())
    print(
        f"torch-fp8 {command}: {type(error).__name__}: {text}. This is a bug in torch-fp8; please "
        f"report it with the file {file.name}",
        file=sys.stderr,
    )
    return 1


class _Parser(argparse.ArgumentParser):
    """A parser whose errors suggest the right spelling of an option or choice."""

    commands: Mapping[str, argparse.ArgumentParser] = {}

    def error(self, message: str) -> NoReturn:
        words = re.findall(r"--?[\w-]+|'[^']*'", message)
        name = words[0].strip("-").replace("-", "_") if words else ""
        if message.startswith("unrecognized arguments: -") and name in (gone := REMOVED | _REMOVED):
            message = f"no longer takes {words[0]}: {gone[name]}"
        elif message.startswith("unrecognized arguments: -"):
            texts = [parser.format_usage() for parser in (self, *self.commands.values())]
            message += suggestion(words[0], set(re.findall(r"(?<!\w)--?[\w-]+", " ".join(texts))))
        elif "invalid choice: 'check'" in message:
            message = f"there is no command 'check' any more: {_REMOVED['check']}"
        elif "invalid choice: '" in message:
            wrong, *choices = [word.strip("'") for word in words if not word.startswith("-")]
            choices = choices or re.findall(r"[\w.-]+", message.partition("choose from")[2])
            message += suggestion(wrong, choices)
        super().error(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="torch-fp8", description="FP8 training on this machine.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    failures = ImportError, RuntimeError
    parser.set_defaults(mistakes=(ValueError, TypeError), failures=failures, is_whole=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    add_parsers(commands)
    parser.commands = commands.choices
    return parser


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C, so that children and temporary folders are cleaned up."""
    try:
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
