import json
from pathlib import Path

import pytest

from tests.processes import ran

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "quickstart.ipynb"
AFTER = """
(figure,) = map(plt.figure, plt.get_fignums())
lines = {line.get_label(): len(line.get_ydata()) for line in figure.axes[0].get_lines()}
assert lines == {"bf16-mixed": STEPS, "fp8-mixed": STEPS}, lines
assert last["bf16-mixed"] < 0.8 * losses["bf16-mixed"][0]
assert abs(last["fp8-mixed"] / last["bf16-mixed"] - 1) < 0.02, last
"""


def cells():
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4
    return notebook["cells"]


@pytest.mark.long
def test_the_cells_run_and_end_with_a_plot_of_losses_that_agree(tmp_path, forked_hosts):
    code = "\n\n".join("".join(c["source"]) for c in cells() if c["cell_type"] == "code")
    (tmp_path / "quickstart.py").write_text(f"{code}\n{AFTER}")
    variables = {"MPLBACKEND": "Agg", "PATH": ""}
    done = ran(forked_hosts, "quickstart.py", cwd=tmp_path, env=variables)
    assert "6 of 7 linear layers" in done.stdout + done.stderr


def test_the_notebook_is_committed_without_outputs():
    for cell in cells():
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
