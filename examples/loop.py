"""Your own training loop on Accelerate.

    accelerate launch --mixed_precision fp8 examples/loop.py \
        --model Qwen/Qwen3-0.6B --data book.txt
    accelerate launch --mixed_precision fp8 examples/loop.py --quick  # a tiny model, any machine

The data is plain text. Only the launcher's flag asks for FP8. Needs
`pip install accelerate transformers`.
"""

import argparse
import inspect
import textwrap
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

LENGTH = 128


def quick_model():
    """Return a tiny model with random weights and a tokenizer of bytes."""
    tokenizer = ByT5Tokenizer(extra_ids=0)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), num_attention_heads=2, pad_token_id=0, **sizes)
    return LlamaForCausalLM(config), tokenizer


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader) -> float:
    """Return the mean loss per token over all processes."""
    model.eval()
    losses = [model(input_ids=batch, labels=batch).loss for batch in loader]
    model.train()
    return accelerator.gather(torch.stack(losses)).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--data", default="book.txt")
    parser.add_argument("--output", default="runs/loop")
    parser.add_argument("--quick", action="store_true", help="a tiny model and data of its own")
    options = parser.parse_args()

    accelerator = Accelerator()
    set_seed(0)
    if options.quick:
        model, tokenizer = quick_model()
        text = inspect.getsource(textwrap) + inspect.getsource(inspect)[:40_000]
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        text = Path(options.data).read_text()
    tokens = torch.tensor(tokenizer(text).input_ids)
    rows = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
    held_out = len(rows) // 10
    train = DataLoader(rows[held_out:], 8, shuffle=True)
    test = DataLoader(rows[:held_out], 8)

    rate, steps = (1e-3, 20) if options.quick else (1e-5, len(train))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model, optimizer, train, test, schedule = accelerator.prepare(
        model, optimizer, train, test, schedule
    )

    before = evaluate(accelerator, model, test)
    bar = tqdm(total=steps, disable=not accelerator.is_main_process)
    for _, batch in zip(range(steps), train, strict=False):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        bar.update()
        bar.set_postfix(loss=f"{loss.item():.3f}")
    bar.close()
    after = evaluate(accelerator, model, test)

    state = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        options.output, state_dict=state, is_main_process=accelerator.is_main_process
    )
    losses = f"{before:.3f} -> {after:.3f}"
    accelerator.print(f"held-out loss {losses}; the model is in {options.output}")


if __name__ == "__main__":
    main()
