"""LoRA, DPO, GRPO and PPO: the quick forms of the four scripts, and what they share."""

import csv
import json
import re
from pathlib import Path

import pytest
import script_start
import side_by_side
from losses import read_losses
from side_by_side import KINDS

from .conftest import EXAMPLES, gemm_counts, run_example

SCRIPTS = ("lora_sft", "dpo_trl", "grpo_trl", "rlhf_ppo")
ALL = """
import importlib, os, sys
examples, precision, output, *given = sys.argv[1:]
sys.path.insert(0, examples)
os.environ["ACCELERATE_MIXED_PRECISION"] = precision
names = ("lora_sft", "dpo_trl", "grpo_trl")
scripts = [importlib.import_module(name) for name in names]
for script in scripts:
    fork = os.fork()  # a process for each, without its imports
    if not fork:
        sys.argv = [script.__name__, *given, "--output", output + "/" + script.__name__]
        script.train(script.parse_arguments())
        os._exit(0)
    assert os.waitpid(fork, 0)[1] == 0, script
"""


def options(assets_cache: Path) -> list[str]:
    """A model that was shown few answers, and few and short ones of its own."""
    short = ["--batch-size", "8", "--max-answer", "12", "--eval-rows", "4"]
    short += ["--steps", "2", "--start-steps", "2"]
    return ["--quick", *short, "--assets", str(assets_cache)]


@pytest.fixture
def ppo(once, assets_cache, forked_hosts):
    """Folder of PPO in both precisions, which the script itself compares."""

    def make(folder: Path) -> None:
        given = [*options(assets_cache), "--output", str(folder / "out")]
        printed = run_example([forked_hosts, str(EXAMPLES / "rlhf_ppo.py"), *given], folder)
        (folder / "printed").write_text(printed)

    return once("ppo", make)


@pytest.fixture
def results(once, assets_cache, forked_hosts, ppo):
    """precision -> script -> result.json, and the first row of curves.csv."""

    def make(folder: Path) -> None:
        for precision in side_by_side.PRECISIONS:
            given = [str(EXAMPLES), precision, str(folder / precision), *options(assets_cache)]
            run_example([forked_hosts, "-c", ALL, *given], folder)

    folder = once("alignment", make)
    found = {precision: {} for precision in side_by_side.PRECISIONS}
    for precision, runs in found.items():
        for name in SCRIPTS:
            run = ppo / "out" / precision if name == "rlhf_ppo" else folder / precision / name
            runs[name] = json.loads((run / "result.json").read_text())
            runs[name]["first"] = read_losses(run / "curves.csv")[0]
    return found


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_scripts_say_nothing_of_fp8_but_the_flag(name):
    source = (EXAMPLES / f"{name}.py").read_text()
    assert not re.search(r"torch_fp8|accelerate_fp8|Float8|mixed_precision=", source)


@pytest.mark.long
@pytest.mark.parametrize("name", SCRIPTS)
def test_frozen_weights_take_a_byte_and_nothing_else_is_kept(name, results):
    bf16, fp8 = (results[precision][name] for precision in side_by_side.PRECISIONS)
    loaded = 4.0 if name in ("dpo_trl", "grpo_trl") else 2.0  # TRL loads a reference in float32
    assert bf16["frozen_bytes_per_parameter"] == loaded
    assert 1.0 < fp8["frozen_bytes_per_parameter"] <= 1.02
    for result in (bf16, fp8):
        held = sum(sum(sizes.values()) - sizes["caches"] for sizes in result["memory"].values())
        peak = max(result["live"].values())
        assert held <= peak <= held + 1.5 * 2**20  # batches, tokenized data; no second copy


@pytest.mark.long
def test_ppo_holds_four_models(results):
    """Weights of all four, and moments, fall as those of four LLaMA-7B do, but for embeddings."""
    totals = {}
    for precision, runs in results.items():
        roles = runs["rlhf_ppo"]["memory"]
        assert list(roles) == ["policy", "value", "reward", "reference"]
        for role, sizes in roles.items():
            assert (sizes["gradients"] > 0) == (role in ("policy", "value"))
            assert (sizes["frozen weights"] > 0) == (role in ("reward", "reference"))
        totals[precision] = {kind: sum(sizes[kind] for sizes in roles.values()) for kind in KINDS}
    bf16, fp8 = (side_by_side.with_all_weights(totals[p]) for p in side_by_side.PRECISIONS)
    assert fp8["weights"] < 0.56 * bf16["weights"]
    assert fp8["moments"] < 0.3 * bf16["moments"]
    assert bf16["residuals"] == 0 < fp8["residuals"]


@pytest.mark.long
@pytest.mark.parametrize("name", SCRIPTS)
def test_both_precisions_begin_alike(name, results):
    bf16, fp8 = (results[precision][name] for precision in side_by_side.PRECISIONS)
    assert [r["precision"] for r in (bf16, fp8)] == ["bf16", "fp8"]
    assert fp8["first"]["eval_loss"] == pytest.approx(bf16["first"]["eval_loss"], rel=0.01)
    assert fp8["first"]["eval_loss"] != bf16["first"]["eval_loss"]
    assert bf16["first"]["eval_kl"] < 1e-3
    assert (fp8["first"]["eval_kl"] > 0) == (name != "lora_sft")  # where two models are compared
    assert fp8["final"]["eval_kl"] > fp8["first"]["eval_kl"]


@pytest.mark.long
def test_without_a_launcher_both_precisions_are_compared(ppo):
    rows = list(csv.DictReader((ppo / "out/comparison.csv").open()))
    assert [row["precision"] for row in rows] == ["bf16", "fp8"]
    assert [float(row["bytes/frozen"]) for row in rows] == [2, 1]
    roles = [row["model"] for row in csv.DictReader((ppo / "out/memory.csv").open())]
    assert roles == 2 * ["policy", "value", "reward", "reference", "all"] + ["all"]
    assert (ppo / "out/comparison.png").read_bytes().startswith(b"\x89PNG")
    assert "emulated" in (ppo / "printed").read_text()
    assert gemm_counts(ppo, "/bf16")["scaled_mm"] == 0
    assert gemm_counts(ppo, "/fp8")["scaled_mm"] > 0


def test_a_package_that_is_missing_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["x.py", "--output", str(tmp_path / "out"), "--model", "m"])
    arguments = side_by_side.parse(side_by_side.argument_parser("x", "X.", (5e-4, 1e-6)))
    assert arguments.learning_rate == 1e-6
    with pytest.raises(script_start.Refusal, match="pip install no_such_package"):
        side_by_side.compare("x.py", {}, arguments, needs=("json", "no_such_package"))
    assert not (tmp_path / "out").exists()
