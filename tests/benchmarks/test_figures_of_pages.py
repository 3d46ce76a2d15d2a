"""Figures in the pages are those of the CSV files that they name."""

import io
import re
import tokenize
from itertools import groupby

from benchmarks.measurement import RESULTS, ROOT, read_rows
from torch_fp8.ops import messages, smooth
from torch_fp8.quantization import metrics

PAGES = ROOT / "docs"


def test_the_largest_models():
    page = (PAGES / "planning.md").read_text()
    rows = read_rows(RESULTS / "largest_model.csv")
    methods = ("bf16-mixed", "FP8-LM", "O1", "O2", "O3")
    found = {(row["gpus"], row["method"]): float(row["billion_parameters"]) for row in rows}
    assert len(found) == len(rows) == 3 * len(methods)
    for gpus in ("8", "32", "128"):
        of_gpus = [found[gpus, method] for method in methods]
        assert f"| {gpus} | " + " | ".join(f"{n:.1f}" for n in of_gpus) + " |" in page
        assert 1.9 <= round(of_gpus[-1] / of_gpus[0], 1) <= 2.5
        fewer = round(1 - of_gpus[-1] / of_gpus[1], 2)  # "as much on 8 GPUs, and 8 to 10 % less"
        assert fewer == 0 if gpus == "8" else 0.08 <= fewer <= 0.10
    picture = (RESULTS / "largest_model.png").read_bytes()
    assert picture == (PAGES / "images/largest_model.png").read_bytes()


def test_fp8_lms_published_memory():
    page = (PAGES / "planning.md").read_text()
    rows = read_rows(RESULTS / "published_memory.csv")
    assert len(rows) == 3
    for row in rows:
        figures = ("published_bf16_gb", "predicted_bf16_gb", "fsdp_bf16_gb")
        figures = (*figures, "published_fp8_lm_gb", "fsdp_o3_gb")
        assert " | ".join(row[name] for name in figures) + " |" in page


def test_aligned_channels():
    page = (PAGES / "smooth_swiglu.md").read_text()
    rows = read_rows(RESULTS / "aligned_channels.csv")
    for seed in ("0", "1"):
        planted = [r for r in rows if (r["faults"], r["seed"]) == ("both", seed)]
        assert len(planted) == 5
        for recipe, of_recipe in groupby(sorted(planted, key=_recipe), _recipe):
            if recipe == "bf16":
                continue
            ends = {row["smooth_swiglu"]: float(row["rel_diff"]) for row in of_recipe}
            line = f"| {recipe} | {ends['False']:+.1%} | {ends['True']:+.2%} |"
            assert line.replace("%", " %") in page
            assert abs(ends["True"]) < 0.005 < 0.05 < ends["False"]
    healthy = [
        float(r["rel_diff"]) for r in rows if r["faults"] == "none" and r["recipe"] != "bf16"
    ]
    assert len(healthy) == 8
    ends = f"end {100 * min(healthy):.2f} to {100 * max(healthy):.2f} % above"
    assert ends in " ".join(page.split())


def test_differences_of_rollouts():
    page = (PAGES / "rollouts.md").read_text()
    rows = read_rows(RESULTS / "rollout_logprobs.csv")
    found = {(r["trainer"], r["recipe"]): r for r in rows}
    for recipe in {r["recipe"] for r in rows} - {""}:
        same, mixed = found["fp8", recipe], found["bf16", recipe]
        error = f"{float(same['multiplicative_error']):.4f}"
        line = f"| {recipe} | {same['difference']} | {mixed['difference']} | {error} |"
        assert line in page


def test_differences_that_grpo_logs():
    page = (PAGES / "rollouts.md").read_text()
    rows = read_rows(RESULTS / "rollout_grpo.csv")
    found = {(r["trainer"], r["rollout"], r["recipe"]): r for r in rows}
    assert f"BF16 in both logs {found['bf16', 'bf16', '']['difference']}. " in page
    for recipe in {r["recipe"] for r in rows} - {""}:
        same, mixed = found["fp8", "fp8", recipe], found["bf16", "fp8", recipe]
        line = f"| {recipe} | {same['difference']} | {mixed['difference']} "
        assert f"{line}| {same['multiplicative_error']} | {same['largest']} |" in page


def test_what_merging_keeps():
    page = (PAGES / "rollouts.md").read_text()
    rows = read_rows(RESULTS / "merge_aware.csv")
    least, kept = f"adds {float(rows[0]['delta']):.2%} to", f"{float(rows[0]['kept']):.0%} "
    for name in ("checkpoints.md", "export.md"):
        text = " ".join((PAGES / name).read_text().split())
        assert least.replace("%", " %") in text
        assert f"{kept.replace('%', ' %')}" in text
    assert [row["way"] for row in rows[:2]] == ["plain", "aware"]
    for plain, aware in zip(rows[::2], rows[1::2], strict=True):
        assert plain["rate"] == aware["rate"]
        line = f"| {float(plain['delta']):.2%} "
        for row in (plain, aware):
            line += f"| {row['trained']} | {row['merged']} | {float(row['kept']):.0%} "
        assert line.replace("%", " %") + "|" in page
        assert f"the loss before is {plain['base']} " in page


def test_noise_of_casts():
    """On pages and in docstrings: of Gaussian values, and of the worst of rows that spread."""
    rows = read_rows(RESULTS / "numerics.csv")
    found = {(r["recipe"], r["input"], r["operand"]): r for r in rows}
    cast, wide = (found["tensorwise", "gaussian", x]["sqnr_db"] for x in ("input", "grad_output"))
    one, each = (found[r, "row_spread", "input"] for r in ("tensorwise", "rowwise"))
    page = " ".join((PAGES / "how-it-works.md").read_text().split())
    assert f"keeps {float(cast):.1f} dB of signal to noise in E4M3 and {float(wide):.1f} dB" in page
    worst = [f"{float(row['worst_row_db']):.1f} dB" for row in (one, each)]
    assert "keeps {}, and that of a `rowwise` or `blockwise` cast {} (".format(*worst) in page
    results = " ".join((PAGES / "results.md").read_text().split())
    assert "cast keeps {}, that of a rowwise or blockwise one {}.".format(*worst) in results
    assert f"its worst row has {worst[0]} (" in " ".join(metrics.__doc__.split())
    assert f"({float(cast):.1f} dB, `numerics.csv`)" in (PAGES / "frozen.md").read_text()


def test_noise_of_smoothed_products_and_of_averages():
    ways = {
        (r["tokens"], r["way"]): r["sqnr_db"] for r in read_rows(RESULTS / "smooth_factors.csv")
    }
    text = " ".join(smooth.__doc__.split())
    assert f": {ways['2048', 's = 1 / max']} dB are left" in text
    assert f", {ways['2048', 'the root']} dB with the root" in text
    rows = [
        r
        for r in read_rows(RESULTS / "wire.csv")
        if (r["ranks"], r["input"]) == ("2", "rows alike")
    ]
    noise = {row["method"]: row["sqnr_db"] for row in rows}
    text = " ".join(messages.__doc__.split())
    assert (
        f"keep {noise['fp8']} dB of a Gaussian gradient, two of E4M3 {noise['fp8 sum']} (" in text
    )


TIME = re.compile(
    r"\d[\d.]* (us|ms|µs|seconds?)\b|\ba (third|quarter|fifth|tenth) (of|less) .{0,20}time"
)


def test_no_docstring_or_comment_states_a_time_that_nobody_can_measure_again():
    """A time is of one machine: it stands in a CSV, with the command that measured it."""
    for package in ("torch_fp8", "torch_fp8_tools", "lightning_fp8", "accelerate_fp8"):
        for path in (ROOT / package).rglob("*.py"):
            tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
            for token in tokens:
                if token.type == tokenize.COMMENT or token.string.startswith('"""'):
                    stated = TIME.search(" ".join(token.string.split()))
                    assert stated is None, (path.name, token.start[0], stated[0])


def _recipe(row):
    return row["recipe"]


def test_the_long_run():
    page = (PAGES / "monitoring.md").read_text()
    rows = read_rows(RESULTS / "long_run.csv")
    found = {(r["variant"], r["perturbed"]): r for r in rows}
    names = ("train_loss", "held_out_loss")
    for number, start in enumerate(("as they are", "off, noise 1", "off, noise 2")):
        pair = [found[variant, str(number)] for variant in ("bf16", "fp8")]
        assert {row["steps"] for row in pair} == {"10000"}
        assert {row["events"] for row in pair} == {"0"}
        shown = " | ".join(row[name] for name in names for row in pair)
        assert f"| {start} | {shown} |" in page
