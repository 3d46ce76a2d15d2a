"""A Trainer of transformers on the CPU that prints nothing."""

import torch


def rows_of(count=16):
    """Rows of 12 random tokens."""
    tokens = torch.randint(4, 32, (count, 12), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


def trainer_of(folder, model, rows, evaluated=None, load=(), **options):
    """Return the Trainer of the model in a folder; `load` are options of from_pretrained."""
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    options = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, **options}
    loaded = AutoModelForCausalLM.from_pretrained(model, **dict(load))
    arguments = TrainingArguments(str(folder), **options)
    return Trainer(loaded, arguments, train_dataset=rows, eval_dataset=evaluated)
