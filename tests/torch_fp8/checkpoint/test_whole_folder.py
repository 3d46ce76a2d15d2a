import os
import signal

import pytest
from transformers import AutoModelForCausalLM

from tests.fp8_checkpoints import tiny_llama
from tests.internals import export_into, replaced_files, whole_folder
from torch_fp8 import convert_to_float8, load_trainable

WRITERS = {"new": whole_folder, "old": replaced_files}


def _model(recipe="blockwise"):
    model = tiny_llama(num_hidden_layers=1)
    convert_to_float8(model, recipe)
    return model


def _names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("count", [0, 2])
def test_who_is_stopped_between_two_files_leaves_no_mixture(tmp_path, monkeypatch, count):
    """Of shards of two saves, which would load without a word."""
    first, second = _model(), _model()
    second.model.norm.weight.data.fill_(2)
    export_into(first, tmp_path, "fine-grained", max_shard_size="200KB")
    names, replace, done = _names(tmp_path), os.replace, []

    def stopped(source, target):
        if len(done) == count:
            raise SystemExit
        done.append(target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", stopped)
    with pytest.raises(SystemExit):
        export_into(second, tmp_path, "fine-grained", max_shard_size="200KB")
    monkeypatch.undo()
    assert _names(tmp_path) == [name for name in names if name != "config.json"]
    with pytest.raises((OSError, ValueError), match=r"config\.json"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises((OSError, ValueError), match=r"config\.json"):
        load_trainable(AutoModelForCausalLM, tmp_path)
    export_into(second, tmp_path, "fine-grained", max_shard_size="200KB")
    assert _names(tmp_path) == names
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert float(loaded.model.norm.weight[0]) == 2.0


def test_the_description_of_another_format_goes(tmp_path):
    """TensorRT-LLM reads it before ``config.json``."""
    delayed = _model("delayed").train()
    delayed(input_ids=delayed.dummy_inputs["input_ids"])
    export_into(delayed, tmp_path, "modelopt")
    assert "hf_quant_config.json" in _names(tmp_path)
    export_into(_model(), tmp_path, "fine-grained")
    assert "hf_quant_config.json" not in _names(tmp_path)


@pytest.mark.parametrize("how", ["new", "old"])
def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path, how):
    path = tmp_path / "out"
    inside = path if how == "old" else tmp_path
    child = os.fork()
    if not child:
        with WRITERS[how](path) as folder:
            (folder / "model.safetensors").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert [name for name in _names(inside) if name.endswith(".partial")]
    assert not (path / "model.safetensors").exists()
    with WRITERS[how](path) as folder:
        (folder / "model.safetensors").write_text("whole")
        partial = [name for name in _names(inside) if name.endswith(".partial")]
        assert partial == [folder.name]
    assert _names(path) == ["model.safetensors"]
    assert _names(tmp_path) == ["out"]


def test_what_another_process_is_writing_stays(tmp_path):
    with replaced_files(tmp_path) as ours, replaced_files(tmp_path) as theirs:
        assert ours != theirs
        assert ours.is_dir()
        (ours / "a").write_text("a")
        (theirs / "b").write_text("b")
    assert _names(tmp_path) == ["a", "b"]
