"""transformers' Trainer on every rank; what rank zero has saved. Usage: saved_model.py MODEL OUT.

Each rank prints the sum of its weights, residuals joined, beside that of what is on disk.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, set_seed

folder, output = sys.argv[1:]
set_seed(0)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
arguments = TrainingArguments(
    output, max_steps=3, per_device_train_batch_size=2, learning_rate=1e-3, report_to="none",
    disable_tqdm=True, save_strategy="no", use_cpu=True,
)  # fmt: skip
rows = [{"input_ids": torch.arange(i, 8 + i), "labels": torch.arange(i, 8 + i)} for i in range(12)]
trainer = Trainer(model, arguments, train_dataset=rows)
trainer.train()
trainer.save_model()
trainer.accelerator.wait_for_everyone()

rank = trainer.accelerator.process_index
whole = trainer.accelerator.get_state_dict(trainer.model_wrapped)
saved = load_file(Path(output) / "model.safetensors")
dtypes = sorted({str(tensor.dtype) for tensor in saved.values()})
named = json.loads((Path(output) / "config.json").read_text())["dtype"]
equal = all(torch.equal(tensor, whole[name]) for name, tensor in saved.items())
rounded = sum(torch.equal(tensor.bfloat16().float(), tensor) for tensor in saved.values())
trained = {type(p).__name__ for p in model.parameters() if p.ndim == 2}
print(
    f"rank {rank}: {type(trainer.model_wrapped).__name__} trained {sorted(trained)} "
    f"saved {dtypes} as {named} equal {equal} rounded {rounded}"
)
