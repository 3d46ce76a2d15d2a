"""The command line of the two fine-tuning scripts. Standard library only: it is read first."""

import argparse
from pathlib import Path

from runs import add_bf16_products
from script_start import Refusal


def argument_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,  # a comparison takes --resume out
    )
    add = parser.add_argument
    add(
        "--model",
        help="a folder or name for from_pretrained; none: a small Llama, made once under --assets",
    )
    add(
        "--data",
        type=Path,
        help="JSONL: messages, conversations, prompt/completion or instruction/output; none: made "
        "from the standard library",
    )
    add("--eval-data", type=Path, help="JSONL for the evaluation; none: 5 %% of --data, at random")
    add(
        "--output",
        type=Path,
        help="folder for checkpoints, losses and the final model; none: runs/<script>, and "
        "runs/<script>_quick with --quick",
    )
    add(
        "--assets",
        type=Path,
        default=Path("runs/assets"),
        help="where what the script makes for itself is kept",
    )
    add("--quick", action="store_true", help="smaller model and shorter run, at most three minutes")
    add(
        "--batching",
        choices=["packed", "padded"],
        default="packed",
        help="several examples to a row, or one",
    )
    add(
        "--max-length",
        type=int,
        default=512,
        help="tokens in a packed row, and in the longest example",
    )
    add("--batch-size", type=int, default=1, help="rows of a micro-batch, per process")
    add("--accumulate", type=int, default=2, help="micro-batches to an optimizer step")
    add(
        "--epochs",
        type=float,
        help="passes over the data; none: 1, on the script's own data 50 steps (--quick: 40)",
    )
    add("--steps", type=int, help="optimizer steps, instead of --epochs")
    add("--learning-rate", type=float, default=5e-4, help="peak of the cosine schedule")
    add(
        "--warmup",
        type=float,
        default=0.05,
        help="share of the steps in which the learning rate rises",
    )
    add("--weight-decay", type=float, default=0.01)
    add("--clip", type=float, default=1.0, help="norm to which gradients are clipped")
    add(
        "--eval-every",
        type=int,
        default=20,
        help="optimizer steps from one evaluation and checkpoint to the next",
    )
    add(
        "--eval-examples",
        type=int,
        help="of the script's own data, at random; none: 96 (--quick: 24)",
    )
    add(
        "--pretraining-steps",
        type=int,
        help="of the script's own model; none: as many as there is time for",
    )
    add("--seed", type=int, default=0, help="of the order of the data")
    add_bf16_products(parser)
    add("--resume", action="store_true", help="go on from the last checkpoint in --output")
    add("--started-by-comparison", action="store_true", help=argparse.SUPPRESS)
    return parser


def last_checkpoint(output: Path) -> Path | None:
    """Return the checkpoint that a run in `output` left last, of either script."""
    folder = output / "checkpoints"
    steps = sorted(folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
    return steps[-1] if steps else next(folder.glob("last.ckpt"), None)


def checkpoint_to_resume(arguments: argparse.Namespace) -> Path | None:
    """Return the checkpoint to go on from; None without --resume.

    Raises:
        Refusal: there is none.
    """
    if not arguments.resume:
        return None
    found = last_checkpoint(arguments.output)
    if found is None:
        raise Refusal(
            f"--resume: there is no checkpoint in {arguments.output / 'checkpoints'}; leave the "
            "option out to start from the beginning"
        )
    return found
