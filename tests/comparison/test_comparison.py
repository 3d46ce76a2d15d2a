"""The table of two runs."""

import json
import sys

import comparison
import pytest

RUN = """
import json, pathlib, sys
out = pathlib.Path(sys.argv[-1])
out.mkdir(parents=True)
(out / "losses.csv").write_text("step,loss,eval_loss,seconds\\n0,,5,1\\n1,4,,2\\n1,,{loss},3\\n")
result = dict(final_train_loss=4.0, first_eval_loss=5.0, final_eval_loss={loss}, device="cpu")
result |= dict(linear_layers={linears}, bytes_per_parameter=16.0, seconds=3.0)
given = sys.argv[sys.argv.index("--bf16-products") + 1] if "--bf16-products" in sys.argv else None
result |= dict(bf16_products=given or "float32", given=given)
(out / "result.json").write_text(json.dumps(result))
"""


def command(loss: float, linears: dict[str, int]) -> list[str]:
    return [sys.executable, "-c", RUN.format(loss=loss, linears=linears)]


def test_the_table_compares_every_run_to_the_first(tmp_path, capfd):
    commands = {
        "bf16-mixed": command(4.0, {"Linear": 15}),
        "fp8-mixed": command(4.02, {"Float8Linear": 14, "Linear": 1}),
    }
    rows = comparison.compare(commands, tmp_path)
    assert [row["difference"] for row in rows] == [0, pytest.approx(0.005)]
    assert [row["fp8_linears"] for row in rows] == ["0 of 15", "14 of 15"]
    printed = capfd.readouterr().out
    assert "+0.50%" in printed
    assert "emulated" in printed
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    lines = (tmp_path / "comparison.csv").read_text().splitlines()
    assert lines[0].split(",") == list(comparison.COLUMNS.values())
    assert len(lines) == 3
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in commands]
    assert [result["given"] for result in results] == [None, "float32"]  # as the first one chose


def test_a_run_that_fails_ends_the_comparison(tmp_path):
    commands = {"bf16-mixed": [sys.executable, "-c", "raise SystemExit(3)"], "fp8-mixed": []}
    with pytest.raises(SystemExit) as stopped:
        comparison.compare(commands, tmp_path)
    assert stopped.value.code == 3
    assert not (tmp_path / "comparison.csv").exists()
