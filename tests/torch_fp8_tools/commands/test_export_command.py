import json

import pytest
from safetensors.torch import load_file

from tests.fp8_checkpoints import tiny_llama
from tests.internals import cli
from torch_fp8 import convert_to_float8, export


@pytest.fixture
def checkpoint(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "in")
    return tmp_path / "in"


def _export(*arguments):
    return cli.main(["export", *map(str, arguments)])


def test_it_writes_what_export_writes(checkpoint, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = "--format", "fine-grained", "--recipe", "blockwise", "--max-shard-size", "200KB"
    assert _export(checkpoint, out, *arguments) == 0
    assert capsys.readouterr().out.startswith("14 layers in fine-grained FP8 (blockwise) at")
    model = tiny_llama()
    convert_to_float8(model, "blockwise")
    export(model, tmp_path / "live", max_shard_size="200KB")
    files = sorted(path.name for path in (tmp_path / "live").iterdir())
    assert sorted(path.name for path in out.iterdir()) == files
    for name in files:
        assert (out / name).read_bytes() == (tmp_path / "live" / name).read_bytes(), name


def test_options_of_the_configuration_count(checkpoint, tmp_path, capsys):
    config = json.dumps({"recipe": "rowwise", "skip": ["lm_head", "layers.0"]})
    arguments = "--format", "compressed-tensors", "--config", config
    assert _export(checkpoint, tmp_path / "out", *arguments) == 0
    assert capsys.readouterr().out.startswith("7 layers in compressed-tensors FP8 (rowwise)")
    assert len(load_file(tmp_path / "out" / "model.safetensors")) == 21 + 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "rowwise"], "--format: fine-grained (blockwise); compressed-tensors (tensor"),
        (["--format", "fine-grained", "--recipe", "mxfp8"], "use format='compressed-tensors'"),
        (["--format", "fine-grained"], "name the recipe"),
        (["--format", "fine-grained", "--config", '{"recipes": 1}'], "unknown FP8Config option"),
    ],
)
def test_a_mistake_is_2_and_leaves_nothing(checkpoint, tmp_path, capsys, arguments, message):
    assert _export(checkpoint, tmp_path / "out", *arguments) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_what_cannot_be_written_is_1(checkpoint, tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch_fp8.checkpoint.files.check_space", full)
    arguments = "--format", "fine-grained", "--recipe", "blockwise"
    assert _export(checkpoint, tmp_path / "out", *arguments) == 1
    error = capsys.readouterr().err
    assert "No space left on device; nothing was written" in error
    assert "Traceback" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
