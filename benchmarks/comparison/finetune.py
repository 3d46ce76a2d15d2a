"""Fine-tunes a small language model in BF16 and in FP8: `torch-fp8 compare` on an example.

    python benchmarks/comparison/finetune.py  # nothing to prepare
    python benchmarks/comparison/finetune.py --model path/to/model --data chats.jsonl

It creates a model and data unless you pass some, and starts the unmodified
`examples/sft_lightning.py`.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import script_start
from instruction_rows import read_rows

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/sft_lightning.py"
STEPS, QUICK_STEPS = 30, 24


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--model", help="a folder or name for from_pretrained; without it, a small Llama")
    text = "JSONL: messages, conversations, prompt/completion or instruction/output; none: made"
    add("--data", type=Path, help=f"{text} from the standard library")
    add("--output", type=Path, help="folder of the comparison; none: runs/finetune")
    add(
        "--assets",
        type=Path,
        default=Path("runs/assets"),
        help="folder of the default model and data",
    )
    add("--quick", action="store_true", help="a smaller model and fewer steps")
    add("--steps", type=int, help=f"optimizer steps; none: {STEPS}, {QUICK_STEPS} with --quick")
    add("--learning-rate", type=float, default=5e-4, help="of AdamW")
    add("--pretraining-steps", type=int, help="of the script's own model; none: as time allows")
    add("--variants", nargs="+", default=["bf16", "O2"], help="as for torch-fp8 compare")
    add("--seeds", type=int, default=1, help="trials of each variant")
    return parser


def pair(row: dict) -> dict[str, str]:
    """Return a row of any kind that `read_rows` knows as a prompt and its completion."""
    if "messages" in row:
        *before, last = [message["content"] for message in row["messages"]]
        return {"prompt": "\n\n".join([*before, ""]), "completion": last}
    if "instruction" in row:
        parts = [row["instruction"], row.get("input", "")]
        return {"prompt": "\n\n".join([*filter(None, parts), ""]), "completion": row["output"]}
    return {"prompt": row["prompt"], "completion": row["completion"]}


def command(arguments: argparse.Namespace) -> list[str]:
    """Make missing assets, and return the command that compares.

    Raises:
        Refusal: the data cannot be read.
    """
    model, data = arguments.model, arguments.data
    if data is not None:
        read_rows(data)  # a mistake ends the script before a model is made
    if model is None or data is None:
        import assets  # it imports torch

        preset = assets.QUICK if arguments.quick else assets.DEFAULT
        steps = arguments.pretraining_steps
        prepared = assets.prepare(preset, arguments.assets, steps, with_model=model is None)
        model, data = model or str(prepared.model), data or prepared.train
    output = arguments.output or Path("runs") / (
        "finetune_quick" if arguments.quick else "finetune"
    )
    pairs = arguments.assets / f"{data.stem}_pairs.jsonl"
    pairs.parent.mkdir(parents=True, exist_ok=True)
    pairs.write_text("".join(f"{json.dumps(pair(row))}\n" for _, row in read_rows(data)))
    steps = arguments.steps or (QUICK_STEPS if arguments.quick else STEPS)
    program = [sys.executable, str(EXAMPLE), "--model", model, "--data", str(pairs)]
    program += ["--steps", str(steps), "--learning-rate", str(arguments.learning_rate)]
    # The program ends by itself after its last step, and evaluates.
    compare = ["--steps", str(steps + 1), "--output", str(output), "--fast-cpu"]
    compare += ["--seeds", str(arguments.seeds), "--variants", *arguments.variants]
    return [sys.executable, "-m", "torch_fp8", "compare", *compare, "--", *program]


def main() -> None:
    arguments = argument_parser().parse_args()
    minutes = "two" if arguments.quick else "six"
    print(
        "Fine-tuning in BF16 and in FP8: make the model and the data where they are not there yet, "
        f"then run examples/sft_lightning.py in each precision.\nOn two idle CPU cores this takes "
        f"about {minutes} minutes with the script's own model (a GPU: less). Ctrl-C ends it; the "
        "same command continues.",
        flush=True,
    )
    os.execv(sys.executable, command(arguments))


if __name__ == "__main__":
    script_start.begin()
    script_start.run(main)
