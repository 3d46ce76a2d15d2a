"""Each Python that pyproject.toml promises imports the package, converts a model and steps."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ran

ROOT = Path(__file__).resolve().parent.parent
PROJECT = (ROOT / "pyproject.toml").read_text()
VERSIONS = re.findall(r"Programming Language :: Python :: (3\.\d+)", PROJECT)
OWN = "{}.{}".format(*sys.version_info)
STEP = """
import sys

import torch
import torch_fp8

assert f"{sys.version_info.major}.{sys.version_info.minor}" == sys.argv[1]
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
report = torch_fp8.convert_to_float8(model)
assert len(report.converted) == 2, report
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch_fp8.convert_optimizer(optimizer, model=model)
before = model[0].weight.detach().clone()
model(torch.randn(32, 64)).square().mean().backward()
optimizer.step()
assert not torch.equal(before, model[0].weight)
"""


def _find_python(version: str) -> str:
    """Return the interpreter that scripts/setup.sh finds, or "" if there is none."""
    command = ["bash", "-c", 'source scripts/setup.sh && find_python "$0"', version]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _python(version: str, own: str) -> str:
    """Return a Python with torch and what this project needs of itself; skip if there is none."""
    if version == OWN:
        return own
    folder = ROOT / f".venv-{version}"
    if (folder / "installed-alone").exists():
        return str(folder / "bin" / "python")
    found = _find_python(version)
    if not found:
        pytest.skip(f"not run: Python {version} is not installed")
    if (folder / "tried").exists():
        pytest.skip(f"not run: torch could not be installed for Python {version}, {found}")
    pytest.skip(f"not run: set Python {version} up by PYTHONS={version} ./scripts/test.sh")


@pytest.mark.long
@pytest.mark.parametrize("version", VERSIONS)
def test_import_convert_and_one_step(version, forked_python):
    command = (_python(version, forked_python), "-W", "ignore", "-c", STEP, version)
    ran(*command, cwd=ROOT)  # its sources, whatever was installed


def test_the_lowest_python_of_the_list_is_the_one_that_is_required():
    assert f'requires-python = ">={VERSIONS[0]}"' in PROJECT
