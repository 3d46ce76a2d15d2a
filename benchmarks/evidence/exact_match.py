"""Exact matches of a small Llama that learns to copy and to sort, in FP8 against BF16.

    python -m benchmarks.evidence.exact_match    # runs/benchmarks/exact_match.csv, from the root

A loss does not show whether a model solves a task. Here a Llama of 0.4 million parameters learns
two tasks from examples: to repeat 8 random letters, and to sort them.

The loss is that of the answers' tokens. A match is one of 2,000 new problems whose answer is
right in each token under greedy decoding. A forward over the right answer decides that, because
decoding leaves the right prefix at its first error. Matches are counted four times per run, since
their share rises gradually. Each seed has the same initial weights and the same
examples in every run. A finished run becomes rows at once, and a run that has rows is not repeated.
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import get_cosine_schedule_with_warmup

from benchmarks.comparison import tiny_llama
from benchmarks.evidence.small_models_loss import BASELINE, PERTURBED, perturb
from benchmarks.measurement import environment
from benchmarks.rows import add_csv, append_rows, read_rows, tell_kept
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8
from torch_fp8.conversion.forward_precision import LastSteps, unscheduled

LETTERS, LENGTH, SEPARATOR, VOCABULARY = 26, 8, 26, 64
SHAPE, BATCH, PROBLEMS, LEARNING_RATE = (128, 2), 64, 2000, 2e-3
TASKS = {"copying": 100, "sorting": 400}
"""The steps of a run by its task."""
RUNS: dict[str, FP8Config | None] = {
    BASELINE: None,
    PERTURBED: None,
    "O2": FP8Config(),
    "O2, bf16_last=0.1": FP8Config(bf16_last=0.1),
}
COLUMNS = (
    *("task", "run", "seed", "steps", "planned_steps", "loss", "exact_match"),
    *("torch", "commit", "date", "command"),
)


def problems(task: str, count: int, generator: torch.Generator) -> Tensor:
    """Return token ids (count, 2 * LENGTH + 1) of problems with their right answers."""
    letters = torch.randint(LETTERS, (count, LENGTH), generator=generator)
    answers = letters.sort(1).values if task == "sorting" else letters
    return torch.cat([letters, torch.full((count, 1), SEPARATOR), answers], 1)


def train(task: str, run: str, seed: int) -> list[dict[str, object]]:
    """Train a model on a task, and return loss and matches by steps."""
    config, steps = RUNS[run], TASKS[task]
    torch.manual_seed(seed)
    model = tiny_llama.build(VOCABULARY, *SHAPE, pad_token_id=0, eos_token_id=1)
    if run == PERTURBED:
        perturb(model, seed)
    last = None
    if config is not None:
        convert_to_float8(model, unscheduled(config))
        last = LastSteps(model, config.bf16_last, steps) if config.bf16_last else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    if config is not None:
        convert_optimizer(optimizer, config, model=model)
    schedule = get_cosine_schedule_with_warmup(optimizer, steps // 20, steps)
    generator = torch.Generator().manual_seed(1000 + seed)
    rows = []
    for step in range(1, steps + 1):
        if last is not None:
            last.before(step - 1)
        logits, answers = _answers(model, problems(task, BATCH, generator))
        loss = F.cross_entropy(logits.flatten(0, 1).float(), answers.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % (steps // 4) == 0:
            new = problems(task, PROBLEMS, torch.Generator().manual_seed(seed))
            matches = f"{_exact_match(model, new):.4f}"
            rows.append({"steps": step, "loss": f"{loss.item():.6f}", "exact_match": matches})
    return rows


def _answers(model: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits (problems, LENGTH, vocabulary) and the right tokens of the answers."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=tokens, use_cache=False).logits
    return logits[:, LENGTH:-1], tokens[:, LENGTH + 1 :]


@torch.no_grad()
def _exact_match(model: nn.Module, tokens: Tensor) -> float:
    model.eval()
    logits, answers = _answers(model, tokens)
    model.train()
    return float((logits.argmax(-1) == answers).all(1).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(10)))
    add_csv(parser, "exact_match")
    options = parser.parse_args()
    tell_kept(options.csv)
    torch.set_num_threads(1)
    about = environment(torch.device("cpu"))
    for seed in options.seeds:
        for task in options.tasks:
            for run in options.runs:
                known = {(r["task"], r["run"], int(r["seed"])) for r in read_rows(options.csv)}
                if (task, run, seed) in known:
                    continue
                row = {"task": task, "run": run, "seed": seed, "planned_steps": TASKS[task]}
                rows = [about | row | result for result in train(task, run, seed)]
                append_rows(options.csv, COLUMNS, rows)
                print(task, run, seed, *(r["exact_match"] for r in rows), flush=True)
    print("\n".join(summary(read_rows(options.csv))))


def summary(rows: list[dict[str, str]]) -> list[str]:
    """Return the exact matches by task, steps and run, and the paired differences from BF16.

    Both in percent of the problems, with standard errors over the seeds.
    """
    matches: dict[tuple[str, int, str], dict[str, float]] = defaultdict(dict)
    for row in rows:
        key = row["task"], int(row["steps"]), row["run"]
        matches[key][row["seed"]] = 100 * float(row["exact_match"])
    lines = []
    for (task, steps, run), by_seed in sorted(matches.items(), key=lambda item: item[0][:2]):
        baseline = matches[task, steps, BASELINE]
        paired = [value - baseline[seed] for seed, value in by_seed.items() if seed in baseline]
        lines.append(
            f"{task:9} {steps:5} {run:24} {len(by_seed):2} seeds: {_with_error(by_seed.values())}, "
            f"against BF16 {_with_error(paired)}"
        )
    return lines


def _with_error(values: Iterable[float]) -> str:
    numbers = list(values)
    error = statistics.stdev(numbers) / len(numbers) ** 0.5 if len(numbers) > 1 else 0.0
    return f"{statistics.fmean(numbers):+.2f} ± {error:.2f}"


if __name__ == "__main__":
    main()
