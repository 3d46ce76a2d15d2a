import sys
from pathlib import Path

import pytest

from tests.processes import ran

# Every host module that was imported is extended, really; and nothing is left waiting.
CHECK = """
def check(*expected):
    import sys
    from _fp8_autoload import _finder
    for name, status in _finder.status.items():
        assert status == ("extended" if name in sys.modules else "waiting"), (name, status)
        assert name in sys.modules or name not in expected, name
        if name not in sys.modules:
            continue
        module = sys.modules[name]
        if name.endswith("precision.precision"):
            assert "fp8-mixed" in repr(module._PRECISION_INPUT), name
        else:
            owned = [v for v in vars(module).values() if getattr(v, "__module__", None) == name]
            held = [*vars(module).values(), *(m for o in owned for m in vars(o).values())]
            assert any(hasattr(o, "_fp8_original") for o in held), name
    print("checked", len(expected))
"""
ACCELERATE = ("accelerate.utils.imports", "accelerate.state", "accelerate.accelerator")
ARGUMENTS = "transformers.training_args"
TRAINER = (*ACCELERATE, ARGUMENTS, "transformers.trainer")
TRL = (*TRAINER, "trl.models.utils")
CONNECTOR = "trainer.connectors.accelerator_connector"
LEAF = "plugins.precision.precision"
LIGHTNING = (
    f"lightning.fabric.{LEAF}",
    "lightning.fabric.connector",
    f"lightning.pytorch.{CONNECTOR}",
)
STANDALONE = (f"lightning_fabric.{LEAF}", "lightning_fabric.connector")


def start(folder: Path, code: str, *arguments: str, interactive: bool = False) -> str:
    """Run `code` under ``ACCELERATE_MIXED_PRECISION=fp8``, as ``-c`` or line by line."""
    variables = {"ACCELERATE_MIXED_PRECISION": "fp8", "PYTHONPATH": str(folder)}
    (folder / "check.py").write_text(CHECK)
    words = arguments or (["-i"] if interactive else ["-c", code])
    typed = code if interactive else None
    run = ran(sys.executable, *words, input=typed, cwd=folder, **variables)
    assert "FP8 is not available" not in run.stderr
    assert "Error" not in run.stderr, run.stderr  # an interactive shell goes on after one
    return run.stdout


slow = pytest.mark.slow


@pytest.mark.long
@pytest.mark.parametrize(
    ("first", "expected"),
    [
        pytest.param("import torch, accelerate", ACCELERATE, marks=slow),
        pytest.param("import accelerate.utils.imports", ACCELERATE[:1]),
        pytest.param("import accelerate.state", ACCELERATE[:2], marks=slow),
        pytest.param("import accelerate.utils.launch", ACCELERATE[:2], marks=slow),
        pytest.param("import accelerate.commands.launch", ACCELERATE[:2], marks=slow),
        pytest.param("import transformers.training_args", (ARGUMENTS,), marks=slow),
        pytest.param("import transformers; transformers.TrainingArguments", (), marks=slow),
        pytest.param("import transformers.trainer", TRAINER, marks=slow),
        pytest.param("import transformers; transformers.Trainer", TRAINER, marks=slow),
        pytest.param("import torch, transformers.trainer", TRAINER, marks=slow),
        pytest.param("import datasets, transformers.trainer", TRAINER, marks=slow),
        pytest.param("import peft", ACCELERATE, marks=slow),
        pytest.param("import peft, trl; trl.SFTTrainer", TRAINER, marks=slow),
        pytest.param("from trl import SFTConfig", (ARGUMENTS,), marks=slow),
        pytest.param("import trl.models.utils", ("trl.models.utils",), marks=slow),
        pytest.param("import trl; trl.DPOTrainer", TRL, marks=slow),
        pytest.param("import trl.scripts.sft", (ARGUMENTS,), marks=slow),
        pytest.param("import trl.trainer.grpo_trainer", TRL, marks=slow),
        pytest.param(f"import lightning.pytorch.{CONNECTOR}", LIGHTNING, marks=slow),
        pytest.param(f"import lightning.fabric.{LEAF}", LIGHTNING[:2], marks=slow),
        pytest.param("import lightning.pytorch.cli", LIGHTNING, marks=slow),
        pytest.param("import lightning.fabric.cli", LIGHTNING[:1], marks=slow),
        pytest.param("import lightning_fabric.connector", STANDALONE, marks=slow),
        pytest.param(f"import pytorch_lightning.{CONNECTOR}", STANDALONE, marks=slow),
        pytest.param("import torchmetrics, pytorch_lightning", STANDALONE, marks=slow),
    ],
)
def test_whatever_is_imported_first(tmp_path, first, expected):
    code = f"{first}\nfrom check import check\ncheck(*{tuple(expected)!r})"
    assert start(tmp_path, code) == f"checked {len(expected)}\n"


@pytest.mark.long
def test_trl_configuration_alone_asks_for_fp8(tmp_path):
    # Its import has transformers.training_args half imported when torch calls the autoload.
    code = "from trl import SFTConfig\nprint(SFTConfig('out', use_cpu=True).mixed_precision)"
    assert start(tmp_path, code) == "fp8\n"


@pytest.mark.long
def test_ways_to_start_python(tmp_path):
    # One process, interactive, that forks, and pickles to a forked and to a spawned child.
    (tmp_path / "work.py").write_text(
        "def precision(arguments=None):\n"
        "    from transformers.training_args import TrainingArguments\n"
        "    made = TrainingArguments('out', use_cpu=True, bf16=True).mixed_precision\n"
        "    return [made, made if arguments is None else arguments.mixed_precision]\n"
    )
    code = """
import warnings; warnings.simplefilter("ignore")
from transformers.training_args import TrainingArguments
arguments = TrainingArguments("out", use_cpu=True, bf16=True)
import code, multiprocessing, work
def child(method):
    with multiprocessing.get_context(method).Pool(1) as pool:
        return pool.apply(work.precision, (arguments,))

print("shell", arguments.mixed_precision)
print("fork", *child("fork"))
print("spawn", *child("spawn"))
shell = code.InteractiveConsole()
for line in ("from work import precision", "print('console', *precision())"): _ = shell.push(line)

"""
    out = start(tmp_path, code, interactive=True)
    assert out.splitlines() == ["shell fp8", "fork fp8 fp8", "spawn fp8 fp8", "console fp8 fp8"]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("-m", "package.main"), ("package/main.py",)])
def test_module_of_the_user_as_main(tmp_path, arguments):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("from transformers.training_args import *\n")
    (package / "main.py").write_text(
        "from transformers.training_args import TrainingArguments\n"
        "from check import check\n"
        "check('transformers.training_args')\n"
        "print(TrainingArguments('out', use_cpu=True, bf16=True).mixed_precision)\n"
    )
    assert start(tmp_path, "", *arguments) == "checked 1\nfp8\n"
