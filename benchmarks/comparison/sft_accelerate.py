"""Supervised fine-tuning of a causal language model with a training loop on Accelerate.

    python benchmarks/comparison/sft_accelerate.py  # BF16 and FP8 compared; nothing to prepare
    accelerate launch --mixed_precision fp8 benchmarks/comparison/sft_accelerate.py \
        --model meta-llama/Llama-3.2-1B-Instruct --data chats.jsonl

Precision is the launcher's flag and nothing here depends on it.
"""

import os
import shutil
import sys
from pathlib import Path

import comparison
import script_start
import side_by_side
from sft_arguments import argument_parser, checkpoint_to_resume


def parse_arguments():
    arguments = argument_parser(__doc__.splitlines()[0]).parse_args()
    own = "sft_accelerate_quick" if arguments.quick else "sft_accelerate"
    arguments.output = arguments.output or Path("runs") / own
    return arguments


def compare() -> None:
    script = [__file__, *(a for a in sys.argv[1:] if a != "--resume")]
    commands = {name: [*side_by_side.launch(name), *script] for name in side_by_side.PRECISIONS}
    comparison.run(__file__, commands, parse_arguments())


if __name__ == "__main__":
    script_start.begin()
    if "ACCELERATE_MIXED_PRECISION" not in os.environ:  # not started by `accelerate launch`
        script_start.run(compare)
        sys.exit()

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch_fp8_tools.compare import bf16_products
from tqdm import tqdm

from fine_tuning import num_targets, prepare
from run_record import RunRecord


def train(arguments) -> dict:
    """Fine-tune, save the model to <output>/model and return the run's result."""
    last = checkpoint_to_resume(arguments)
    accelerator = Accelerator(gradient_accumulation_steps=arguments.accumulate)
    set_seed(arguments.seed)
    with accelerator.main_process_first():
        run = prepare(arguments)
    processes = accelerator.num_processes
    steps = run.steps(processes)
    optimizer = torch.optim.AdamW(
        run.model.parameters(), lr=arguments.learning_rate, weight_decay=arguments.weight_decay
    )
    schedule = run.schedule(optimizer, processes)
    accelerator.register_for_checkpointing(schedule)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(
        run.model.train(),
        optimizer,
        run.train_loader(processes),
        run.eval_loader(),
    )

    step = 0
    checkpoints = arguments.output / "checkpoints"
    if last is not None:
        accelerator.load_state(last)
        step = int(last.name.removeprefix("step-"))
        train_loader = accelerator.skip_first_batches(train_loader, step * arguments.accumulate)
    record = RunRecord(arguments.output, resume_at=step, write=accelerator.is_main_process)
    if step == 0:
        record.evaluation(0, evaluate(accelerator, model, eval_loader))

    bar = tqdm(
        total=steps,
        initial=step,
        disable=not accelerator.is_local_main_process,
        mininterval=1.0,
    )
    micro_losses = []
    for batch in train_loader:
        with accelerator.accumulate(model):
            loss = model(**batch, use_cache=False).loss
            accelerator.backward(loss)
            micro_losses.append(loss.detach())
            if not accelerator.sync_gradients:
                continue
            accelerator.clip_grad_norm_(model.parameters(), arguments.clip)
            optimizer.step()
            schedule.step()
            step += 1
            record.measure(model, optimizer)
            optimizer.zero_grad()
        record.train(step, float(torch.stack(micro_losses).mean()))
        micro_losses.clear()
        bar.update()
        bar.set_postfix(loss=f"{record.rows[-1]['loss']:.3f}")
        if step % arguments.eval_every == 0 or step == steps:
            record.evaluation(step, evaluate(accelerator, model, eval_loader))
            save_checkpoint(accelerator, checkpoints, step)
    bar.close()

    accelerator.unwrap_model(model).save_pretrained(
        arguments.output / "model",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    if accelerator.is_main_process:
        run.tokenizer.save_pretrained(arguments.output / "model")
    return record.finish(
        precision=accelerator.mixed_precision,
        seed=arguments.seed,
        bf16_products=arguments.bf16_products,
    )


@torch.no_grad()
def evaluate(
    accelerator: Accelerator, model: torch.nn.Module, loader: torch.utils.data.DataLoader
) -> float:
    """Return the mean loss over all answer tokens of all processes."""
    model.eval()
    sums = torch.zeros(2, device=accelerator.device)  # loss * tokens, tokens
    for batch in loader:
        tokens = num_targets(batch)
        loss = float(model(**batch, use_cache=False).loss)
        sums += torch.tensor([loss * tokens, tokens], device=sums.device)
    model.train()
    total, tokens = accelerator.reduce(sums, "sum").tolist()
    return total / tokens


def save_checkpoint(accelerator: Accelerator, folder: Path, step: int) -> None:
    """Save to <folder>/step-<step>, which is complete when it exists, and remove earlier ones."""
    partial = folder / "partial"
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed here
    try:
        accelerator.save_state(partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        earlier = list(folder.glob("step-*"))
        complete = folder / f"step-{step}"
        shutil.rmtree(complete, ignore_errors=True)
        os.replace(partial, complete)
        for path in earlier:
            if path != complete:
                shutil.rmtree(path)
    accelerator.wait_for_everyone()


def main() -> None:
    arguments = parse_arguments()
    if arguments.started_by_comparison:
        script_start.end_with_input()
    arguments.bf16_products = bf16_products.choose(arguments.bf16_products)
    train(arguments)


if __name__ == "__main__":
    script_start.run(main)
