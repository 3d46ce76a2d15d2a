"""Figures of docs/results.md and of README are those of the CSV files that they name."""

import re
import statistics
from collections import Counter

import pytest

from benchmarks.evidence import small_models_loss as small
from benchmarks.measurement import RESULTS, ROOT, read_rows

PAGE = (ROOT / "docs" / "results.md").read_text()
README = (ROOT / "README.md").read_text()
MULTIPLIED = {"Llama-3.2-3B": 3_212_749_824, "Llama-3.1-8B": 8_030_261_248 - 128_256 * 4096}
"""The weights that matrix products read; the smaller model's embedding is its output layer."""


def _table(title):
    """First cell of a row -> the other cells, of the only table below a title."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^\|(.+)\|$", section, re.M)[2:]
    rows = [[cell.strip(" `") for cell in line.split("|")] for line in lines]
    assert rows, title
    return {row[0]: row[1:] for row in rows}


def _percent(values):
    mean, values = statistics.mean(values), list(values)
    return [f"{100 * value:+.2f} %" for value in (mean, min(values), max(values))]


def _differences(name, column, **wanted):
    found = {}
    for row in read_rows(RESULTS / name):
        if all(row[key] == value for key, value in wanted.items()):
            found.setdefault(row[column], []).append(float(row["rel_diff"]))
    return found


def test_times_on_a_card():
    table, block = _table("On an H200"), read_rows(RESULTS / "block.csv")
    ms = {(r["variant"], r["mode"]): float(r["median_ms"]) for r in block}
    shown = table["a Llama-3.1-8B block, forward and backward, 8,192 tokens"]
    columns = [(v, m) for v in ("bf16", "default") for m in ("eager", "compiled")]
    columns.append(("torchao tensorwise", "compiled"))
    assert shown == [f"{ms[column]:.2f}" for column in columns]
    step = read_rows(RESULTS / "step.csv")
    ms = {(r["variant"], r["mode"]): r["median_ms"] for r in step}
    found = [ms.get((v.replace("default", "fp8-mixed"), m), "") for v, m in columns[2:]]
    found = [ms[("bf16-mixed", m)] for m in ("eager", "compiled")] + found
    shown = table["a step of Llama-3.2-1B in Lightning's Trainer, 16,384 tokens"]
    assert shown == [f"{float(x):.1f}" if x else "none" for x in found]
    adamw = {r["variant"]: float(r["median_ms"]) for r in read_rows(RESULTS / "optimizer.csv")}
    ours, torchs = adamw["fp8, 8 residual bits"], adamw["torch AdamW, fp32"]
    shown = table["AdamW's step on 1.03 billion parameters"]
    assert shown[0::2][:2] == [f"{torchs:.2f}", f"{ours:.2f}"]


def test_readme_compares_with_compiled_bf16_and_the_fastest_peer():
    """Best against best: the fastest mode of each, and torchao, in every row."""
    block = {(r["variant"], r["mode"]): r for r in read_rows(RESULTS / "block.csv")}
    step = {(r["variant"], r["mode"]): r for r in read_rows(RESULTS / "step.csv")}
    base, ours, peer = (
        step[of]
        for of in (
            ("bf16-mixed", "compiled"),
            ("fp8-mixed", "eager"),
            ("torchao tensorwise", "compiled"),
        )
    )
    blocks = [
        block[variant, "compiled"]["median_ms"]
        for variant in ("bf16", "default", "torchao tensorwise")
    ]
    shown = [f"{float(ms):.2f}" for ms in blocks]
    steps = [f"{float(row['median_ms']):.1f}" for row in (base, ours, peer)]
    peaks = [f"{float(row['peak_mib']) / 1024:.1f}" for row in (base, ours, peer)]
    assert f"8,192 tokens, ms | {shown[0]} | {shown[1]}, compiled | {shown[2]} |" in README
    assert f"16,384 tokens, ms | {steps[0]} | {steps[1]}, eager | {steps[2]} |" in README
    assert f"| peak memory of that step, GiB | {' | '.join(peaks)} |" in README
    eager = step["bf16-mixed", "eager"]
    cells = [f"{float(eager['peak_mib']) / 1024:.1f}", *peaks[:2], "none", peaks[2]]
    assert f"| peak memory of that step, GiB | {' | '.join(cells)} |" in PAGE
    text = " ".join(README.split())
    both = f"{float(eager['median_ms']):.1f} ms and {float(eager['peak_mib']) / 1024:.1f} GiB"
    assert f"eager BF16 took {both}" in text
    adamw = [f"{float(row['optimizer_ms']):.1f}" for row in (ours, eager)]
    assert f"took {adamw[0]} ms, {adamw[1]} in BF16" in text
    faster = float(block["default", "compiled"]["speedup_over_compiled"])
    assert f"block trains {faster:.2f} times as fast as in compiled BF16" in text
    assert f"FP8 was {float(ours['speedup_over_compiled']):.2f} times as fast as comp" in text
    assert f"peaks at {float(peaks[1]):.0f} GiB instead of {float(peaks[0]):.0f}" in text
    modes = (("default", "eager"), ("bf16", "eager"), ("default", "compiled"))
    hosts = [block[mode]["host_ms"] for mode in modes]
    launch = (
        "takes the host {} ms to launch, {} in BF16: with fewer than about 6,700 tokens the card "
        "waits for it, also under `torch.compile` ({} ms)"
    )
    assert launch.format(*(f"{float(ms):.1f}" for ms in hosts)) in text
    kept = [float(block[v, "compiled"]["saved_bytes_per_token"]) for v in ("default", "bf16")]
    assert f"({kept[0] / kept[1]:.2f}x of compiled BF16's)" in text


def test_readme_shows_the_loss_that_small_models_pay():
    rows = read_rows(RESULTS / "small_models_loss.csv")
    models = ("llama", "gemma3", "mamba", "qwen3_moe")

    def mean(model, run):
        found = [100 * float(r["rel_diff"]) for r in rows if (r["model"], r["run"]) == (model, run)]
        assert len(found) == 10
        return statistics.mean(found), statistics.stdev(found) / 10**0.5

    found = [f"{mean(model, 'O2')[0]:+.1f}" for model in models]
    assert f"qwen3_moe | 0.1 million | {', '.join(found)} % |" in README
    spread = [mean(model, small.PERTURBED)[1] for model in models]
    assert f"{min(spread):.2f} to {max(spread):.2f} %" in README


def test_what_a_card_has_run():
    results = Counter(row["result"] for row in read_rows(RESULTS / "gpu_tests.csv"))
    ran = results.total() - results["not run"]
    counts = f"{results['passed']} passed, {results['skipped']} were skipped, {results['failed']}"
    text = " ".join(PAGE.split())
    assert f"Of {results.total()} GPU tests the time was enough for {ran}: {counts} failed" in text
    (memory,) = read_rows(RESULTS / "memory.csv")
    assert f"allocates {float(memory['measured_mib']) / 1024:.1f} GiB at its peak" in text


def test_loss_by_recipe():
    found = _differences("recipes_loss.csv", "recipe")
    for recipe, shown in _table("Loss by recipe").items():
        assert shown == _percent(found[recipe])


def test_loss_by_level():
    found = _differences("optimizer_loss.csv", "level", run="fine-tuning")
    for level, (*shown, _) in _table("Loss by level").items():
        assert shown == _percent(found[level])
    for level in ("O2", "O3"):
        mean, low, high = (text.removesuffix(" %") for text in _percent(found[level]))
        assert f"{mean} % ({low} to {high})" in README


ACTIVATIONS = {
    "default, and `delayed": "tensorwise (default)",
    'wgrad="bf16"': "wgrad bf16",
    'save_activations="bf16"': "save_activations bf16",
    "default, checkpointed: all seven products run again": "checkpointed",
}


def test_activations():
    rows = read_rows(RESULTS / "activation_bytes.csv")
    by_name = {(row["layout"], row["variant"]): float(row["bytes_per_token"]) for row in rows}
    for name, cells in _table("Activations").items():
        for layout, shown in zip(("Llama-2-7B", "Llama-3.1-8B"), cells, strict=True):
            kept = by_name[layout, ACTIVATIONS.get(name, name)]
            assert shown == f"{kept / by_name[layout, 'BF16 eager']:.3f}", (layout, name)
    assert f"| {_table('Activations')['default, and `delayed'][1]}x |" in README


HOST = {
    "cache_weights": "training, cache_weights",
    "checkpointed": "training, checkpointed",
    "level O3, with its gradient hooks": "training, O3",
}


def test_time_on_the_host():
    rows = {(row["what"], row["recipe"]): row for row in read_rows(RESULTS / "host_time.csv")}
    for name, (bf16, *ratios) in _table("Time on the host").items():
        what = HOST.get(name, name)
        assert bf16 == f"{float(rows[what, 'BF16']['host_us']) / 1000:.2f} ms"
        recipes = ("tensorwise", "delayed", "rowwise", "blockwise")
        for recipe, shown in zip(recipes, ratios, strict=True):
            row = rows.get((what, recipe))
            assert shown == (row["ratio"] if row else ""), (what, recipe)
    training = [float(rows["training", recipe]["ratio"]) for recipe in recipes]
    at_o3 = [float(rows["training, O3", recipe]["ratio"]) for recipe in recipes]
    trouble = re.sub(r"\s+", " ", (ROOT / "docs" / "troubleshooting.md").read_text())
    for ratios, words in (
        (training, "the host needs {} to {} times as long as for BF16 at O2"),
        (at_o3, "and {} to {} times at O3"),
    ):
        least, most = f"{min(ratios):.1f}", f"{max(ratios):.1f}"
        assert words.format(least, most) in trouble
    for what in ("training", "inference"):
        shares = [
            row["ratio_with_gemms"]
            for (case, recipe), row in rows.items()
            if case.startswith(what) and recipe != "BF16" and (what == "inference" or case == what)
        ]
        assert f"{min(shares)} to {max(shares)} in" in re.sub(r"\s+", " ", PAGE), what


def test_time_to_trace():
    for backend, text in (("eager", "{}x to {}x of BF16's time"), ("aot_eager", "and {}x to {}x")):
        rows = [r for r in read_rows(RESULTS / "trace_time.csv") if r["backend"] == backend]
        ratios = [float(row["ratio"]) for row in rows if row["recipe"] != "BF16"]
        assert text.format(f"{min(ratios):.1f}", f"{max(ratios):.1f}") in PAGE


@pytest.mark.parametrize("direction", ["gather", "scatter"])
def test_bytes_of_fsdp(direction):
    rows = [r for r in read_rows(RESULTS / "wire_bytes.csv") if r["case"] == f"FSDP2 {direction}"]
    column = ("gather", "scatter").index(direction)
    shown = [cells[column] for cells in _table("Bytes that FSDP2 sends").values()]
    for model, text in zip(("a block's linears", "Llama-3.1-8B"), shown, strict=True):
        assert {f"{float(row['ratio']):.3f}" for row in rows if row["model"] == model} == {text}


def test_what_averages_send():
    rows = [row for row in read_rows(RESULTS / "wire.csv") if row["method"] == "fp8"]
    (share,) = {row["of_bf16"] for row in rows}
    assert f"BF16 all-reduce | {share}x |" in README


def test_peak_memory():
    rows = read_rows(RESULTS / "memory_counted.csv")
    for model, (bf16, o2, kept) in _table("Peak memory").items():
        peaks, activations = {}, {}
        for row in rows:
            if row["model"] == model and row["checkpointing"] == "False":
                peaks[row["variant"]] = float(row["peak_mib"]) / 1024
                activations[row["variant"]] = float(row["saved activations"]) / 1024
        assert bf16 == f"{peaks['bf16-mixed']:.1f} GiB"
        assert o2 == f"{peaks['O2']:.1f} GiB ({peaks['O2'] / peaks['bf16-mixed']:.2f}x)"
        assert kept == f"{activations['bf16-mixed']:.1f} to {activations['O2']:.1f} GiB"
        # Autocast's BF16 copies: of all weights but an embedding that no product reads.
        copies = 2 * MULTIPLIED[model] / 2**30
        for shown in (f"{copies:.1f}", f"{activations['bf16-mixed'] - copies:.1f}"):
            assert shown in PAGE


def test_instructions_and_sectors():
    names = ("instructions_per_element", "sectors_per_element", "sectors_over_least")
    rows = read_rows(RESULTS / "emulated_sectors.csv")
    states = {
        state: {(row["what"], row["kernel"]): row for row in rows if row["as"] == state}
        for state in ("before", "now")
    }
    shown = _table("Instructions and sectors")
    assert len(shown) == len(states["now"])
    for (what, kernel), row in states["now"].items():
        before = states["before"].get((what, kernel), {}).get("sectors_over_least", "")
        cells = shown[f"{what}, `{kernel.removesuffix('_kernel')}"]
        assert cells == [*(row[name] for name in names), before]
