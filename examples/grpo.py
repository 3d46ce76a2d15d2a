"""Group relative policy optimization with TRL, and a reward that a program computes.

    accelerate launch --mixed_precision fp8 examples/grpo.py \
        --model Qwen/Qwen3-0.6B --data prompts.jsonl
    accelerate launch --mixed_precision fp8 examples/grpo.py --quick  # a tiny model, any machine

Each line of the data is {"prompt": "...", "answer": "..."}; a completion's reward is the share of
the answer's words in it. Only the launcher's flag asks for FP8. Sampling and training use the same
FP8 weights. Needs `pip install trl`.
"""

import argparse
import re

import torch
from datasets import Dataset, load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)
from trl import GRPOConfig, GRPOTrainer


def quick_model():
    """Return a tiny model with random weights and a tokenizer of bytes."""
    tokenizer = ByT5Tokenizer(extra_ids=0)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), num_attention_heads=2, pad_token_id=0, **sizes)
    return LlamaForCausalLM(config), tokenizer


def share_of_words(completions: list[str], answer: list[str], **columns: list) -> list[float]:
    """Return the share of the reference answer's words that each completion contains."""
    rewards = []
    for text, reference in zip(completions, answer, strict=True):
        words = set(re.findall(r"\w+", reference.lower()))
        rewards.append(sum(word in text.lower() for word in words) / max(1, len(words)))
    return rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--data", default="prompts.jsonl")
    parser.add_argument("--output", default="runs/grpo")
    parser.add_argument("--quick", action="store_true", help="a tiny model and data of its own")
    options = parser.parse_args()

    if options.quick:
        model, tokenizer = quick_model()
        letters = [{"prompt": f"{a}{b}", "answer": "e"} for a in "abcdefgh" for b in "stuvwxyz"]
        data = Dataset.from_list(letters)
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype="float32")
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        data = load_dataset("json", data_files=options.data, split="train")
    trainer = GRPOTrainer(
        model,
        share_of_words,
        args=GRPOConfig(
            options.output,
            learning_rate=1e-3 if options.quick else 1e-6,
            max_steps=8 if options.quick else -1,
            num_train_epochs=1,
            per_device_train_batch_size=16,
            num_generations=8,
            max_completion_length=16 if options.quick else 256,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=data,
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model(options.output)
    if trainer.is_world_process_zero():
        rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
        third = max(1, len(rewards) // 3)
        first, last = sum(rewards[:third]) / third, sum(rewards[-third:]) / third
        print(f"mean reward {first:.3f} -> {last:.3f}; the model is in {options.output}")


if __name__ == "__main__":
    main()
