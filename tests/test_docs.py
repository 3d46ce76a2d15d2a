import ast
import functools
import importlib
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from scripts.publish import setting
from tests.processes import free_port, ran
from torch_fp8 import FP8Config

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch_fp8", "torch_fp8_tools", "lightning_fp8", "accelerate_fp8")
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^(?:<!-- not run: (.*?) -->\n)?^```(\w*)\n(.*?)^```$", re.M | re.S)
NOT_RUN: dict[str, str] = {"needs a model from the Hub": "tests/accelerate_fp8/test_adapters.py"}
"""Reason -> what tests it instead. A Python block that is not run has its reason in a comment."""
NOT_EXECUTED = {
    "apt-get": "needs a network",
    "pip": "needs a network",
    "git": "needs a network",
    "cd": "goes into the clone",
    "mv": "needs the run's folder",
    "zensical": "serves until it is ended; the site is built below",
}
"""Other commands, but for accelerate's, take minutes or a card: what they name is checked."""


class Block(NamedTuple):
    page: str
    line: int
    language: str
    code: str
    reason: str

    def __str__(self):
        return f"{self.page}:{self.line}"


def _blocks(path):
    text = path.read_text()
    for found in FENCE.finditer(text):
        reason, language, code = found.groups()
        line = text.count("\n", 0, found.start(3)) + 1
        yield Block(path.name, line, language, code, reason or "")


BLOCKS = [block for path in PAGES for block in _blocks(path)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
COMMANDS = [
    (block, line.partition(" #")[0].strip())
    for block in BLOCKS
    if block.language == "bash"
    for line in block.code.replace("\\\n", " ").splitlines()
    if line.strip()
]


def test_every_block_says_what_it_is():
    fences = sum(len(re.findall("^ *```", path.read_text(), re.M)) for path in PAGES)
    assert fences == 2 * len(BLOCKS)
    for block in BLOCKS:
        assert block.language in ("python", "bash", "json", "yaml", "text"), str(block)
        assert block.reason in ("", *NOT_RUN), str(block)


def _host(block):
    modules = {
        name.partition(".")[0] for name in re.findall(r"^(?:from|import) (\S+)", block.code, re.M)
    }
    found = [h for h in ("lightning", "accelerate") if modules & {h, f"{h}_fp8"}]
    return found[0] if found else ""


def _environment(**more):
    bin_dir = str(Path(sys.executable).parent)
    path = f"{bin_dir}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "ACCELERATE_USE_CPU": "true", **more}


@functools.cache
def _outcomes(host, python):
    """Block -> (error, output), of all blocks of a host; what torchrun sets is set for one rank."""
    blocks = [block for block in PYTHON if _host(block) == host and not block.reason]
    rank = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    rank |= {"RANK": "0", "WORLD_SIZE": "1"}
    codes = json.dumps([block.code for block in blocks])
    program = ROOT / "tests" / "documented_blocks.py"
    done = ran(python, program, input=codes, env=_environment(**({} if host else rank)))
    return dict(zip(blocks, json.loads(done.stdout), strict=True))


@pytest.mark.long
@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_blocks_run(block, forked_python):
    if block.reason:
        pytest.skip(block.reason)
    error, output = _outcomes(_host(block), forked_python)[block]
    assert error is None, f"{error}\n{output}"
    if ".fit(" in block.code or "report.summary" in block.code:
        assert "of 2 linear layers" in output


@pytest.mark.long
def test_launcher_commands_run_the_script_shown(tmp_path, forked_python):
    (script,) = {block.code for block in PYTHON if block.code.startswith("# train.py")}
    (tmp_path / "train.py").write_text(script)
    commands = {
        line
        for block, line in COMMANDS
        if "accelerate launch" in line and "train.py" in line and not _of_file(block)
        if "--num_machines" not in line  # tests/launchers runs these
        if not line.startswith("torch-fp8 compare")  # tests/torch_fp8_tools/compare runs such
        if "fsdp2.yaml" not in line  # of two machines, as test_yaml_blocks_... reads there
    }
    assert len(commands) == 2
    for command in commands:
        variables, words = _split(command)
        assert words[0] == "accelerate"
        words[0] = "accelerate.commands.accelerate_cli"
        done = ran(forked_python, "-m", *words, cwd=tmp_path, env=_environment(**variables))
        printed = done.stdout + done.stderr
        assert "2 of 2 linear layers" in printed
        if variables:
            assert "delayed" in printed


def _of_file(block):
    return "--output fp8.json" in block.code and "TORCH_FP8_CONFIG=fp8.json" in block.code


def _split(command):
    words = shlex.split(command)
    variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_0-9]+=", word))
    return variables, words[len(variables) :]


@pytest.mark.parametrize(("block", "line"), COMMANDS, ids=str)
def test_commands_exist(block, line):
    for command in line.split(" && "):
        variables, words = _split(command)
        known = {"TORCH_FP8_CONFIG", "TORCH_FP8_REPLAY", "TORCH_DEVICE_BACKEND_AUTOLOAD"}
        assert set(variables) <= known
        if "TORCH_FP8_CONFIG" in variables and not _of_file(block):
            FP8Config.from_json(variables["TORCH_FP8_CONFIG"])
        _check(words)


def _check(words):
    """Whether a command and its options are there, by what its first word stands for."""
    first, *rest = words
    if first == "python" and rest[0] == "-m":
        _check_source(ROOT / f"{rest[1].replace('.', '/')}.py", rest[2:])
    elif first == "python":
        if rest != ["train.py"]:  # the reader's
            _check_source(ROOT / rest[0], rest[1:])
    elif first == "torch-fp8":
        from tests.internals import _parser

        _parser().parse_args(rest)
    elif first == "accelerate":
        from accelerate.commands.launch import launch_command_parser

        assert rest[0] == "launch"
        launch_command_parser().parse_args(rest[1:])
    elif first == "torchrun":
        from torch.distributed.run import get_args_parser

        get_args_parser().parse_args(rest)
    elif first.startswith("./scripts/"):
        assert os.access(ROOT / first, os.X_OK)
        if first.endswith("finetune.sh"):
            _check_source(ROOT / "benchmarks/comparison" / "finetune.py", rest)
        for path in (word for word in rest if word.startswith("tests/")):
            assert (ROOT / path).exists()
    elif first == "pytest":
        _check_pytest(rest)
    elif first == "pre-commit":
        assert (ROOT / ".pre-commit-config.yaml").exists()
    else:
        assert first in NOT_EXECUTED, words
        if first == "pip":
            _check_extras(rest)


def _check_source(path, options):
    if "--" in options:  # options behind it belong to the part
        end, part = options.index("--"), options[options.index("--parts") + 1]
        _check_source(ROOT / "benchmarks" / f"bench_{part}.py", options[end + 1 :])
        options = options[:end]
    text = path.read_text() + (ROOT / "benchmarks" / "measurement.py").read_text()
    for option in options:
        if option.startswith("--"):
            assert f'"{option}"' in text, (path, option)


def _check_extras(words):
    project = (ROOT / "pyproject.toml").read_text()
    for extra in re.findall(r"\[([\w-]+)\]", " ".join(words)):
        assert re.search(rf"^{extra} = \[", project, re.M), extra


def _check_pytest(words):
    markers = (ROOT / "pyproject.toml").read_text().partition("markers = [")[2]
    if "-m" in words:
        assert f'"{words[words.index("-m") + 1]}: ' in markers
    for path in (word for word in words if word.startswith("tests")):
        assert (ROOT / path).exists()


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "json"], ids=str)
def test_json_blocks_are_configurations(block):
    FP8Config.from_json(block.code)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "yaml"], ids=str)
def test_yaml_blocks_are_configurations_of_their_host(block, tmp_path):
    import yaml

    content = yaml.safe_load(block.code)
    if "trainer" in content:
        for plugin in content["trainer"]["plugins"]:
            module, _, name = plugin["class_path"].rpartition(".")
            assert hasattr(importlib.import_module(module), name)
    else:
        from accelerate.commands.config.config_args import load_config_from_file

        path = tmp_path / "config.yaml"
        path.write_text("compute_environment: LOCAL_MACHINE\n" + block.code)
        assert load_config_from_file(str(path)).mixed_precision == "fp8"


def test_the_two_commands_and_the_clone_line_are_in_readme():
    lines = [line for block, line in COMMANDS if block.page == "README.md"]
    for command in ("./scripts/finetune.sh", "./scripts/test.sh", "git clone <repository> "):
        assert any(line.startswith(command) for line in lines), command


def test_readme_stays_short():
    assert len(README.encode()) <= 12_000
    shown = README.partition("## Map")[2].partition("```text\n")[2].partition("```")[0]
    assert 0 < len(shown.splitlines()) <= 16


def test_the_map_and_the_page_on_the_code_name_what_is_there():
    shown = README.partition("## Map")[2]
    named = re.findall(r"\w+", " ".join(re.findall(r"^  (\w+(?:, \w+)*)  ", shown, re.M)))
    page = (ROOT / "docs" / "contributing.md").read_text()
    for path in sorted((ROOT / "torch_fp8").iterdir()):
        assert path.name in named or not (path / "__init__.py").exists(), path.name
    for path in (path for name in PACKAGES[:2] for path in sorted((ROOT / name).iterdir())):
        assert f"| `{path.name}` |" in page or not (path / "__init__.py").exists(), path.name
    for name in (*PACKAGES, "examples", "benchmarks", "tests"):
        assert f"{name}/" in shown


def test_pages_import_public_names_alone():
    public = {*PACKAGES, "torch_fp8.distributed"}
    for block in PYTHON:
        for node in ast.walk(ast.parse(block.code)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert "_fp8" not in name or name in public, (str(block), name)


def test_links_of_readme_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target


def test_the_reference_has_every_public_name():
    shown = (ROOT / "docs" / "reference.md").read_text() + (
        ROOT / "docs" / "configuration.md"
    ).read_text()
    for package in (*PACKAGES, "torch_fp8.distributed"):
        for name in importlib.import_module(package).__all__:
            homes = (package, "torch_fp8")
            assert name.startswith("__") or any(
                f"::: {home}.{name}\n" in shown for home in homes
            ), name


def test_what_builds_the_site_has_an_upper_bound():
    """A newer release may warn of what an older one passed over, and a strict build then fails."""
    docs = (ROOT / "pyproject.toml").read_text().partition("\ndocs = [\n")[2].partition("\n]")[0]
    required = re.findall(r'^  "(.*?)"', docs, re.M)
    assert len(required) > 5
    assert [line for line in required if ",<" not in line] == []


def test_each_page_is_in_the_menu():
    """Zensical passes over one that is not, and over an entry without a page."""
    menu = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(menu) == sorted(path.name for path in (ROOT / "docs").rglob("*.md"))


@pytest.mark.long
def test_the_site_builds_strictly_and_is_searched_without_a_server(tmp_path):
    """Links, anchors, and the names that the reference takes from the code.

    Zensical writes beside its configuration.
    """
    pytest.importorskip("zensical", reason="zensical is not installed: pip install -e '.[docs]'")
    for name in ("docs", "scripts", *PACKAGES):
        shutil.copytree(ROOT / name, tmp_path / name)
    for path in (ROOT / "mkdocs.yml", *ROOT.glob("_fp8_*.py")):
        shutil.copy(path, tmp_path)
    command = (Path(sys.executable).with_name("zensical"), "build", "--strict", "-f", "mkdocs.yml")
    ran(*command, cwd=tmp_path, env=_environment(PYTHONPATH=str(tmp_path)))
    site = tmp_path / "site"
    reference = (site / "reference.html").read_text()
    assert ">Raises:</span>" in reference
    for section in ("Args:", "Returns:", "Raises:"):
        assert f"{section} " not in reference, f"{section} was taken for text"
    fields = (site / "configuration.html").read_text()
    for name in FP8Config.__dataclass_fields__:
        assert f'title="torch_fp8.FP8Config.{name}"' in fields, name
    assert (site / "search.js").exists()
    assert f"torch-fp8 {setting('version')}" in (site / "index.html").read_text()
