"""Log-probabilities of rollouts against those of training, in BF16, in FP8, and mixed.

    nice -n 19 python -m benchmarks.evidence.rollout_logprobs   # from the root; two minutes

A Llama of half a million parameters has learned the standard library in BF16 for 150 short steps
(`evidence.pretraining` has the text). A policy samples 32 tokens for each of 8 prompts with a
cache, one after the other, as TRL's trainers do it; then the trainer's forward scores all of them
at once. Both run under BF16 autocast.

* ``bf16/bf16``: neither is in FP8.
* ``fp8/fp8``: both run the recipe, within `torch_fp8.rollout`.
* ``bf16/fp8``: the trainer runs BF16, and the rollout the recipe, as an engine in FP8 would.

``difference`` is the mean of ``|log p - log q|`` over the tokens of all seeds, and
``multiplicative_error`` its exponential: the metrics that TRL's trainers log.
"""

import argparse
import contextlib
import copy
import datetime
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accelerate_fp8.logprob_difference import SampledLogprobs
from benchmarks.comparison import tiny_llama
from benchmarks.evidence import pretraining
from benchmarks.rows import ROOT, add_csv, commit, write_rows
from torch_fp8 import FP8Config, convert_to_float8
from torch_fp8.nn.rollout import rollout
from torch_fp8.quantization.recipe import RECIPES

RESULTS = ROOT / "benchmarks/results/rollout_logprobs.csv"
STEPS, HIDDEN, LAYERS = 150, 128, 2
BATCH, TOKENS, RATE = 8, 64, 3e-3
PROMPTS, LENGTH, NEW, SEEDS = 8, 24, 32, 2
PER_TOKEN = ("rowwise", "blockwise", "mxfp8")
COLUMNS = [
    *("trainer", "rollout", "recipe", "difference", "multiplicative_error", "tokens"),
    *("steps", "torch", "transformers", "commit", "date", "command"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    add_csv(parser, "rollout_logprobs")
    arguments = parser.parse_args()
    base, _, held_out = learned(arguments.steps)
    rows = [{**row, "steps": arguments.steps} for row in measure(base, held_out, SEEDS)]
    write(rows, arguments.csv, COLUMNS, "benchmarks.evidence.rollout_logprobs")


def learned(steps: int = STEPS) -> tuple[Any, Tensor, Tensor]:
    """Return a model that has learned in BF16, the tokens it learned, and held-out ones."""
    tokens, held_out, vocab_size = pretraining.corpus()
    torch.manual_seed(0)
    base = tiny_llama.build(vocab_size, HIDDEN, LAYERS, pad_token_id=0, eos_token_id=1)
    train(base, tokens, steps)
    return base, tokens, held_out


def train(model: Any, tokens: Tensor, steps: int) -> None:
    """Train on short windows, in BF16."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        windows = pretraining.windows(tokens, BATCH, generator)[:, :TOKENS]
        pretraining.loss_of(model, windows).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def measure(base: Any, held_out: Tensor, seeds: int) -> list[dict[str, Any]]:
    """Return a row for each recipe and each pair of precisions."""
    rows = [compare(base, base, held_out, seeds, "bf16", "bf16", "")]
    for recipe in RECIPES:
        policy = copy.deepcopy(base)
        convert_to_float8(policy, FP8Config(recipe=recipe))
        if recipe == "delayed":  # the amaxes of a step
            pretraining.loss_of(policy.train(), held_out[: PROMPTS * LENGTH].view(PROMPTS, -1))
        rows.append(compare(policy, policy, held_out, seeds, "fp8", "fp8", recipe))
        rows.append(compare(base, policy, held_out, seeds, "bf16", "fp8", recipe))
    return rows


def compare(trained: Any, policy: Any, held_out: Tensor, seeds: int, *names: str) -> dict[str, Any]:
    """Sample from `policy` and score by `trained`, both in training mode."""
    total, count = 0.0, 0
    for seed in range(seeds):
        torch.manual_seed(seed)
        prompts = pretraining.windows(held_out, PROMPTS, torch.Generator().manual_seed(seed))
        prompts = prompts[:, :LENGTH]
        sequences, sampled = sample(policy.train(), prompts)
        scored = score(trained.train(), sequences)
        total += (sampled - scored).abs().sum(dtype=torch.float64).item()
        count += sampled.numel()
    mean = total / count
    row = dict(zip(COLUMNS, names, strict=False))
    row |= {"difference": f"{mean:.5f}", "multiplicative_error": f"{math.exp(mean):.5f}"}
    row["tokens"] = str(count)
    print(*row.values(), flush=True)
    return row


@torch.no_grad()
def sample(policy: Any, prompts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sequences, and the log-probabilities (B, NEW) of the sampled tokens."""
    watch = SampledLogprobs(1.0)
    with rollout(policy), _autocast(), watch.watching(policy, None):
        sequences = policy.generate(
            **{"input_ids": prompts, "attention_mask": torch.ones_like(prompts)},
            **{"do_sample": True, "top_k": 0, "max_new_tokens": NEW, "min_new_tokens": NEW},
        )
    found = watch.of(sequences[:, prompts.shape[1] :].tolist())
    assert found is not None
    return sequences, torch.tensor(found)


@torch.no_grad()
def score(model: Any, sequences: Tensor) -> Tensor:
    """Return the log-probabilities (B, NEW) that one forward of training gives the last tokens."""
    with torch.enable_grad(), _autocast():
        logits = model(sequences).logits
    chances = logits[:, -NEW - 1 : -1].float().log_softmax(-1)
    return chances.gather(-1, sequences[:, -NEW:, None]).squeeze(-1)


def _autocast() -> contextlib.AbstractContextManager[None]:
    made: Any = torch.autocast("cpu", torch.bfloat16)
    return made


def about(module: str) -> dict[str, str]:
    """Return the columns with the origin of a row."""
    import transformers

    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit(),
        "date": f"{datetime.date.today():%Y-%m-%d}",
        "command": f"python -m {module}",
    }


def write(rows: list[dict[str, Any]], path: Path, columns: list[str], module: str) -> None:
    """Write the rows of a benchmark's module with their origin."""
    made_by = about(module)
    write_rows(path, columns, [{**row, **made_by} for row in rows])
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
