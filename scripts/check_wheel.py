"""Tests a wheel in an environment of its own, without the sources of this project.

``python scripts/check_wheel.py dist --extra lightning --torch 2.13.0`` creates a virtual
environment with the Python that runs it, installs torch and the only wheel in ``dist`` with an
extra, runs the commands and steps below, and the tests of the sdist that need nothing but that
extra. It prints a line of a table: Python, torch, extra, result.

``--environment FOLDER`` uses an environment that already has torch, and installs the wheel into a
new one on top of it.
"""

import argparse
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

STEP = """
import torch, torch_fp8

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
report = torch_fp8.convert_to_float8(model)
assert len(report.converted) == 2, report
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch_fp8.convert_optimizer(optimizer, model=model)
before = model[0].weight.detach().clone()
model(torch.randn(32, 64)).square().mean().backward()
optimizer.step()
assert not torch.equal(before, model[0].weight)
assert {root!r} not in torch_fp8.__file__, torch_fp8.__file__
"""
_ENGINE = ("tests/torch_fp8/nn/test_linear.py", "tests/torch_fp8/optim/test_optimizer.py")
TESTS = {
    "none": (*_ENGINE, "tests/torch_fp8/test_config.py"),
    "lightning": ("tests/lightning_fp8/test_fabric.py",),
    "accelerate": ("tests/accelerate_fp8/test_accelerator.py",),
    "peft": (),
    "report": (),
    "commands": (),
}
"""By extra, the tests that run with it; what else they import is installed for them."""
COMMANDS = {
    "none": (["--version"], ["env"]),
    "commands": (["plan", "llama-3.2-1b", "--method", "lora"],),
}
LINES = {
    "lightning": "from lightning.pytorch import Trainer; Trainer(precision='fp8-mixed', "
    "accelerator='cpu', logger=False, enable_checkpointing=False)",
    "accelerate": "from accelerate import Accelerator; "
    "assert Accelerator(mixed_precision='fp8', cpu=True).mixed_precision == 'fp8'",
    "peft": "import peft, torch_fp8",
    "report": "import matplotlib, torch_fp8",
}
"""By extra, the first lines that its user writes."""
OURS = ("torch_fp8", "torch_fp8_tools", "lightning_fp8", "accelerate_fp8", "_fp8_autoload.py",
        "_fp8_check.py", "_fp8_command.py", "_fp8_points.py")  # fmt: skip


def main() -> int:
    """Check the wheel; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("dist", type=Path, help="folder with one wheel and one sdist")
    parser.add_argument("--extra", default="none", choices=TESTS)
    parser.add_argument("--torch", default="2.13.0", metavar="VERSION")
    parser.add_argument("--index", help="a further package index for torch")
    parser.add_argument("--environment", type=Path, help="an environment that has torch already")
    options = parser.parse_args()
    (wheel,) = options.dist.resolve().glob("*.whl")
    (sdist,) = options.dist.resolve().glob("*.tar.gz")
    with tempfile.TemporaryDirectory(prefix="wheel-") as name:
        folder = Path(name)
        python = _environment(folder / "venv", wheel, options)
        sources = _tests(sdist, folder)
        result = _check(python, options.extra, sources)
        code = "import torch; print(torch.__version__)"
        torch = _run([python, "-c", code], cwd=folder).stdout.strip().splitlines()[-1]
    print(f"| {platform.python_version()} | {torch} | {options.extra} | {result} |")
    return 0 if result.startswith("works") else 1


def _environment(folder: Path, wheel: Path, options: argparse.Namespace) -> str:
    """Make an environment with the wheel, its extra and pytest; return its Python."""
    base = options.environment and str(options.environment / "bin" / "python")
    _run([base or sys.executable, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if base:
        ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
        below = _run([base, "-c", ask], check=True).stdout.strip()
        own = _run([python, "-c", ask], check=True).stdout.strip()
        Path(own, "below.pth").write_text(f"import site; site.addsitedir({below!r})\n")
    else:
        index = ["--extra-index-url", options.index] if options.index else []
        _run([*install, *index, f"torch=={options.torch}"], check=True)
    extra = "" if options.extra == "none" else f"[{options.extra}]"
    tools = ["pytest>=9", "numpy", "expecttest"]
    _run([*install, f"torch-fp8{extra} @ {wheel.as_uri()}", *tools], check=True)
    return python


def _tests(sdist: Path, folder: Path) -> Path:
    """Unpack the tests without the packages, so that these come from the wheel."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (sources,) = folder.glob("torch_fp8-*")
    for name in OURS:
        _run(["rm", "-r", str(sources / name)], check=True)
    return sources


def _check(python: str, extra: str, sources: Path) -> str:
    """Run the steps, commands and tests; return ``works: ...`` or what failed."""
    command = str(Path(python).with_name("torch-fp8"))
    steps = [[python, "-W", "ignore", "-c", STEP.format(root=str(sources))]]
    steps += [[command, *words] for words in COMMANDS.get(extra, ())]
    if extra in LINES:
        steps.append([python, "-W", "ignore", "-c", LINES[extra]])
    for words in steps:
        done = _run(words, cwd=sources.parent)
        if done.returncode != 0:
            return f"fails: {words[-1].strip().splitlines()[-1]}: {done.stdout.strip()[-300:]}"
    if not TESTS[extra]:
        return f"works: {len(steps)} steps"
    words = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS[extra]]
    done = _run([*words, "-m", "not gpu and not slow and not long"], cwd=sources)
    last = (done.stdout.strip().splitlines() or [""])[-1].strip("= ")
    return f"{'works' if done.returncode == 0 else 'fails'}: {len(steps)} steps, {last}"


def _run(
    words: list[str], cwd: Path | None = None, check: bool = False
) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        words,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if check and done.returncode != 0:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout}")
    return done


if __name__ == "__main__":
    sys.exit(main())
