"""One training script in BF16 and in FP8, one after the other: tables, a CSV and a picture.

A script that is started by hand becomes the comparison, and the same script under
`accelerate launch` is one of its two runs. A run leaves curves.csv and result.json in a folder of
its own (`alignment.Record`). Neither torch nor a host is imported here.
"""

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

import script_start
from runs import add_bf16_products, run_each, say_where, table, write
from script_start import Refusal

PRECISIONS = ("bf16", "fp8")
KINDS = ("frozen weights", "trained weights", "residuals", "moments", "gradients", "caches")
"""The kinds of memory; caches hold FP8 weights from one forward without gradients to the next."""
MIB = 2**20


def argument_parser(
    script: str, description: str, learning_rates: tuple[float, float]
) -> argparse.ArgumentParser:
    """Return what all these scripts take.

    Args:
        script: its name, and that of the folder of the output.
        description: one line.
        learning_rates: for the model that it makes, and for one that is given.
    """
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", help="a folder or name for from_pretrained; none: a small Llama, made once")
    add("--data", type=Path, help="JSONL; none: functions of the standard library, and docstrings")
    add("--output", type=Path, help=f"folder of the results; none: runs/{script}")
    add("--assets", type=Path, default=Path("runs/assets"), help="what the script makes for itself")
    add("--quick", action="store_true", help="a smaller model of its own and fewer steps")
    add("--steps", type=int, help="optimizer steps; none: as many as show something")
    text = "to pre-train its own model; none: as many as this machine has time for"
    add("--pretraining-steps", type=int, help=text)
    add("--start-steps", type=int, help="to teach its own model the task; none: as it needs")
    add("--batch-size", type=int, default=32, help="answers of one step, per process")
    add("--eval-rows", type=int, default=64, help="held-out answers to look at")
    add("--max-prompt", type=int, default=96, help="tokens of the longest prompt that is taken")
    add("--max-answer", type=int, default=32, help="tokens of the longest answer")
    own, given = learning_rates
    text = f"none: {own:g} for its own model, {given:g} with --model"
    add("--learning-rate", type=float, help=text)
    add_bf16_products(parser)
    parser.set_defaults(learning_rates=learning_rates, script=script)
    add("--seed", type=int, default=0, help="of the order of the data and of sampling")
    add("--started-by-comparison", action="store_true", help=argparse.SUPPRESS)
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the arguments, with what follows from others."""
    arguments = parser.parse_args()
    own = f"{arguments.script}_quick" if arguments.quick else arguments.script
    arguments.output = arguments.output or Path("runs") / own
    if arguments.learning_rate is None:
        arguments.learning_rate = arguments.learning_rates[arguments.model is not None]
    return arguments


def begin(compare: Callable[[], None]) -> None:
    """Begin a script; one that is started by hand, not by `accelerate launch`, compares and ends.

    Call it before torch or a host is imported.
    """
    script_start.begin()
    if "ACCELERATE_MIXED_PRECISION" not in os.environ:
        script_start.run(compare)
        sys.exit()


def run(
    arguments: Callable[[], argparse.Namespace], train: Callable[[argparse.Namespace], object]
) -> None:
    """Run one of the two trainings, which ends when the comparison that started it does."""

    def main() -> None:
        parsed = arguments()
        if parsed.started_by_comparison:
            script_start.end_with_input()
        from torch_fp8_tools.compare import bf16_products  # it imports torch

        parsed.bf16_products = bf16_products.choose(parsed.bf16_products)
        train(parsed)

    script_start.run(main)


def launch(precision: str) -> list[str]:
    """Return the launcher's command, to which the script and its arguments are added."""
    # Its own default is one thread; --quiet leaves the script's error as the last word.
    threads = os.environ.get("OMP_NUM_THREADS", str(psutil.cpu_count(logical=False) or 1))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1"]
    command += ["--num_machines", "1", "--dynamo_backend", "no", "--quiet"]
    return [*command, "--num_cpu_threads_per_process", threads, "--mixed_precision", precision]


def compare(
    script: str,
    measures: dict[str, str],
    arguments: argparse.Namespace,
    needs: tuple[str, ...] = (),
    note: str = "",
) -> list[dict]:
    """Run the script in both precisions, then print, write and draw what came out.

    Args:
        script: path of the training script.
        measures: key of curves.csv -> what it is, for people.
        arguments: of `argument_parser`; --output gets a folder for each run, comparison.csv,
            memory.csv and comparison.png.
        needs: packages that the script imports, and that not everybody has.
        note: what to know of the figures; printed, and below the picture.
    Returns:
        the rows of comparison.csv.
    Raises:
        Refusal: a package is missing.
        SystemExit: one of the runs failed; its own error stands above.
    """
    missing = [name for name in needs if importlib.util.find_spec(name) is None]
    if missing:
        raise Refusal(f"{' and '.join(missing)} is missing here: pip install {' '.join(missing)}")
    output = arguments.output
    print(
        f"{Path(script).stem}: in {' and in '.join(PRECISIONS)}, one after the other. Everything "
        f"goes to {output}; Ctrl-C ends it.",
        flush=True,
    )
    commands = {p: [*launch(p), script, *sys.argv[1:]] for p in PRECISIONS}
    results = run_each(commands, output)
    rows = result_rows(results, measures)
    write(output / "comparison.csv", rows)
    memory = memory_rows(results)
    write(output / "memory.csv", memory)
    print(f"\n{format_table(rows)}\n\nMiB, counted over storages:\n{format_table(memory)}")
    say_where(results)
    from side_by_side_picture import draw  # matplotlib takes a moment, here where it is needed

    draw(output, results, measures, Path(script).stem, note)
    if note:
        print(note)
    print(f"Curves: {output / 'comparison.png'}   numbers: {output}/comparison.csv, memory.csv")
    return rows


def result_rows(results: dict[str, dict], measures: dict[str, str]) -> list[dict]:
    """Return a row for each precision: the last values of what was measured, and memory in MiB."""
    rows = []
    for precision, result in results.items():
        final = {key: f"{result['final'][key]:.4f}" for key in measures}
        per_parameter = result["frozen_bytes_per_parameter"]
        rows.append(
            {
                "precision": precision,
                **final,
                "bytes/frozen": f"{per_parameter:.3f}",
                "peak MiB": f"{max(result['live'].values()) / MIB:.1f}",
                "seconds": f"{result['seconds']:.0f}",
            }
        )
    return rows


def memory_rows(results: dict[str, dict]) -> list[dict]:
    """Return the MiB of each model in each precision, and by how much FP8's sum is below."""
    rows, totals = [], {}
    for precision, result in results.items():
        total = dict.fromkeys(KINDS, 0)
        for role, sizes in result["memory"].items():
            rows.append(_in_mib(precision, role, sizes))
            total = {kind: total[kind] + sizes[kind] for kind in KINDS}
        totals[precision] = total
        rows.append(_in_mib(precision, "all", total))
    first, last = (with_all_weights(total) for total in totals.values())
    below = {kind: f"{last[kind] / first[kind] - 1:+.1%}" if first[kind] else "" for kind in first}
    shown = {kind: below.get(kind, "") for kind in KINDS}
    rows.append({"precision": "change", "model": "all", **shown, "weights": below["weights"]})
    return rows


def with_all_weights(sizes: dict[str, int]) -> dict[str, int]:
    """Return the bytes with both kinds of weights summed up as `weights`, too."""
    return {**sizes, "weights": sizes["frozen weights"] + sizes["trained weights"]}


def format_table(rows: list[dict]) -> str:
    """Return the table of `rows`, with their keys above."""
    return table([list(rows[0]), *([str(value) for value in row.values()] for row in rows)])


def _in_mib(precision: str, role: str, sizes: dict[str, int]) -> dict:
    sizes = {kind: f"{size / MIB:.2f}" for kind, size in with_all_weights(sizes).items()}
    return {"precision": precision, "model": role, **sizes}
