import json
import math
import re

import pytest

from tests.internals import FILE_NAME, RunLog, main, read_run

LAYERS = [f"model.layers.{i}.{name}" for i in range(3) for name in ("q_proj", "mlp.down_proj")]


def _write(folder, steps=120, every=10, config=None):
    """The statistics of a run in which a down projection loses its SQNR at step 80."""
    names = [
        f"fp8/{layer}/{kind}/{statistic}"
        for layer in LAYERS
        for kind in ("input", "grad_output")
        for statistic in ("sqnr", "underflow")
    ]
    names += [f"fp8/model.layers.{i}.mlp/swiglu/alignment" for i in range(3)]
    log = RunLog(folder, names, config or {"monitor": every, "recipe": "delayed"})
    for step in range(every, steps + 1, every):
        values = []
        for name in names:
            ill = step >= 80 and name.startswith("fp8/model.layers.1.mlp.down_proj/input")
            healthy = {"sqnr": 31.0, "underflow": 2e-3, "alignment": 0.4}[name.rpartition("/")[2]]
            values.append((4.5 if name.endswith("sqnr") else 0.4) if ill else healthy)
        losses = [[s, 5 * math.exp(-s / 60) + 1] for s in range(step - every + 1, step + 1)]
        log.write(step, values=values, losses=losses)
        if step == 80:
            layer = "model.layers.1.mlp.down_proj"
            log.write(step, event="alarm", layer="", what=f"fp8/{layer}/input/sqnr = 4.5 < 20")
            log.write(step, event="fallback", layer=layer, what=f"{layer} runs BF16 <b>")
    return folder


def _report(folder, capsys, *options):
    status = main(["report", str(folder), *map(str, options)])
    told = capsys.readouterr()
    return status, told.out, told.err


def test_figures_are_written_and_tables_say_what_happened(tmp_path, capsys):
    run = _write(tmp_path / "run")
    status, out, err = _report(run, capsys)
    assert (status, err) == (0, "")
    files = {"sqnr.png", "underflow.png", "alignment.png"}
    assert {path.name for path in (run / "fp8_report").iterdir()} == files
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (run / "fp8_report").iterdir())
    assert set(map(str, (run / "fp8_report").iterdir())) == set(out.splitlines()[-3:])
    assert out.startswith("run: 12 measured steps, 2 events\n1 alarm, 1 fallback.\n")
    assert "Out of FP8 at the end: model.layers.1.mlp.down_proj.\n" in out
    assert re.search(r"^80 +fallback +model.layers.1.mlp.down_proj runs BF16 <b>$", out, re.M)
    (worst,) = re.findall(r"^tensor .*\n(.*)", out, re.M)
    name, *numbers = worst.split()
    assert name.startswith("model.layers.1.mlp.down_proj/input/")
    assert numbers == ["0.4", "80", "0.4", "<=", "0.2", "over"]


def test_numbers_that_are_not_finite_and_long_names_are_drawn(tmp_path, capsys):
    names = [f"fp8/{'a_long_name_of_a_wrapper.' * 4}{n}/input/sqnr" for n in ("q", "down")]
    log = RunLog(tmp_path, [*names, "fp8/q/input/outliers", "fp8/q/input/amax"], {"monitor": 10})
    for step in (10, 20):
        log.write(step, values=[31.0, -math.inf, math.inf, math.inf], losses=[[step, math.inf]])
    log.write(20, values=[math.nan] * 4, losses=[[19, math.nan], [20, 2.0]])
    status, out, err = _report(tmp_path, capsys)
    assert (status, err) == (0, "")
    assert out.count(".png\n") == 2
    assert out.count(" over\n") == 3


@pytest.mark.parametrize("name", ["layer/history/input", "mlp.experts/experts/empty"])
def test_a_bound_of_zero_is_crossed_or_not(tmp_path, capsys, name):
    log = RunLog(tmp_path, [f"fp8/{name}", "fp8/other/input/sqnr"], {"monitor": 1})
    for step in range(1, 21):
        log.write(step, values=[float(step == 12), 31.0], losses=[[step, 1.0]])
    status, out, err = _report(tmp_path, capsys)
    assert (status, err) == (0, "")
    (worst,) = re.findall(r"^tensor .*\n(.*)", out, re.M)
    assert worst.split()[:3] == [name, "1", "12"]


def test_a_map_has_the_worst_tensor_of_a_layer_and_the_worst_step_of_a_column(tmp_path):
    from tests.internals import TOPICS, colours_of, heat_map

    heat = heat_map(read_run(_write(tmp_path, steps=5000)), TOPICS[0])
    assert heat.rows[3] == "1.mlp.down_proj"
    assert len(heat.columns) <= 200
    first_ill = next(i for i, step in enumerate(heat.columns) if step > 80)
    assert heat.values[3][first_ill] == 4.5
    assert heat.values[2][first_ill] == 31.0
    assert heat.bounds == [20.0]
    shares = heat_map(read_run(tmp_path), next(t for t in TOPICS if t.statistic == "underflow"))
    for drawn, ill, fine in ((heat, 19.9, 20.1), (shares, 0.21, 0.19)):
        norm, colours = colours_of(drawn)
        green = colours(norm([ill, fine]))[:, 1]
        assert green[0] < 0.3 < 0.5 < green[1]  # red begins at the bound
    assert heat.away == [(3, first_ill, len(heat.columns) - 1)]


@pytest.mark.long
def test_bad_input_is_named_and_what_is_there_is_drawn(tmp_path, capsys):
    assert _report(tmp_path / "nowhere", capsys)[::2] == (
        1,
        f"torch-fp8 report: {tmp_path / 'nowhere'} is neither a folder nor a file\n",
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    status, _, err = _report(empty, capsys)
    assert status == 1
    assert "holds no statistics" in err
    assert "monitor=100" in err
    run = _write(tmp_path / "run")
    text = (run / FILE_NAME).read_text()
    (run / FILE_NAME).write_text(text[:-30])
    status, out, err = _report(run, capsys)
    assert status == 0
    assert "cut off" in err
    assert "11 measured steps" in out or "12 measured steps" in out
    lines = text.splitlines()
    header = {**json.loads(lines[0]), "version": 7}
    (run / FILE_NAME).write_text("\n".join([json.dumps(header), *lines[1:4], "{]", *lines[4:]]))
    status, out, err = _report(run, capsys)
    assert status == 0
    assert "version 7" in err
    assert "1 of 16 lines cannot be read (lines 5)" in err
    bad = ['{"step":1e400,"event":"alarm"}', "[]", "7", '{"step":3,"losses":[[1,2,3]]}']
    bad += ['{"step":3,"values":[1]}', '{"names":7,"format":"torch-fp8 monitor","version":1}']
    (run / FILE_NAME).write_text("\n".join([*lines, *bad, ""]))
    assert "6 of 21 lines cannot be read" in _report(run, capsys)[2]
    (run / FILE_NAME).write_text("nothing\n")
    status, _, err = _report(run, capsys)
    assert status == 1
    assert "no readable statistics" in err
    _write(tmp_path / "two" / "a")
    _write(tmp_path / "two" / "b")
    status, _, err = _report(tmp_path / "two", capsys)
    assert status == 1
    assert "the statistics of 2 runs; choose one" in err
