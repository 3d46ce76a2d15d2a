"""A script that tunes a model with transformers' Trainer, wholly or by LoRA.

Usage: fp8_checkpoint.py MODEL_FOLDER OUTPUT full|lora.
"""

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, set_seed

folder, output, kind = sys.argv[1:]
set_seed(0)
model = AutoModelForCausalLM.from_pretrained(folder)
if kind == "lora":
    model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
arguments = TrainingArguments(
    output, max_steps=3, per_device_train_batch_size=2, learning_rate=1e-3, report_to="none",
    disable_tqdm=True, save_strategy="no", use_cpu=True,
)  # fmt: skip
rows = [{"input_ids": torch.arange(i, 8 + i), "labels": torch.arange(i, 8 + i)} for i in range(12)]
trainer = Trainer(model, arguments, train_dataset=rows)
trainer.train()
trainer.save_model()
