import pathlib
import zipfile

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.internals import STATE_FORMATS, main
from tests.steps import through_a_file
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8
from torch_fp8.distributed import split_sharded


def _model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 97), nn.LayerNorm(97), nn.Linear(97, 64), nn.Conv2d(16, 64, 3)
    )


def _run(states="float32", steps=2, model=None):
    model = model or _model()
    config = FP8Config(checkpoint_states=states)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    convert_optimizer(optimizer, config, model=model)
    _steps(model, optimizer, range(steps))
    return model, optimizer


def _steps(model, optimizer, steps):
    for step in steps:
        for i, p in enumerate(model.parameters()):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(9 * step + i))
        optimizer.step()


def _num_bytes(state):
    return sum(t.nbytes for s in state["state"].values() for t in s.values())


@pytest.mark.parametrize("loaded_as", ["fp8", "float32"])
@pytest.mark.parametrize("saved_as", ["fp8", "float32"])
def test_a_run_goes_on_bit_for_bit_whatever_either_says(saved_as, loaded_as):
    model, optimizer = _run(saved_as)
    saved = through_a_file(optimizer.state_dict(), weights_only=True)
    other, resumed = _run(loaded_as, steps=0)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(saved)
    for net, each in ((model, optimizer), (other, resumed)):
        _steps(net, each, range(2, 4))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def test_large_moments_take_their_bytes_in_memory():
    _, optimizer = _run("fp8")
    state = optimizer.state_dict()
    large = state["state"][0]
    assert set(large) == {f"{n}_{part}" for n in STATE_FORMATS for part in ("codes", "scale")} | {
        "step"
    }
    assert large["exp_avg_codes"].shape == (97, 64)
    assert large["exp_avg_scale"].shape == (97, 2)
    convolution = state["state"][6]
    assert convolution["exp_avg_codes"].shape == (64, 16, 3, 3)
    assert convolution["exp_avg_scale"].shape == (64, 5)  # groups of 144 elements of a row
    assert state["state"][2]["exp_avg"].dtype == torch.float32  # of a norm
    _, stock = _run("float32")
    assert _num_bytes(state) < 0.28 * _num_bytes(stock.state_dict())


def test_the_file_becomes_stocks(tmp_path, capsys):
    """What stock AdamW opens is what checkpoint_states="float32" would have written."""
    _, optimizer = _run("fp8")
    _, same = _run("float32")
    source, target = tmp_path / "optimizer.pt", tmp_path / "stock.pt"
    torch.save({"epoch": 3, "optimizer_states": [optimizer.state_dict()]}, source)
    assert main(["convert-optimizer", str(source), str(target)]) == 0
    assert "6 moments in float32" in capsys.readouterr().out
    made = torch.load(target, weights_only=True)
    assert made["epoch"] == 3
    (made,), expected = made["optimizer_states"], same.state_dict()
    assert made["state"].keys() == expected["state"].keys()
    for i, entry in expected["state"].items():
        assert entry.keys() == made["state"][i].keys()
        assert all(torch.equal(value, made["state"][i][name]) for name, value in entry.items())
    stock = torch.optim.AdamW(_model().parameters())
    stock.load_state_dict(made)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["optimizer.pt", "stock.pt"]


def test_mistakes_of_the_command_are_one_line(tmp_path, capsys):
    _, optimizer = _run("float32")
    stock, text = tmp_path / "stock.pt", tmp_path / "text"
    torch.save(optimizer.state_dict(), stock)
    text.write_text("no file of tensors")
    objects, other = tmp_path / "objects", tmp_path / "other"
    torch.save({"state": optimizer.state_dict(), "args": pathlib.PosixPath("/")}, objects)
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("readme.txt", "no tensors")
    cases = {
        "has no 8-bit moments": [stock, tmp_path / "new"],
        "exists; name a file": [stock, text],
        "is a folder": [tmp_path, tmp_path / "new"],
        "name the one that holds the optimizer's state: optimizer.pt": [text, tmp_path / "new"],
        "(pathlib.PosixPath), and loading them could run code": [objects, tmp_path / "new"],
        "is not a file that torch.save wrote, or is cut off": [other, tmp_path / "new"],
    }
    for message, (source, target) in cases.items():
        assert main(["convert-optimizer", str(source), str(target)]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
        assert "weights_only" not in error
    assert main(["convert-optimizer", str(tmp_path / "none"), str(tmp_path / "new")]) == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["torch_fp8"].update(moment_formats={"exp_avg": "int4"}), "moment_formats"),
        (lambda s: s["state"][0].pop("exp_avg_sq_scale"), r"\['exp_avg_sq_scale'\] is not a uint8"),
        (
            lambda s: s["state"][0].update(exp_avg_codes=torch.zeros(3, 4, dtype=torch.uint8)),
            r"shape \(3, 4\), expected \(97, 64\)",
        ),
        (
            lambda s: s["state"][0].update(exp_avg_scale=torch.zeros(97, 2)),
            r"\['exp_avg_scale'\] is not a uint8",
        ),
    ],
    ids=["scheme", "missing", "shape", "dtype"],
)
def test_a_checkpoint_of_another_scheme_is_refused_whole(change, message):
    _, optimizer = _run("fp8")
    state = through_a_file(optimizer.state_dict(), weights_only=True)
    change(state)
    _, other = _run("fp8", steps=1)
    before = [t.clone() for s in other.state_dict()["state"].values() for t in s.values()]
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(state)
    after = [t for s in other.state_dict()["state"].values() for t in s.values()]
    assert all(map(torch.equal, before, after))


def test_shards_have_codes_of_the_parameters_sharding(single_process_group):
    config = FP8Config(checkpoint_states="fp8")
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))
    convert_to_float8(model, config)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    split_sharded(model, [optimizer], config)
    for p in model.parameters():
        p.grad = torch.zeros_like(p) + 1e-3
    optimizer.step()
    state = optimizer.state_dict()
    entry = state["state"][0]
    for name, shape in (("exp_avg_codes", (96, 64)), ("exp_avg_scale", (96, 2))):
        assert isinstance(entry[name], DTensor)
        assert entry[name].shape == entry[name].to_local().shape == shape
        assert entry[name].placements == model[0].weight.placements
    optimizer.load_state_dict(state)
    again = optimizer.state_dict()["state"][0]
    assert all(torch.equal(value, again[name]) for name, value in entry.items())
