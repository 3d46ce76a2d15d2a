"""Causal language modelling in the manner of transformers' examples.

Usage: run_clm.py --model_name_or_path FOLDER --train_file TEXT --output_dir FOLDER, and every other
option of TrainingArguments; or one JSON file with all of them.
"""

import sys
from dataclasses import dataclass, field
from itertools import chain

import datasets
from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class ModelArguments:
    model_name_or_path: str = field(metadata={"help": "Folder of the model."})


@dataclass
class DataTrainingArguments:
    train_file: str = field(metadata={"help": "Text, a sequence per line."})
    block_size: int = field(default=32, metadata={"help": "Tokens per sequence."})


def main():
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    if sys.argv[-1].endswith(".json"):
        model_args, data_args, training_args = parser.parse_json_file(json_file=sys.argv[-1])
    else:
        model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    datasets.utils.logging.set_verbosity_error()
    set_seed(training_args.seed)

    raw = load_dataset("text", data_files={"train": data_args.train_file})
    config = AutoConfig.from_pretrained(model_args.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, config=config)

    def group(rows):
        joined = list(chain(*tokenizer(rows["text"])["input_ids"]))
        size = data_args.block_size
        blocks = [joined[i : i + size] for i in range(0, len(joined) - size + 1, size)]
        return {"input_ids": blocks, "labels": [list(block) for block in blocks]}

    with training_args.main_process_first(desc="grouping texts"):
        data = raw["train"].map(group, batched=True, remove_columns=["text"])

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=data if training_args.do_train else None,
        eval_dataset=data if training_args.do_eval else None,
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    if training_args.do_train:
        result = trainer.train()
        trainer.save_model()
        trainer.log_metrics("train", result.metrics)
    if training_args.do_eval:
        trainer.log_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()
