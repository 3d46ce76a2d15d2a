"""The bytes that RLHF's models take are below BF16-mixed's by what was promised."""

import csv

import pytest

from benchmarks import rlhf_bytes
from benchmarks.measurement import RESULTS


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
