"""What the README shows, run: each Python block as a script, each launcher command after them."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
PYTHON = [code for language, code in BLOCKS if language == "python"]
SHELL = [
    line.partition("#")[0].strip()
    for language, code in BLOCKS
    if language == "bash"
    for line in code.splitlines()
]


def _run(command, cwd, **environment):
    bin_dir = str(Path(sys.executable).parent)
    path = f"{bin_dir}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "ACCELERATE_USE_CPU": "true", **environment}
    result = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


@pytest.mark.parametrize("code", PYTHON, ids=lambda code: code.strip().splitlines()[-1][:40])
def test_python_blocks_run(code, tmp_path):
    (tmp_path / "block.py").write_text(code)
    output = _run([sys.executable, "block.py"], tmp_path)
    if "fp8-mixed" in code or "summary" in code:
        assert "of 2 linear layers" in output


def test_launcher_commands_run_the_script_shown(tmp_path):
    (script,) = [code for code in PYTHON if code.startswith("# train.py")]
    (tmp_path / "train.py").write_text(script)
    commands = [line for line in SHELL if "accelerate launch" in line]
    assert len(commands) == 3
    for command in dict.fromkeys(commands):
        words = shlex.split(command)
        environment = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_0-9]+=", word))
        output = _run(words[len(environment) :], tmp_path, **environment)
        assert "2 of 2 linear layers" in output
        if environment:
            assert "delayed" in output


def test_the_two_commands_exist():
    for command in ("./scripts/finetune.sh", "./scripts/test.sh"):
        assert any(line.startswith(command) for line in SHELL)
        assert os.access(ROOT / command, os.X_OK)


def test_the_map_names_every_module_of_the_engine():
    shown = (ROOT / "README.md").read_text().partition("## Map")[2]
    for path in (ROOT / "torch_fp8").glob("*.py"):
        if path.name != "__init__.py":
            assert f"  {path.name} " in shown
