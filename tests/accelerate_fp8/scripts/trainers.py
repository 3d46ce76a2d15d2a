"""transformers' and TRL's trainers, as their documentation shows them, one after the other.

Usage: trainers.py MODEL_FOLDER [TRAINER ...]. After each trainer a line says how many scaled
matmuls it ran, and another what it trained; the meter is the tests' sitecustomize.
"""

import sys
import tempfile
from collections import Counter

import sitecustomize
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainingArguments,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

folder, *chosen = sys.argv[1:]
output = tempfile.mkdtemp()
tokenizer = AutoTokenizer.from_pretrained(folder)
text = ["the cat sat on a mat", "one dog ran in this park", "a cat ran for ever"] * 2
common = {
    "output_dir": output,
    "max_steps": 2,
    "per_device_train_batch_size": 2,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
}
pairs = Dataset.from_dict({"prompt": text, "chosen": text[::-1], "rejected": text})


def reward(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def trainer():
    encoded = [dict(row, labels=row["input_ids"]) for row in map(tokenizer, text)]
    return Trainer(
        AutoModelForCausalLM.from_pretrained(folder),
        TrainingArguments(**common),
        train_dataset=encoded,
        eval_dataset=encoded,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
    )


def sft(peft_config=None):
    dataset = Dataset.from_dict({"text": text})
    return SFTTrainer(
        folder, SFTConfig(**common), train_dataset=dataset, eval_dataset=dataset,
        processing_class=tokenizer, peft_config=peft_config,
    )  # fmt: skip


def lora():
    return sft(LoraConfig(r=64, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def dpo():
    return DPOTrainer(folder, args=DPOConfig(**common), train_dataset=pairs, eval_dataset=pairs,
                      processing_class=tokenizer)  # fmt: skip


def grpo():
    args = GRPOConfig(num_generations=2, max_completion_length=8, beta=0.1, **common)
    dataset = Dataset.from_dict({"prompt": text})
    return GRPOTrainer(folder, reward, args=args, train_dataset=dataset, eval_dataset=dataset,
                       processing_class=tokenizer)  # fmt: skip


def reward_model():
    return RewardTrainer(folder, RewardConfig(**common), train_dataset=pairs, eval_dataset=pairs,
                         processing_class=tokenizer)  # fmt: skip


for make in (trainer, sft, lora, dpo, grpo, reward_model):
    if chosen and make.__name__ not in chosen:
        continue
    start = sitecustomize._counts["scaled_mm"]
    built = make()
    built.train()
    trained = sitecustomize._counts["scaled_mm"]
    built.evaluate()
    evaluated = sitecustomize._counts["scaled_mm"]
    built.save_model(tempfile.mkdtemp())
    print(f"{make.__name__}: trained {trained - start} evaluated {evaluated - trained}")
    optimizer = getattr(built.optimizer, "optimizer", built.optimizer)
    kinds = Counter(
        f"{'trained' if p.requires_grad else 'frozen'} {type(p).__name__}"
        for p in built.model.parameters()
        if p.ndim == 2
    )
    print(f"{make.__name__} optimizer {type(optimizer).__name__} {dict(kinds)}")
