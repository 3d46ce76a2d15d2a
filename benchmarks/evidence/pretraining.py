"""Train a Llama of half a million parameters from scratch, in BF16 or at a level of FP8.

    python -m benchmarks.evidence.pretraining --level O2 --output runs/pretraining  # from the root

It takes 3,000 steps of 512 tokens of the standard library at a learning rate of 3e-3, in a loop
with `convert_to_float8` and `convert_optimizer`. `evidence.optimizer_loss` compares the levels.

    python -m benchmarks.evidence.pretraining --level O2 --bf16-last 0.2 --hidden 512 --layers 6 \\
        --steps 1000 --learning-rate 1e-3 --output runs/pretraining/19M-O2-0.2-seed0  # 19 million
    python -m benchmarks.evidence.pretraining --level O2 --classes 4096 --loss-head fp8 \\
        --output runs/pretraining/head-fp8-seed0  # the smallest output layer that is converted
    python -m benchmarks.evidence.pretraining --level O2 --graph-scales last_step \\
        --output runs/pretraining/last_step-seed0  # compiled

A run becomes a row of the CSV, with a result in its folder. A run whose folder has a result is not
run again, and an interrupted run continues from the last of the states that it writes every 50
steps. So a list of such commands can be continued.
"""

import argparse
import datetime
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    get_cosine_schedule_with_warmup,
)

from benchmarks.comparison import stdlib_corpus, tiny_llama
from benchmarks.comparison.code_tokenizer import END, train_tokenizer
from benchmarks.rows import add_csv, append_rows, commit
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8, memory_report
from torch_fp8.conversion.forward_precision import LastSteps, unscheduled

STEPS = 3000
LEARNING_RATE, BATCH, LENGTH, EVAL_WINDOWS, STEPS_BETWEEN_STATES = 3e-3, 4, 128, 256, 50
SHAPE, CLASSES = (128, 2), 1024
"""The hidden size and the number of layers; the size of the tokenizer's vocabulary."""
COLUMNS = [
    *("run", "seed", "steps", "parameters", "bytes_per_parameter", "train_loss", "held_out_loss"),
    *("torch", "commit", "date", "command"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--level", choices=["O1", "O2", "O3"], help="none: BF16")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the data's order")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument(
        "--perturbed",
        type=int,
        default=0,
        help="multiply the embedding by 1 + this * 1e-6: runs that differ in nothing else show how "
        "far apart chance alone carries them",
    )
    parser.add_argument("--bf16-last", type=float, default=0.0, help="see FP8Config")
    parser.add_argument("--loss-head", help="see FP8Config; none: its default")
    parser.add_argument("--graph-scales", help="see FP8Config; compiles the model")
    parser.add_argument("--classes", type=int, default=CLASSES, help="of the vocabulary")
    parser.add_argument("--hidden", type=int, default=SHAPE[0])
    parser.add_argument("--layers", type=int, default=SHAPE[1])
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)
    parser.add_argument("--output", type=Path, required=True)
    add_csv(parser, "pretraining")
    arguments = parser.parse_args()
    if (arguments.output / "result.json").exists():
        return
    config = None
    if arguments.level is not None:
        names = "loss_head", "graph_scales"
        options = {name: value for name in names if (value := getattr(arguments, name))}
        config = FP8Config(opt_level=arguments.level, bf16_last=arguments.bf16_last, **options)
    shape = arguments.hidden, arguments.layers
    arguments.output.mkdir(parents=True, exist_ok=True)
    state = arguments.output / "state.pt"
    result = pretrain(
        config,
        arguments.seed,
        arguments.steps,
        arguments.perturbed,
        shape,
        arguments.learning_rate,
        state,
        arguments.classes,
        arguments.graph_scales is not None,
    )
    append_rows(arguments.csv, COLUMNS, [row_of(arguments, result)])
    (arguments.output / "result.json").write_text(json.dumps(result, indent=2))
    state.unlink(missing_ok=True)


def row_of(arguments: argparse.Namespace, result: dict) -> dict:
    """Return the row of a run: its level and options, its losses, and its command."""
    run = [arguments.level or "bf16"]
    run += [f"loss_head={arguments.loss_head}"] if arguments.loss_head else []
    run += [f"compiled, graph_scales={arguments.graph_scales}"] if arguments.graph_scales else []
    run += [f"bf16_last={arguments.bf16_last}"] if arguments.bf16_last else []
    places = {"--output", "--csv"}
    words = [w for a, w in zip(sys.argv, sys.argv[1:], strict=False) if not {a, w} & places]
    return {
        "run": ", ".join(run),
        **{name: getattr(arguments, name) for name in ("seed", "steps")},
        "parameters": result["parameters"],
        "bytes_per_parameter": f"{result['bytes_per_parameter']:.2f}",
        "train_loss": f"{result['final_train_loss']:.6f}",
        "held_out_loss": f"{result['final_eval_loss']:.6f}",
        **{"torch": torch.__version__, "commit": commit()},
        **{"date": datetime.date.today().isoformat()},
        "command": " ".join(["python -m benchmarks.evidence.pretraining", *words]),
    }


def pretrain(
    config: FP8Config | None,
    seed: int,
    steps: int,
    perturbed: int = 0,
    shape: tuple[int, int] = SHAPE,
    learning_rate: float = LEARNING_RATE,
    state: Path | None = None,
    classes: int = CLASSES,
    compiled: bool = False,
) -> dict:
    """Train from scratch and return losses, bytes per parameter and seconds.

    Args:
        config: the configuration, or None for BF16.
        seed: number from which weights and the order of the data come.
        steps: number of the optimizer's steps.
        perturbed: millionths by which the embedding is multiplied.
        shape: hidden size and number of layers.
        learning_rate: after the warm-up.
        state: file with the run's state, which is read if it exists and written every 50 steps.
        classes: size of the tokenizer's vocabulary.
        compiled: whether to compile the model.
    """
    started = time.perf_counter()
    tokens, held_out, vocab_size = corpus(classes)
    torch.manual_seed(seed)
    model = tiny_llama.build(vocab_size, *shape, pad_token_id=0, eos_token_id=1)
    with torch.no_grad():
        model.get_input_embeddings().weight *= 1 + perturbed * 1e-6
    last = None
    if config is not None:
        convert_to_float8(model, unscheduled(config))
        last = LastSteps(model, config.bf16_last, steps) if config.bf16_last else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
    if config is not None:
        convert_optimizer(optimizer, config, model=model)
    if compiled:
        model.compile()
    schedule = get_cosine_schedule_with_warmup(optimizer, steps // 20, steps)
    generator = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    if state is not None and state.exists():
        loaded = torch.load(state)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        schedule.load_state_dict(loaded["schedule"])
        generator.set_state(loaded["generator"])
        losses = loaded["losses"]
    memory = None
    for step in range(len(losses), steps):
        if last is not None:
            last.before(step)
        loss = loss_of(model, windows(tokens, BATCH, generator))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if memory is None:
            memory = memory_report(model, optimizer).bytes_per_param
        optimizer.zero_grad()
        losses.append(loss.item())
        if state is not None and len(losses) % STEPS_BETWEEN_STATES == 0:
            parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
            saved = {name: part.state_dict() for name, part in parts.items()}
            saved |= {"generator": generator.get_state(), "losses": losses}
            torch.save(saved, state.with_suffix(".new"))
            os.replace(state.with_suffix(".new"), state)
    tail = losses[-max(1, steps // 10) :]
    return {
        "steps": steps,
        "parameters": sum(p.numel() for p in model.parameters()),
        "bytes_per_parameter": memory,
        "final_train_loss": sum(tail) / len(tail),
        "losses": losses,
        "final_eval_loss": evaluate(model, held_out),
        "seconds": time.perf_counter() - started,
    }


def corpus(classes: int = CLASSES) -> tuple[Tensor, Tensor, int]:
    """Return tokens of a quarter of the standard library and of its held-out files, and the
    vocabulary.
    """
    tokenizer, texts = tokenizer_and_texts(classes)
    streams = [
        torch.tensor([i for ids in tokenizer([t + END for t in part])["input_ids"] for i in ids])
        for part in texts.values()
    ]
    return streams[0], streams[1], len(tokenizer)


def tokenizer_and_texts(
    classes: int = CLASSES,
) -> tuple[PreTrainedTokenizerFast, dict[bool, list[str]]]:
    """Return the corpus's tokenizer and files, by whether they are held out."""
    texts: dict[bool, list[str]] = {False: [], True: []}
    for path in stdlib_corpus.source_files(one_in=4):
        texts[stdlib_corpus.is_held_out(path)].append(path.read_text(encoding="utf-8"))
    return train_tokenizer(texts[False], classes), texts


def windows(tokens: Tensor, count: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(tokens) - LENGTH, (count,), generator=generator)
    return tokens[starts[:, None] + torch.arange(LENGTH)]


def loss_of(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, held_out: Tensor) -> float:
    """Return the mean loss of the same windows of the held-out files every time."""
    chosen = windows(held_out, EVAL_WINDOWS, torch.Generator().manual_seed(0))
    return sum(float(loss_of(model, part)) for part in chosen.split(16)) / (EVAL_WINDOWS // 16)


if __name__ == "__main__":
    main()
