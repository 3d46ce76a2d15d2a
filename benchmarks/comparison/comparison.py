"""The same fine-tuning in two precisions, one after the other: a table, a CSV and a picture.

It imports neither torch nor a host: it says at once what is going to happen, and starts processes.
"""

import argparse
import sys
from pathlib import Path

import child_process
from runs import run_each, say_where, table, write
from script_start import Refusal
from sft_arguments import last_checkpoint

COLUMNS = {
    "precision": "precision",
    "train loss": "final_train_loss",
    "eval loss before": "first_eval_loss",
    "eval loss after": "final_eval_loss",
    "difference": "difference",
    "FP8 linears": "fp8_linears",
    "bytes/param": "bytes_per_parameter",
    "seconds": "seconds",
}


def run(script: str, commands: dict[str, list[str]], arguments: argparse.Namespace) -> None:
    """Say what is going to happen, check what can be checked, and compare.

    Args:
        script: path of the training script.
        commands: as of `compare`.
        arguments: of `sft_arguments.argument_parser`.
    """
    resumed = {name for name in commands if last_checkpoint(arguments.output / name)}
    if arguments.resume and not resumed:
        raise Refusal(
            f"--resume: there is no checkpoint in {arguments.output}/<precision>/checkpoints; "
            "leave the option out to start from the beginning"
        )
    print(plan(list(commands), arguments), flush=True)
    given = [argument for argument in sys.argv[1:] if argument != "--resume"]
    check = [sys.executable, str(Path(script).with_name("before_training.py")), *given]
    if status := child_process.run([*check, "--started-by-comparison"]):
        raise SystemExit(status)
    if arguments.resume:
        commands = {
            name: [*command, *(["--resume"] if name in resumed else [])]
            for name, command in commands.items()
        }
    compare(commands, arguments.output, about(arguments))


def plan(precisions: list[str], arguments: argparse.Namespace) -> str:
    """Return what is going to happen, and how long it takes, as far as that is known now."""
    minutes = "three" if arguments.quick else "eight"
    time = (
        f"On two idle CPU cores this takes at most {minutes} minutes (a GPU: less); step 1 looks "
        "at this machine and says more."
        if arguments.model is None and arguments.data is None and arguments.steps is None
        else "Step 1 looks at the model, the data and this machine and says how long it takes."
    )
    steps = [
        "make the model and the data, where they are not there yet, and check both",
        f"fine-tune in {precisions[0]}",
        f"fine-tune the same in {precisions[1]}",
        "compare",
    ]
    lines = [f"  {i}. {step}" for i, step in enumerate(steps, start=1)]
    return "\n".join(
        [
            f"Fine-tuning of {about(arguments)}",
            *lines,
            time,
            f"Everything goes to {arguments.output}. Ctrl-C ends it; --resume goes on from there.",
        ]
    )


def about(arguments: argparse.Namespace) -> str:
    """Return what is trained on what, in a few words."""
    model = "a small Llama made here" if arguments.model is None else Path(arguments.model).name
    data = "docstrings of the standard library"
    return f"{model} on {data if arguments.data is None else arguments.data.name}"


def compare(commands: dict[str, list[str]], output: Path, title: str = "") -> list[dict]:
    """Run each precision's command into `output`/<precision>, then print and write what came out.

    Args:
        commands: precision -> command, to which `--output` is added; the others are compared to
            the first one.
        output: gets comparison.csv and comparison.png beside the runs' own folders.
        title: of the picture: what is trained on what.
    Returns:
        the rows of the table.
    Raises:
        SystemExit: one of the runs failed; its own error stands above.
    """
    for name in ("comparison.csv", "comparison.png"):  # of an earlier comparison
        (output / name).unlink(missing_ok=True)
    results = run_each(commands, output)
    rows = table_rows(results)
    write(output / "comparison.csv", rows)
    print("\n" + format_table(rows))
    say_where(results)
    from comparison_picture import draw  # matplotlib takes a moment, here where it is needed

    draw(results, output, output / "comparison.png", title)
    print(f"Curves: {output / 'comparison.png'}   numbers: {output / 'comparison.csv'}")
    return rows


def table_rows(results: dict[str, dict]) -> list[dict]:
    """Return one row per run; `difference` is its last evaluation loss / the first run's - 1."""
    reference = next(iter(results.values()))["final_eval_loss"]
    rows = []
    for precision, result in results.items():
        linears = result["linear_layers"]
        fp8 = sum(count for kind, count in linears.items() if kind.startswith("Float8"))
        derived = {
            "precision": precision,
            "difference": result["final_eval_loss"] / reference - 1,
            "fp8_linears": f"{fp8} of {sum(linears.values())}",
        }
        rows.append({key: derived.get(key, result.get(key)) for key in COLUMNS.values()})
    return rows


def format_table(rows: list[dict]) -> str:
    formats = {
        "final_train_loss": "{:.4f}",
        "first_eval_loss": "{:.4f}",
        "final_eval_loss": "{:.4f}",
        "difference": "{:+.2%}",
        "bytes_per_parameter": "{:.2f}",
        "seconds": "{:.0f}",
    }
    cells = [[formats.get(key, "{}").format(row[key]) for key in COLUMNS.values()] for row in rows]
    return table([list(COLUMNS), *cells])
