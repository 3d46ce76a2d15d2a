import os
import signal

from tests.internals import whole_folder


def _names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path):
    path = tmp_path / "out"
    child = os.fork()
    if not child:
        with whole_folder(path) as folder:
            (folder / "model.safetensors").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert [name for name in _names(tmp_path) if name.endswith(".partial")]
    assert not (path / "model.safetensors").exists()
    with whole_folder(path) as folder:
        (folder / "model.safetensors").write_text("whole")
        partial = [name for name in _names(tmp_path) if name.endswith(".partial")]
        assert partial == [folder.name]
    assert _names(path) == ["model.safetensors"]
    assert _names(tmp_path) == ["out"]
