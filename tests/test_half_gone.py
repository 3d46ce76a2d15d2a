"""An installation of which only the autoload module is left whole harms nobody."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long


ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch_fp8", "torch_fp8_tools", "lightning_fp8", "accelerate_fp8")

# Editable installations would find the packages again.
WITHOUT_EDITABLE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "ditable" not in str(finder)]
sys.path[:] = [p for p in sys.path if not p.startswith("__editable__")]
"""
TRAINS_IN_BF16 = """
import torch
import accelerate, lightning.pytorch, transformers.trainer, trl.models.utils
import _fp8_autoload
assert _fp8_autoload.__file__.startswith({folder!r}), _fp8_autoload.__file__
try:
    import torch_fp8.nn.linear
except BaseException as error:
    print("gone:", type(error).__name__)
accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
model = torch.nn.Linear(16, 16)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
accelerator.backward(model(torch.ones(2, 16)).sum())
optimizer.step()
transformers.TrainingArguments({folder!r}, use_cpu=True, report_to="none")
lightning.pytorch.Trainer(accelerator="cpu", precision="bf16-mixed", logger=False,
                          enable_checkpointing=False)
print("trained")
"""


@pytest.fixture
def installed(tmp_path):
    """The autoload module where pip would put it, first on the path; the packages are not there."""
    shutil.copy(ROOT / "_fp8_autoload.py", tmp_path)
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_EDITABLE)
    return tmp_path


def _run(folder, code, **environment):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "TORCH_FP8"))}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


GARBAGE, RAISES = "def broken(:", "raise RuntimeError('half an update')"


@pytest.mark.parametrize(
    ("texts", "error"),
    [((), "ModuleNotFoundError"), ((GARBAGE, RAISES, GARBAGE), "SyntaxError")],
    ids=["missing", "garbage or raises"],
)
def test_packages_that_are_missing_or_garbage_leave_torch_and_the_hosts_alone(
    installed, texts, error
):
    for package, text in zip(PACKAGES, texts, strict=False):
        (installed / package).mkdir()
        (installed / package / "__init__.py").write_text(text)
    done = _run(installed, TRAINS_IN_BF16.format(folder=str(installed)))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["gone:", error, "trained"]


def test_an_autoload_module_that_is_gone_has_the_way_out_that_install_names(installed):
    """A clone that was installed with -e and moved: only its entry point is left."""
    (installed / "_fp8_autoload.py").write_text("raise ModuleNotFoundError('moved')")
    broken = _run(installed, "import torch")
    assert broken.returncode != 0
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in broken.stderr
    assert _run(installed, "import torch", TORCH_DEVICE_BACKEND_AUTOLOAD="0").returncode == 0
    for words in ("TORCH_DEVICE_BACKEND_AUTOLOAD=0", "pip uninstall torch-fp8"):
        assert words in (ROOT / "docs/install.md").read_text()
