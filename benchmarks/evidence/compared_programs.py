"""Results of `torch-fp8 compare` for ten unmodified programs, each with two seeds.

    python -m benchmarks.evidence.compared_programs

The seven examples, ``trl.scripts.sft`` under its launcher, a vision transformer under Lightning,
and a Fabric loop that logs nothing and sets no seed. Results stay in ``--output``; a second
call runs only the missing ones.
"""

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.rows import add_csv, write_rows
from examples.sft import quick_model, quick_rows

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests/torch_fp8_tools/compare/programs"
LAUNCH = "accelerate launch --mixed_precision fp8"
TRL = (
    "accelerate launch -m trl.scripts.sft --model_name_or_path model --dataset_name data "
    "--output_dir sft_out --max_steps 20 --per_device_train_batch_size 8 --learning_rate 1e-3 "
    "--push_to_hub --use_cpu"
)
COMMANDS = {
    "sft_lightning": f"python {ROOT}/examples/sft_lightning.py --quick",
    "sft": f"accelerate launch --mixed_precision bf16 {ROOT}/examples/sft.py --quick",
    **{name: f"{LAUNCH} {ROOT}/examples/{name}.py --quick" for name in ("lora", "loop", "dpo")},
    **{name: f"{LAUNCH} {ROOT}/examples/{name}.py --quick" for name in ("ppo", "grpo")},
    "trl_sft": TRL,
    "vit_lightning": f"python {PROGRAMS}/vit_lightning.py",
    "silent": f"python {PROGRAMS}/silent.py",
}
STEPS, SEEDS = 20, 2
COLUMNS = [
    *("program", "variant", "error", "steps", "loss", "loss_difference"),
    *("loss_difference_error", "peak_bytes", "step_seconds", "fp8_layers"),
    *("layers", "advice", "command", "torch", "date"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("runs/compared_programs"))
    add_csv(parser, "compared_programs")
    arguments = parser.parse_args()
    make_model(arguments.output)
    rows = []
    for name, command in COMMANDS.items():
        folder = arguments.output.absolute() / "out" / name
        compare(command, folder)
        rows += as_rows(name, command, json.loads((folder / "report.json").read_text()))
    write_rows(arguments.csv, COLUMNS, rows)


def make_model(folder: Path) -> None:
    """Write the model and the data of the examples for ``trl.scripts.sft``, which makes none."""
    if (folder / "model").exists():
        return
    torch.manual_seed(0)
    for part in quick_model():
        part.save_pretrained(folder / "model")
    (folder / "data").mkdir(parents=True, exist_ok=True)
    lines = "".join(f"{json.dumps(row)}\n" for row in quick_rows())
    (folder / "data/train.jsonl").write_text(lines)


def compare(command: str, folder: Path) -> None:
    """Run the comparison of a command into `folder`; a program that fails is a row."""
    given = ["--steps", str(STEPS), "--seeds", str(SEEDS), "--no-repeat", "--output", str(folder)]
    subprocess.run(
        [sys.executable, "-m", "torch_fp8", "compare", *given, "--", *shlex.split(command)],
        cwd=folder.parents[1],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=False,
    )


def as_rows(name: str, command: str, report: dict) -> list[dict]:
    """Return a row for each variant of a report."""
    stamp = {"torch": torch.__version__, "date": datetime.date.today().isoformat()}
    shown = {"program": name, "command": command.replace(f"{ROOT}/", ""), **stamp}
    return [
        {**dict.fromkeys(COLUMNS, ""), **shown, "advice": report["advice"]}
        | {key: variant[key] for key in COLUMNS if variant.get(key) is not None}
        for variant in report["variants"]
    ]


if __name__ == "__main__":
    main()
