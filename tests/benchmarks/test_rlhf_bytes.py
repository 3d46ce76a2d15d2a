"""The bytes that RLHF's models take are below BF16-mixed's by what was promised."""

import csv
import json

import pytest

from benchmarks.evidence import rlhf_bytes
from benchmarks.measurement import RESULTS, ROOT


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    path = tmp_path_factory.mktemp("bytes") / "rlhf_bytes.csv"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["rlhf_bytes", "--csv", str(path)])
        rlhf_bytes.main()
    return rows_of(path)


def rows_of(path):
    with path.open() as file:
        rows = list(csv.DictReader(file))
    return {(r["scenario"], r["variant"], r["role"]): r for r in rows}


@pytest.mark.long
def test_they_are_below_bf16s_and_what_the_csv_says(counted):
    ppo, grpo = (counted[s, rlhf_bytes.FP8, "all"] for s in ("ppo", "grpo"))
    assert float(ppo["weights_below"]) >= 0.46
    assert float(ppo["moments_below"]) >= 0.62
    assert float(grpo["weights_and_residuals_below"]) >= 0.45
    written = rows_of(RESULTS / "rlhf_bytes.csv")
    written = {key: row for key, row in written.items() if row["layout"] != rlhf_bytes.EXAMPLE}
    assert written.keys() == counted.keys()
    for key, row in counted.items():
        assert {n: written[key][n] for n in rlhf_bytes.BYTES} == {
            n: row[n] for n in rlhf_bytes.BYTES
        }


@pytest.mark.long
def test_a_frozen_model_takes_a_byte_for_each_converted_parameter(counted):
    row = counted["ppo", rlhf_bytes.FP8, "reference"]
    others = 2 * 32000 * 4096 + 65 * 4096  # embedding, head and norms, in BF16
    converted = int(row["parameters"]) - others
    assert int(row["weights"]) - 2 * others <= 1.02 * converted


def test_what_the_example_counted_becomes_rows_beside_those(tmp_path, monkeypatch, capsys):
    kinds = ("frozen weights", "trained weights", "residuals", "moments", "gradients", "caches")
    for precision, policy, reward in (
        ("bf16", (0, 400, 0, 800, 400, 0), (200, 0, 0, 0, 0, 0)),
        ("fp8", (0, 200, 100, 210, 200, 90), (100, 0, 0, 0, 0, 0)),
    ):
        models = {"policy": policy, "reward": reward}
        result = {
            "memory": {
                role: dict(zip(kinds, sizes, strict=True)) for role, sizes in models.items()
            },
            "parameters": {"policy": 4_000_000, "reward": 4_000_000},
            "live": {"after sampling": 900, "before the step": 1900},
        }
        (tmp_path / precision).mkdir()
        (tmp_path / precision / "result.json").write_text(json.dumps(result))
    path = tmp_path / "rlhf_bytes.csv"
    given = ["rlhf_bytes", "--csv", str(path), "--example", str(tmp_path)]
    monkeypatch.setattr("sys.argv", given)
    rlhf_bytes.main()
    rows = rows_of(path)
    name = "ppo example, 2.0M"
    before, after = (rows[name, v, "all"] for v in (rlhf_bytes.BF16, rlhf_bytes.FP8))
    assert (before["weights"], after["weights"], after["residuals"]) == ("600", "300", "100")
    assert (after["weights_below"], after["moments_below"]) == ("0.5", "0.7375")
    assert (before["caches"], after["caches"]) == ("0", "90")
    assert (before["peak"], rows[name, rlhf_bytes.FP8, "reward"]["peak"]) == ("1900", "")
    assert name in capsys.readouterr().out


def test_the_page_has_the_figures_of_the_example():
    page = (ROOT / "docs/frozen.md").read_text()
    written = rows_of(RESULTS / "rlhf_bytes.csv")
    for millions in ("4.2", "7.1"):
        bf16 = f"{millions} million parameters each, BF16-mixed"
        for name, variant in ((bf16, rlhf_bytes.BF16), ("the same in FP8", rlhf_bytes.FP8)):
            row = written[f"ppo example, {millions}M", variant, "all"]
            sizes = [int(row[kind]) / 2**20 for kind in (*rlhf_bytes.BYTES, "peak")]
            cells = [name, *(f"{size:.1f}" if size else "0" for size in sizes)]
            assert f"| {' | '.join(cells)} |" in page
    small, larger, at_7b = (
        100 * float(written[scenario, rlhf_bytes.FP8, "all"]["weights_below"])
        for scenario in ("ppo example, 4.2M", "ppo example, 7.1M", "ppo")
    )
    assert larger >= 46
    assert (
        f"{small:.1f} and {larger:.1f} % less in these models, and {at_7b:.1f} % less at 7B" in page
    )
    sums = [
        sum(int(written["ppo", variant, "all"][kind]) for kind in rlhf_bytes.BYTES) / 2**30
        for variant in (rlhf_bytes.BF16, rlhf_bytes.FP8)
    ]
    assert f"take {sums[0]:.1f} GiB in BF16 and {sums[1]:.1f} in FP8" in page
