"""The command `torch-fp8` where something is missing or fails: one line, and no traceback."""

import json
import re
import tempfile
from pathlib import Path

from torch_fp8 import cli
from torch_fp8.environment.host_models import model_folder

ROOT = Path(__file__).resolve().parents[2]


def test_what_no_command_expects_is_one_line_and_a_file(monkeypatch, tmp_path, capsys):
    def fail(options):
        raise KeyError("nobody thought of this")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("torch_fp8.planner.command.run", fail)
    assert cli.main(["plan", "llama-3.1-8b"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "torch-fp8 plan: KeyError: 'nobody thought of this'. This is a fault of" in said
    (log,) = tmp_path.glob("torch-fp8-*.txt")
    assert str(log) in said
    assert "nobody thought of this" in log.read_text()
    assert "Traceback" in log.read_text()


def test_an_interrupt_of_any_command_is_130(monkeypatch, capsys):
    def interrupt(options):
        raise KeyboardInterrupt

    monkeypatch.setattr("torch_fp8.planner.command.run", interrupt)
    assert cli.main(["plan", "llama-3.1-8b"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_names_of_the_hub_are_looked_up_in_its_cache(monkeypatch, tmp_path):
    """As ``hf download`` leaves it; nothing is downloaded."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert model_folder("org/tiny") is None
    cache = tmp_path / "models--org--tiny"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("abc")
    snapshot = cache / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    fields = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}
    (snapshot / "config.json").write_text(json.dumps(fields))
    assert model_folder("org/tiny") == snapshot
    assert cli.main(["plan", "org/tiny", "--level", "O2"]) == 0


def test_no_message_installs_from_an_index_where_the_package_is_not():
    """torch-fp8 is installed from a clone, or from a file of a release."""
    for package in ("torch_fp8", "lightning_fp8", "accelerate_fp8"):
        for path in (ROOT / package).rglob("*.py"):
            assert not re.search(r"install[^\n]*torch-fp8\[", path.read_text()), path
