"""A small Llama and its pre-training: next-token prediction on one long stream of tokens."""

import itertools
import statistics
import time

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup


def build(
    vocab_size: int, hidden_size: int, num_layers: int, pad_token_id: int, eos_token_id: int
) -> LlamaForCausalLM:
    """Return an untrained float32 Llama with heads of 64, two queries per key, tied embeddings."""
    num_heads = hidden_size // 64
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=max(1, num_heads // 2),
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=pad_token_id,
        bos_token_id=None,
        eos_token_id=eos_token_id,
    )
    return LlamaForCausalLM(config)


def pretrain(
    model: LlamaForCausalLM,
    tokens: Tensor,
    steps: int,
    batch_size: int,
    length: int,
    learning_rate: float = 3e-3,
    seed: int = 0,
    bar: bool = True,
) -> float:
    """Train on random windows of the stream, in float32, with AdamW and a cosine schedule.

    Args:
        model: float32; trained in place.
        tokens: (num_tokens,) int64, on the CPU.
        steps: optimizer steps of batch_size windows of `length` tokens each.
        bar: whether to show a progress bar.
    Returns:
        the mean loss of the last tenth of the steps, in nats per token.
    """
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
    schedule = get_cosine_schedule_with_warmup(optimizer, steps // 20, steps)
    losses = []
    model.train()
    progress = tqdm(range(steps), desc="pre-training", mininterval=2.0, disable=not bar)
    for _ in progress:
        starts = torch.randint(len(tokens) - length, (batch_size,), generator=generator)
        windows = tokens[starts[:, None] + torch.arange(length)].to(device)
        loss = model(input_ids=windows, labels=windows, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        progress.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    last = losses[-max(1, steps // 10) :]
    return sum(last) / len(last)


def seconds_per_step(
    model: LlamaForCausalLM, tokens: Tensor, batch_size: int, length: int, steps: int = 4
) -> float:
    """Return the median seconds of a few steps of `pretrain`, after one; the model is spoilt."""
    times = []

    def note(*_: object) -> None:
        times.append(time.perf_counter())

    hook = model.register_forward_pre_hook(note)
    pretrain(model, tokens, steps + 2, batch_size, length, bar=False)
    hook.remove()
    return statistics.median(after - before for before, after in itertools.pairwise(times[1:]))
