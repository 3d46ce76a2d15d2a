"""DPO and SFT of TRL with LoRA, and a reference of its own; usage: lora_dpo.py MODEL_FOLDER."""

import gc
import sys
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

folder = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(folder)
text = ["the cat sat on a mat", "one dog ran in this park", "a cat ran for ever"] * 4
common = {
    "output_dir": tempfile.mkdtemp(),
    "max_steps": 2,
    "per_device_train_batch_size": 2,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
}
lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


def live_bytes():
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor]
    storages = [t.untyped_storage() for t in tensors if t.dtype == torch.float8_e4m3fn]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def dpo():
    pairs = Dataset.from_dict({"prompt": text, "chosen": text[::-1], "rejected": text})
    return DPOTrainer(
        folder,
        ref_model=AutoModelForCausalLM.from_pretrained(folder),
        args=DPOConfig(**common),
        train_dataset=pairs,
        processing_class=tokenizer,
        peft_config=lora,
    )


def sft():
    return SFTTrainer(
        folder,
        SFTConfig(**common),
        train_dataset=Dataset.from_dict({"text": text}),
        processing_class=tokenizer,
        peft_config=lora,
    )


for make in (dpo, sft):
    trainer = make()
    trainer.train()
    sums = [float(p.double().sum()) for p in trainer.model.parameters() if p.requires_grad]
    # In one write, which another rank's cannot part.
    print(f"{make.__name__} live {live_bytes()} adapters {sum(sums):.17g}\n", end="")
    del trainer
