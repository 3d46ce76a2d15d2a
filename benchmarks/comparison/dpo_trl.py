"""Direct preference optimization with TRL: a policy and a reference that nobody trains.

    python benchmarks/comparison/dpo_trl.py  # BF16 and FP8 side by side; nothing to prepare
    accelerate launch --mixed_precision fp8 benchmarks/comparison/dpo_trl.py \
        --model meta-llama/Llama-3.2-1B-Instruct --data chats.jsonl

Needs `pip install trl`. Precision is the launcher's flag and nothing here depends on it. The data
has one answer to a prompt; the worse one that DPO needs is made of it (`alignment.preferences`).
"""

import side_by_side

MEASURES = {
    "loss": "DPO loss",
    "eval_loss": "held-out DPO loss",
    "accuracy": "held-out pairs ranked right",
    "eval_kl": "KL to the reference (nats per token)",
}


def parse_arguments():
    rates = (2e-4, 1e-6)
    parser = side_by_side.argument_parser("dpo_trl", __doc__.splitlines()[0], rates)
    parser.add_argument("--beta", type=float, default=0.1)
    return side_by_side.parse(parser)


def compare() -> None:
    side_by_side.compare(__file__, MEASURES, parse_arguments(), needs=("trl",))


if __name__ == "__main__":
    side_by_side.begin(compare)

from datasets import Dataset
from trl import DPOConfig, DPOTrainer

from alignment import preferences, prepare
from alignment_record import HeldOut, train_recorded, trainer_options


def train(arguments) -> dict:
    """Train the policy, save it to <output>/model and return the run's result."""
    start = prepare(arguments)
    trainer = DPOTrainer(
        start.model,
        args=DPOConfig(
            **trainer_options(arguments),
            beta=arguments.beta,
        ),
        train_dataset=Dataset.from_list(preferences(start.train)),
        eval_dataset=Dataset.from_list(preferences(start.eval)),
        processing_class=start.tokenizer,
    )
    held_out = HeldOut(start.eval, start.tokenizer)

    def measure() -> dict[str, float]:
        pairs = trainer.evaluate()
        made = {
            "eval_loss": pairs["eval_loss"],
            "eval_kl": held_out(trainer.model, trainer.ref_model)["eval_kl"],
        }
        if trainer.state.global_step:  # before, policy and reference rank nothing
            made["accuracy"] = pairs["eval_rewards/accuracies"]
        return made

    return train_recorded(
        trainer,
        arguments,
        lambda: {"policy": trainer.model, "reference": trainer.ref_model},
        {"loss": "loss", "rewards/margins": "margin"},
        measure,
    )


if __name__ == "__main__":
    side_by_side.run(parse_arguments, train)
