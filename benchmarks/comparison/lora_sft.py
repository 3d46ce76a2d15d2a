"""LoRA fine-tuning with TRL and PEFT: adapters on a base that nobody trains.

    python benchmarks/comparison/lora_sft.py  # BF16 and FP8 side by side; nothing to prepare
    accelerate launch --mixed_precision fp8 benchmarks/comparison/lora_sft.py \
        --model meta-llama/Llama-3.2-1B-Instruct --data chats.jsonl

Needs `pip install peft trl`. Precision is the launcher's flag and nothing here depends on it. The
base is loaded in BF16 and serves as the reference, too: the KL divergence is that from the model
with its adapters switched off.
"""

import side_by_side

MEASURES = {
    "loss": "training loss (nats per answer token)",
    "eval_loss": "held-out loss",
    "accuracy": "accuracy of held-out tokens",
    "eval_kl": "KL to the base (nats per token)",
}


def parse_arguments():
    rates = (2e-3, 2e-4)
    parser = side_by_side.argument_parser("lora_sft", __doc__.splitlines()[0], rates)
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    return side_by_side.parse(parser)


def compare() -> None:
    side_by_side.compare(__file__, MEASURES, parse_arguments(), needs=("trl", "peft"))


if __name__ == "__main__":
    side_by_side.begin(compare)

from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from alignment import prepare
from alignment_record import HeldOut, train_recorded, trainer_options


def train(arguments) -> dict:
    """Train adapters, save them to <output>/model and return the run's result."""
    start = prepare(arguments, answers=False)
    rows = [
        {"prompt": row["prompt"], "completion": [{"role": "assistant", "content": row["answer"]}]}
        for row in start.train
    ]
    trainer = SFTTrainer(
        start.model,
        SFTConfig(
            **trainer_options(arguments),
            model_init_kwargs={"dtype": "bfloat16"},
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=start.tokenizer,
        peft_config=LoraConfig(
            r=arguments.rank, lora_alpha=2 * arguments.rank, target_modules="all-linear"
        ),
    )
    held_out = HeldOut(start.eval, start.tokenizer)

    def base(**batch):
        with trainer.model.disable_adapter():
            return trainer.model(**batch)

    return train_recorded(
        trainer,
        arguments,
        lambda: {"base and adapters": trainer.model},
        {"loss": "loss"},
        lambda: held_out(trainer.model, base),
    )


if __name__ == "__main__":
    side_by_side.run(parse_arguments, train)
