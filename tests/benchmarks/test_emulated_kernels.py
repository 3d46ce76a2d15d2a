from benchmarks.rows import RESULTS, read_rows

KEY = ("kernel", "variant", "target", "warps")


def test_each_recorded_variant_has_a_row_and_none_is_unequal():
    recorded = {tuple(r[c] for c in KEY) for r in read_rows(RESULTS / "kernel_resources.csv")}
    rows = read_rows(RESULTS / "emulated_kernels.csv")
    assert recorded <= {tuple(row[c] for c in KEY) for row in rows}
    for row in rows:
        assert row["equal"] == ("True" if row["case"] else "missing")


def test_the_docs_say_how_many_variants_were_launched_with_each_triton():
    recorded = {tuple(r[c] for c in KEY) for r in read_rows(RESULTS / "kernel_resources.csv")}
    rows = [row for row in read_rows(RESULTS / "emulated_kernels.csv") if row["case"]]
    text = " ".join((RESULTS.parents[1] / "docs/results.md").read_text().split())
    for target in ("sm_90", "sm_100"):
        every = {key for key in recorded if key[2] == target}
        launched = [
            every & {tuple(row[c] for c in KEY) for row in rows if row["triton"] == triton}
            for triton in ("3.6.0", "3.7.0")
        ]
        first, second = map(len, launched)
        assert first == len(every)
        assert f"variant of every kernel, {first} for each of Hopper and Blackwell," in text
        assert f"and {second} of them as Triton 3.7 does" in text
        assert f"Not launched with 3.7 were {first - second} variants" in text
