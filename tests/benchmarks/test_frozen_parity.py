"""What the comparison of alignment in FP8 with BF16 runs, and what it calls equal."""

import csv
import re
import statistics

import pytest

from benchmarks.evidence import frozen_parity
from benchmarks.measurement import RESULTS, ROOT, read_rows

BF16_ROWS = [(2.00, 0.50, 0.10), (2.02, 0.60, 0.12), (1.98, 0.55, 0.11)]


def rows(fp8):
    columns = ("seed", "loss", "reward", "kl")
    return [
        {
            "example": "grpo_trl",
            "precision": precision,
            **dict(zip(columns, (seed, *values), strict=True)),
        }
        for precision, runs in (("bf16", BF16_ROWS), ("fp8", fp8))
        for seed, values in enumerate(runs)
    ]


@pytest.mark.parametrize(
    ("fp8", "holds"),
    [
        (3 * [(2.009, 0.59, 0.12)], (True, True, True)),
        (3 * [(2.011, 0.59, 0.12)], (False, True, True)),
        (3 * [(2.0, 0.49, 0.13)], (True, False, False)),
    ],
    ids=["within", "loss 0.55 % above", "reward below and KL above all seeds"],
)
def test_fp8_is_compared_with_the_spread_of_bf16s_seeds(fp8, holds):
    made = frozen_parity.verdict("grpo_trl", rows(fp8))
    assert (made["loss holds"], made["reward holds"], made["kl holds"]) == holds
    assert made["bf16 reward"] == "0.5000 to 0.6000"


SCRIPT = """
import json, os, pathlib, sys
precision = os.environ["ACCELERATE_MIXED_PRECISION"]
assert "TORCH_FP8_CONFIG" not in os.environ
assert __name__ == "__main__"
assert sys.argv[1] != "--fail", "no such model"
final = dict(eval_loss=2.0, accuracy=0.5, eval_kl=0.1, reward=1.0, kl=0.2)
output = pathlib.Path(sys.argv[-1])
(output / "result.json").write_text(json.dumps(dict(final=final, steps=3)))
with open("{folder}/runs", "a") as file:
    print(pathlib.Path(sys.argv[0]).stem, precision, *sys.argv[1:-2], file=file)
"""


@pytest.fixture
def examples(tmp_path, monkeypatch):
    """A folder of scripts that write the result of a run, and note it in the file `runs`."""
    for name in frozen_parity.SCRIPTS:
        (tmp_path / f"{name}.py").write_text(SCRIPT.format(folder=tmp_path))
        assert (frozen_parity.EXAMPLES / f"{name}.py").exists()
    monkeypatch.setattr(frozen_parity, "EXAMPLES", tmp_path)
    monkeypatch.setenv("TORCH_FP8_CONFIG", "{}")
    return tmp_path


def test_the_difference_is_that_of_equal_seeds_with_its_error():
    fp8 = [(2.02, 0.5, 0.1), (2.02, 0.5, 0.1), (1.98, 0.5, 0.1)]  # +1 %, 0, 0
    made = frozen_parity.verdict("grpo_trl", rows(fp8)[::-1])
    assert made["difference"] == "+0.33 ± 0.33 %"


def test_one_seed_has_a_difference_without_a_spread():
    one = [row for row in rows([(2.02, 0.5, 0.1)] * 3) if row["seed"] == 0]
    assert re.fullmatch(r"[+-]\d\.\d\d %", frozen_parity.verdict("grpo_trl", one)["difference"])


@pytest.mark.long
def test_every_run_is_the_script_in_a_process_of_its_own_and_is_run_once(examples, monkeypatch):
    path = examples / "frozen_parity.csv"
    monkeypatch.setattr("sys.argv", ["frozen_parity", "--csv", str(path), "--seeds", "0", "1"])
    monkeypatch.setattr(frozen_parity, "environment", lambda device: {"commit": "x"})
    frozen_parity.main()
    runs = (examples / "runs").read_text().splitlines()
    options = " ".join([*frozen_parity.RUN, *frozen_parity.START])
    assert "--pretraining-steps" in options, "each machine would fit its own"
    assert runs == [
        f"{script} {precision} {options} --seed {seed}"
        for seed in (0, 1)
        for script in frozen_parity.SCRIPTS
        for precision in ("bf16", "fp8")
    ]
    with path.open() as file:
        written = {(r["example"], r["precision"], r["seed"]): r for r in csv.DictReader(file)}
    assert written["dpo_trl", "fp8", "1"]["reward"] == "0.500000"
    assert written["rlhf_ppo", "fp8", "1"]["reward"] == "1.000000"
    frozen_parity.main()
    assert (examples / "runs").read_text().splitlines() == runs


def test_a_run_that_fails_is_an_error_with_what_it_said(examples, monkeypatch):
    monkeypatch.setattr(frozen_parity, "RUN", ["--fail"])
    with pytest.raises(RuntimeError, match="no such model"):
        frozen_parity.measure("lora_sft", "fp8", 0, [])


def test_the_page_has_the_figures_of_the_csv():
    page = (ROOT / "docs/frozen.md").read_text()
    found = read_rows(RESULTS / "frozen_parity.csv")
    for script, name in (
        ("lora_sft", "LoRA SFT"),
        ("dpo_trl", "DPO"),
        ("grpo_trl", "GRPO"),
        ("rlhf_ppo", "PPO"),
    ):
        made = frozen_parity.verdict(script, found)
        cells = [name]
        for figure in ("loss", "reward", "kl"):
            cells += [made[f"bf16 {figure}"], made[f"fp8 {figure}"]]
        cells.insert(3, made["difference"])
        assert f"| {' | '.join(cells)} |" in page


@pytest.mark.parametrize(("script", "word"), [("grpo_trl", "reward"), ("rlhf_ppo", "score")])
def test_the_pictures_say_how_far_the_seeds_of_bf16_lie_apart(script, word):
    """Where answers are sampled, two equal runs differ, too."""
    text = (ROOT / "benchmarks/comparison" / f"{script}.py").read_text()
    of_bf16 = [
        row
        for row in read_rows(RESULTS / "frozen_parity.csv")
        if (row["example"], row["precision"]) == (script, "bf16")
    ]
    assert f"of {len(of_bf16)} seeds" in text
    for name, column in ((word, "reward"), ("KL", "kl"), ("loss", "loss")):
        values = [float(row[column]) for row in of_bf16]
        mean, deviation = statistics.mean(values), statistics.stdev(values)
        assert f"{name} {mean:.2f} ± {deviation:.2f}" in text
