"""Loss of LoRA on a frozen base whose output layer runs in BF16 or in FP8.

    nice -n 19 python -m benchmarks.evidence.lora_head     # from the repository's root

A Llama of 1.3 million parameters with 4,096 classes learns the standard library in float32. Then
adapters of rank 16 (peft) learn files that it has not read: in stock BF16, in stock BF16 perturbed
by 1e-6, and at O2 with ``loss_head`` "bf16" and "fp8", from the same weights and windows. The loss
is that of other held-out files. A finished run becomes a row of the CSV at once, and an existing
row is not run again. At the end the command prints the paired differences.
"""

import argparse
import copy
import datetime
import math
import statistics

import peft
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmarks.comparison import stdlib_corpus, tiny_llama
from benchmarks.comparison.code_tokenizer import END, train_tokenizer
from benchmarks.evidence.pretraining import evaluate, loss_of, windows
from benchmarks.rows import add_csv, append_rows, commit, read_rows
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8

CLASSES, SHAPE, RANK = 4096, (128, 4), 16
PRETRAINING_STEPS, STEPS, BATCH, LEARNING_RATE = 600, 100, 4, 2e-3
BF16, PERTURBED, HEAD_BF16, HEAD_FP8 = "bf16", "bf16, perturbed", "O2", "O2, output layer in FP8"
CONFIGS = {HEAD_BF16: FP8Config(), HEAD_FP8: FP8Config(loss_head="fp8")}
RUNS = (BF16, PERTURBED, *CONFIGS)
MODULE = "benchmarks.evidence.lora_head"
COLUMNS = ["run", "seed", "steps", "loss", "base_loss", "torch", "commit", "date", "command"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(10)))
    add_csv(parser, "lora_head")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    learned, tuned, held_out, classes = corpus()
    for seed in arguments.seeds:
        there = {row["run"] for row in read_rows(arguments.csv) if int(row["seed"]) == seed}
        if there >= set(RUNS):
            continue
        torch.manual_seed(seed)
        base = tiny_llama.build(classes, *SHAPE, pad_token_id=0, eos_token_id=1)
        tiny_llama.pretrain(base, learned, PRETRAINING_STEPS, 8, 128, seed=seed, bar=False)
        base_loss = evaluate(base, held_out)
        for run in [run for run in RUNS if run not in there]:
            loss = tune(copy.deepcopy(base), run, seed, tuned, held_out)
            row = {
                **{"run": run, "seed": seed, "steps": STEPS, "loss": f"{loss:.6f}"},
                **{"base_loss": f"{base_loss:.6f}", "torch": torch.__version__},
                **{"commit": commit(), "date": datetime.date.today().isoformat()},
                "command": f"python -m {MODULE} --seeds {seed}",
            }
            append_rows(arguments.csv, COLUMNS, [row])
            print(f"{seed} {run:24} {base_loss:.4f} > {loss:.4f}", flush=True)
    print_differences(read_rows(arguments.csv))


def corpus() -> tuple[Tensor, Tensor, Tensor, int]:
    """Return the tokens of pre-training, of fine-tuning and of its evaluation, and the classes."""
    texts: list[list[str]] = [[], [], []]
    for number, path in enumerate(stdlib_corpus.source_files(one_in=4)):
        part = 0 if not stdlib_corpus.is_held_out(path) else 1 + number % 2
        texts[part].append(path.read_text(encoding="utf-8"))
    tokenizer = train_tokenizer(texts[0], CLASSES)
    learned, tuned, held_out = (
        torch.tensor([i for ids in tokenizer([t + END for t in part])["input_ids"] for i in ids])
        for part in texts
    )
    return learned, tuned, held_out, len(tokenizer)


def tune(model: LlamaForCausalLM, run: str, seed: int, tokens: Tensor, held_out: Tensor) -> float:
    """Return the loss on held-out files after adapters have learned others."""
    torch.manual_seed(seed)
    if run == PERTURBED:
        with torch.no_grad():
            model.get_input_embeddings().weight *= 1 + 1e-6
    lora = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear")
    adapted = peft.get_peft_model(model, lora)
    optimizer = torch.optim.AdamW(
        [p for p in adapted.parameters() if p.requires_grad], lr=LEARNING_RATE
    )
    if run in CONFIGS:
        convert_to_float8(adapted, CONFIGS[run])
        convert_optimizer(optimizer, CONFIGS[run], model=adapted)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        loss_of(adapted, windows(tokens, BATCH, generator)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return evaluate(adapted, held_out)


def print_differences(rows: list[dict]) -> None:
    """Print the mean of the paired differences of the losses, in percent, and its error."""
    losses = {(row["run"], int(row["seed"])): float(row["loss"]) for row in rows}
    seeds = sorted({seed for _, seed in losses})
    for run, control in ((PERTURBED, BF16), (HEAD_BF16, BF16), (HEAD_FP8, HEAD_BF16)):
        pairs = [(losses.get((run, s)), losses.get((control, s))) for s in seeds]
        values = [100 * (loss / other - 1) for loss, other in pairs if loss and other]
        if len(values) > 1:
            error = statistics.stdev(values) / math.sqrt(len(values))
            print(f"{run} against {control}: {statistics.fmean(values):+.3f} ± {error:.3f} %")


if __name__ == "__main__":
    main()
