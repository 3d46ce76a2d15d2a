"""LoRA SFT, DPO, GRPO and PPO in FP8 against BF16: loss, reward and KL divergence from equal seeds.

    nice -n 19 python -m benchmarks.evidence.frozen_parity       # from the repository's root

Every run is the unmodified script of comparison/ in a process of its own, with the variable that
`accelerate launch --mixed_precision` sets and with the small checkpoint that its ``--quick`` makes;
all runs start from the same one, and a seed is that of the data's order and of sampling. A finished
run becomes a row of the CSV at once, and what is there is not run again. The processes are forks of
this one, which has imported the hosts; so it runs on a CPU alone.

* ``loss``: held-out, at the end; DPO's own for DPO, that of the true answers for the others. FP8
  is to be within 0.5 % of BF16, mean over the seeds.
* ``reward``: the accuracy for SFT and DPO; ``kl``: from the reference, which for LoRA is the base.
  FP8's mean is to lie within the spread of BF16's seeds, from the smallest to the largest.

GRPO and PPO sample: once a token differs, so does all that follows, in BF16 from another seed as in
FP8 from the same one. Equal seeds then say little, and more seeds say more.
"""

import argparse
import json
import math
import multiprocessing
import os
import runpy
import shlex
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.measurement import Table, environment, print_table
from benchmarks.rows import ROOT, add_csv, read_rows, tell_kept

BF16, FP8 = "bf16", "fp8"
SCRIPTS = {
    "lora_sft": ("eval_loss", "accuracy", "eval_kl"),
    "dpo_trl": ("eval_loss", "accuracy", "eval_kl"),
    "grpo_trl": ("eval_loss", "reward", "kl"),
    "rlhf_ppo": ("eval_loss", "reward", "kl"),
}
"""The examples, and where they put loss, reward and KL divergence."""
BAND = 0.005
"""The share of BF16's loss that FP8's may differ by."""
EXAMPLES = ROOT / "benchmarks/comparison"
RUN = ["--quick", "--steps", "16", "--batch-size", "16", "--max-answer", "16"]
"""The scripts' arguments: as short as runs can be that show something."""
START = ["--pretraining-steps", "100", "--assets", "runs/frozen_parity"]
"""All machines start from a model of as many steps: left to itself, a script fits them to the time
that one takes, and each machine has another model, and another loss in BF16, too.
"""
COLUMNS = ("example", "precision", "seed", "steps", "loss", "reward", "kl", "script")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scripts", nargs="+", choices=list(SCRIPTS), default=list(SCRIPTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add_csv(parser, "frozen_parity")
    parser.add_argument("script_arguments", nargs="*", help="for every script, after --")
    arguments = parser.parse_args()
    tell_kept(arguments.csv)
    torch.set_num_threads(1)  # a fork has no other threads
    from trl import DPOTrainer, GRPOTrainer, SFTTrainer  # noqa: F401  (for all forks)

    table = Table(arguments.csv, COLUMNS, COLUMNS[:3], environment(torch.device("cpu")))
    for seed in arguments.seeds:  # outside: an interrupted benchmark has compared every script
        for script in arguments.scripts:
            for precision in (BF16, FP8):
                have = {(r["example"], r["precision"], r["seed"]) for r in read_rows(arguments.csv)}
                if (script, precision, str(seed)) not in have:
                    row = measure(script, precision, seed, arguments.script_arguments)
                    table.add([row])
                    print({name: row[name] for name in COLUMNS[:-1]}, flush=True)
    verdicts = [verdict(script, read_rows(arguments.csv)) for script in arguments.scripts]
    print_table(tuple(verdicts[0]), verdicts)


def measure(script: str, precision: str, seed: int, more: list[str]) -> dict[str, Any]:
    """Run an example once and return its row.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    given = [*RUN, *START, "--seed", str(seed), *more]
    with tempfile.TemporaryDirectory() as folder:
        arguments = [*given, "--output", folder]
        log = Path(folder) / "log"
        run = multiprocessing.get_context("fork").Process(
            target=_run, args=(EXAMPLES / f"{script}.py", precision, arguments, log)
        )
        run.start()
        run.join()
        if run.exitcode:
            said = log.read_text()[-4000:]
            raise RuntimeError(f"{script} {shlex.join(arguments)} in {precision} failed:\n{said}")
        result = json.loads((Path(folder) / "result.json").read_text())
    loss, reward, kl = (f"{result['final'][key]:.6f}" for key in SCRIPTS[script])
    return {
        "example": script,
        "precision": precision,
        "seed": seed,
        "steps": result["steps"],
        "loss": loss,
        "reward": reward,
        "kl": kl,
        "script": f"--mixed_precision {precision} comparison/{script}.py {shlex.join(given)}",
    }


def _run(script: Path, precision: str, arguments: list[str], log: Path) -> None:
    """Become the script, as `accelerate launch` would start it."""
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    for descriptor in (1, 2):
        os.dup2(sys.stdout.fileno(), descriptor)
    os.environ.pop("TORCH_FP8_CONFIG", None)
    os.environ["ACCELERATE_MIXED_PRECISION"] = precision
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def verdict(script: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the rows of a script say: FP8's means beside BF16's range, and what holds.

    The difference of the losses is the mean over the seeds, with its standard error.
    """
    rows = sorted(rows, key=lambda row: int(row["seed"]))
    of = {
        precision: [r for r in rows if (r["example"], r["precision"]) == (script, precision)]
        for precision in (BF16, FP8)
    }
    made: dict[str, Any] = {"example": script, "seeds": len(of[FP8])}
    for name in ("loss", "reward", "kl"):
        bf16, fp8 = ([float(row[name]) for row in of[precision]] for precision in (BF16, FP8))
        mean = statistics.mean(fp8)
        made[f"bf16 {name}"] = f"{min(bf16):.4f} to {max(bf16):.4f}"
        made[f"fp8 {name}"] = f"{mean:.4f}"
        if name == "loss":
            of_seeds = [100 * (ours / other - 1) for ours, other in zip(fp8, bf16, strict=True)]
            difference = statistics.mean(of_seeds)
            several = len(of_seeds) > 1  # one seed has no spread
            error = statistics.stdev(of_seeds) / math.sqrt(len(of_seeds)) if several else 0.0
            made["difference"] = f"{difference:+.2f}{f' ± {error:.2f}' if several else ''} %"
            made["loss holds"] = abs(difference) <= 100 * BAND
        else:
            made[f"{name} holds"] = min(bf16) <= mean <= max(bf16)
    return made


if __name__ == "__main__":
    main()
