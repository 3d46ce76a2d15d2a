"""``fp8/logprob_difference`` as TRL's GRPO logs it: in BF16, in FP8, and mixed.

    nice -n 19 python -m benchmarks.evidence.rollout_grpo   # from the root; two minutes

The small Llama of `evidence.rollout_logprobs` continues lines of held-out files of the standard
library, 4 answers of 32 tokens to each of 4 prompts, and is rewarded for lower-case letters. TRL's
`GRPOTrainer` runs unmodified under ``mixed_precision="fp8"`` for 8 steps, and logs in each the mean
of ``|log p - log q|`` over the tokens that it sampled.

* ``fp8/fp8``: the trainer runs unchanged.
* ``bf16/bf16``: its FP8 layers run in BF16, so that both sides do.
* ``bf16/fp8``: they run in BF16 except while it samples, as with an engine in FP8.

``difference`` is the mean over the steps, ``multiplicative_error`` its exponential, ``largest`` the
largest error of a step; ``warned`` says whether the trainer was warned of the bound. ``reward`` is
that of the last step.
"""

import argparse
import contextlib
import json
import math
import os
import tempfile
from typing import Any

import torch

from benchmarks.evidence import pretraining
from benchmarks.evidence.rollout_logprobs import learned, write
from benchmarks.rows import ROOT, add_csv
from torch_fp8.monitor.fallback import pause, resume
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.quantization.recipe import RECIPES

RESULTS = ROOT / "benchmarks/results/rollout_grpo.csv"
STEPS, PROMPTS, ANSWERS, NEW = 8, 4, 4, 32
RATE = 1e-4
PAIRS = (("bf16", "bf16"), ("fp8", "fp8"), ("bf16", "fp8"))
COLUMNS = [
    *("trainer", "rollout", "recipe", "difference", "multiplicative_error", "largest", "warned"),
    *("reward", "steps", "torch", "transformers", "commit", "date", "command"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_csv(parser, "rollout_grpo")
    arguments = parser.parse_args()
    base, _, _ = learned()
    tokenizer, texts = pretraining.tokenizer_and_texts()
    lines = [line for text in texts[True] for line in text.splitlines() if 40 <= len(line) <= 60]
    with tempfile.TemporaryDirectory() as folder:
        base.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        rows = measure(folder, lines[: STEPS * PROMPTS], RECIPES, STEPS)
    write(rows, arguments.csv, COLUMNS, "benchmarks.evidence.rollout_grpo")


def measure(folder: str, prompts: list[str], recipes: Any, steps: int) -> list[dict[str, Any]]:
    """Run GRPO once in BF16 and twice with each recipe, and return a row for each.

    Args:
        folder: folder of the model and its tokenizer.
        prompts: texts.
        recipes: names.
        steps: number of optimizer steps.
    """
    rows = []
    for recipe in recipes:
        for trainer, rollout in PAIRS if not rows else PAIRS[1:]:
            found = run(folder, prompts, recipe, trainer == "fp8", rollout == "fp8", steps)
            named = recipe if "fp8" in (trainer, rollout) else ""
            row = {"trainer": trainer, "rollout": rollout, "recipe": named, **found}
            print(*row.values(), flush=True)
            rows.append(row)
    return rows


def run(
    folder: str, prompts: list[str], recipe: str, trains: bool, samples: bool, steps: int
) -> dict[str, Any]:
    """Train by GRPO, and return the trainer's log.

    Args:
        folder, prompts, steps: see `measure`.
        recipe: recipe of the layers.
        trains, samples: whether the trainer's forward, and that of `generate`, run in FP8.
    """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    with contextlib.ExitStack() as stack:
        output = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(_environment(recipe))
        torch.manual_seed(0)
        trainer: Any = GRPOTrainer(
            folder,
            lower_case,
            args=GRPOConfig(
                output,
                max_steps=steps,
                per_device_train_batch_size=PROMPTS * ANSWERS,
                num_generations=ANSWERS,
                max_completion_length=NEW,
                learning_rate=RATE,
                logging_steps=1,
                beta=0.0,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
                use_cpu=True,
            ),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
        )
        sample = trainer._generate_single_turn

        def sampled(*args: Any, **kwargs: Any) -> Any:
            _switch(trainer.model, samples)
            try:
                return sample(*args, **kwargs)
            finally:
                _switch(trainer.model, trains)

        if not (trains and samples):
            vars(trainer)["_generate_single_turn"] = sampled
        trainer.train()
    logged = [row for row in trainer.state.log_history if "fp8/logprob_difference" in row]
    assert len(logged) == steps
    mean = sum(row["fp8/logprob_difference"] for row in logged) / steps
    largest = max(row["fp8/logprob_multiplicative_error"] for row in logged)
    return {
        "difference": f"{mean:.5f}",
        "multiplicative_error": f"{math.exp(mean):.5f}",
        "largest": f"{largest:.5f}",
        "warned": "bound" in trainer._fp8_rollouts.said,
        "reward": f"{logged[-1]['reward']:.3f}",
        "steps": steps,
    }


def lower_case(completions: list[str], **columns: Any) -> list[float]:
    """Reward the share of lower-case letters."""
    return [sum(map(str.islower, text)) / max(1, len(text)) for text in completions]


def _switch(model: Any, fp8: bool) -> None:
    for module in list(model.modules()):
        if isinstance(module, Float8Layer):
            (resume if fp8 else pause)(module)


@contextlib.contextmanager
def _environment(recipe: str) -> Any:
    wanted = {
        "ACCELERATE_MIXED_PRECISION": "fp8",
        "TORCH_FP8_CONFIG": json.dumps({"recipe": recipe}),
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    _forget()
    try:
        yield
    finally:
        _forget()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _forget() -> None:
    """Let Accelerate read the environment again."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


if __name__ == "__main__":
    main()
