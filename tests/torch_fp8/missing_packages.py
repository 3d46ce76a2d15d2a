"""Runs commands of torch-fp8 in a process that does not find some packages.

``missing_packages.py FOLDER PACKAGE,...``, with ``model``, ``run``, ``optimizer.pt`` in FOLDER.
Prints, as JSON, the exit status and the errors of each command.
"""

import contextlib
import copy
import io
import json
import re
import sys
from pathlib import Path


class Without:
    """A finder of modules and of installed distributions that passes over some."""

    def __init__(self, finder, names):
        self.finder, self.names = finder, names

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            return None
        return self.finder.find_spec(name, path, target)

    def find_distributions(self, *context):
        for distribution in getattr(self.finder, "find_distributions", lambda *_: ())(*context):
            if re.sub(r"\W", "_", distribution.metadata["Name"].lower()) not in self.names:
                yield distribution

    def invalidate_caches(self):
        pass


def hide(names):
    """Have these packages not be found, whether or not they were imported before.

    torchmetrics has imported transformers and matplotlib, which remember what they have found.
    """
    again = names | {"transformers", "matplotlib", "torchmetrics"}
    for module in [m for m in sys.modules if m.partition(".")[0] in again]:
        del sys.modules[module]
    sys.meta_path[:] = [f for f in sys.meta_path if "transformers" not in type(f).__module__]
    for place, finder in enumerate(sys.meta_path):
        if type(finder).__module__ == "_fp8_autoload":  # `env` looks for it
            finder.find_spec = Without(copy.copy(finder), names).find_spec
        else:
            sys.meta_path[place] = Without(finder, names)


def commands(folder):
    model, run, output = folder / "model", folder / "run", folder / "output"
    output.mkdir()
    plan = ["plan", model, "--level", "O2", "--gpus", "1"]
    yield "plan", plan
    yield "plan lora", [*plan, "--method", "lora"]
    export = ["export", model, output / "export", "--format", "compressed-tensors"]
    yield "export", [*export, "--recipe", "rowwise"]
    converted = output / "optimizer.pt"
    yield "convert-optimizer", ["convert-optimizer", folder / "optimizer.pt", converted]
    yield "report", ["report", run, "--output", output / "report"]
    yield "env", ["env"]


def main():
    folder, hidden = Path(sys.argv[1]), set(sys.argv[2].split(","))
    hide(hidden)
    from torch_fp8_tools import cli

    results = {}
    for name, words in commands(folder):
        errors = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
            try:
                status = cli.main(list(map(str, words)))
            except SystemExit as error:
                status = error.code
        results[name] = status, errors.getvalue()
    print(json.dumps(results))


main()
