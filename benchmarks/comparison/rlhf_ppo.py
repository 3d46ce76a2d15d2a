"""RLHF with PPO on Accelerate: policy, value, reward and reference model, as AlpacaFarm did it.

    python benchmarks/comparison/rlhf_ppo.py  # BF16 and FP8 side by side; nothing to prepare
    accelerate launch --mixed_precision fp8 benchmarks/comparison/rlhf_ppo.py \
        --model my/instructed --reward-model my/reward --data chats.jsonl

Precision is the launcher's flag and nothing here depends on it. Four models of one size are held at
once: policy and value are trained from float32 weights, reward and reference are loaded in BF16 and
only asked. As in AlpacaFarm (arXiv 2305.14387) the value model starts from the reward model, a KL
penalty goes to every token, the score to the last one, an answer without an end scores -1, and
neither discount nor lambda are below 1.
"""

import side_by_side

MEASURES = {
    "reward": "score of sampled answers",
    "kl": "KL to the reference (nats per token)",
    "eval_loss": "held-out loss (nats per answer token)",
}
SPREAD = (
    "BF16's own seeds end at score 0.02 ± 0.43, KL 0.47 ± 0.15 and loss 5.37 ± 0.16\n"
    "(mean and standard deviation of 39 seeds, 16 quick steps of the script's own model):\n"
    "sampling sets equal runs apart."
)


def parse_arguments():
    rates = (5e-4, 1e-6)
    parser = side_by_side.argument_parser("rlhf_ppo", __doc__.splitlines()[0], rates)
    add = parser.add_argument
    add("--reward-model", help="a sequence classifier of one label; none: made once from --model")
    add("--kl", type=float, default=0.05, help="weight of the KL penalty")
    add("--clip", type=float, default=0.2, help="of the ratio of probabilities, and of values")
    add("--value-weight", type=float, default=0.1, help="of the value model's loss")
    add("--epochs", type=int, default=2, help="passes over the answers of a step")
    add("--minibatches", type=int, default=2, help="optimizer steps of a pass")
    return side_by_side.parse(parser)


def compare() -> None:
    side_by_side.compare(__file__, MEASURES, parse_arguments(), note=SPREAD)


if __name__ == "__main__":
    side_by_side.begin(compare)

from dataclasses import dataclass, fields
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from alignment import made_once, prepare, teach_preferences
from alignment_record import COUNTED_STEPS, HeldOut, Record

UNFINISHED = -1.0
"""The score of an answer that was cut off."""


@dataclass
class Rollout:
    """Sampled answers; N of them, of at most T tokens, behind prompts.

    Attributes:
        ids, seen: (N, prompt + T) tokens, and whether they are none of the padding.
        mask: (N, T) whether a token belongs to the answer; its end token does.
        logprobs, values: (N, T) of policy and value model when the answers were sampled.
        returns, advantages: (N, T) float32.
    """

    ids: Tensor
    seen: Tensor
    mask: Tensor
    logprobs: Tensor
    values: Tensor
    returns: Tensor
    advantages: Tensor

    def minibatches(self, count: int):
        """Yield the answers in random order, in `count` parts."""
        for rows in torch.randperm(len(self.ids)).to(self.ids.device).chunk(count):
            yield Rollout(*(getattr(self, field.name)[rows] for field in fields(self)))


@dataclass
class Models:
    """The four models of PPO, prepared."""

    policy: nn.Module
    value: nn.Module
    reward: nn.Module
    reference: nn.Module

    def logprobs(self, model: nn.Module, ids: Tensor, seen: Tensor, length: int) -> Tensor:
        """Return the log-probabilities of the last `length` tokens: (N, length) float32."""
        logits = model(**inputs(ids, seen), use_cache=False).logits[:, -length - 1 : -1].float()
        chosen = logits.gather(-1, ids[:, -length:, None])[..., 0]
        return chosen - logits.logsumexp(-1)

    def values(self, ids: Tensor, seen: Tensor, length: int) -> Tensor:
        """Return what the value model expects before each of the last tokens: (N, length)."""
        return self.value(**inputs(ids, seen)).logits[:, -length - 1 : -1, 0].float()


def inputs(ids: Tensor, seen: Tensor) -> dict[str, Tensor]:
    """Return a model's inputs; positions begin where a row does, behind its padding."""
    positions = (seen.long().cumsum(-1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": seen.long(), "position_ids": positions}


@torch.no_grad()
def roll_out(
    accelerator: Accelerator, models: Models, batch: dict, tokenizer, arguments
) -> tuple[Rollout, dict[str, float]]:
    """Sample an answer to each prompt, score it and say how much better it was than expected.

    Returns:
        the answers, and their mean reward, KL divergence (as TRL estimates it) and length.
    """
    ids = accelerator.unwrap_model(models.policy).generate(
        **batch,
        max_new_tokens=arguments.max_answer,
        do_sample=True,
        top_k=0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    length = ids.shape[1] - batch["input_ids"].shape[1]
    ends = ids[:, -length:] == tokenizer.eos_token_id
    mask = ends.long().cumsum(-1) - ends.long() == 0  # up to the first end token
    seen = torch.cat([batch["attention_mask"].bool(), mask], dim=1)
    ids = ids.masked_fill(~seen, tokenizer.pad_token_id)

    logprobs = models.logprobs(models.policy, ids, seen, length)
    difference = logprobs - models.logprobs(models.reference, ids, seen, length)
    values = models.values(ids, seen, length)
    scores = models.reward(**inputs(ids, seen)).logits[:, 0].float()
    scores = scores.where(ends.any(-1), torch.full_like(scores, UNFINISHED))

    rewards = -arguments.kl * difference * mask
    rewards[torch.arange(len(ids)), mask.sum(-1) - 1] += scores
    returns = rewards.flip(-1).cumsum(-1).flip(-1)
    advantages = whitened(returns - values, mask)
    shown = {
        "reward": float(scores.mean()),
        "kl": float(masked_mean((-difference).exp() - 1 + difference, mask)),
        "length": float(mask.sum(-1).float().mean()),
    }
    return Rollout(ids, seen, mask, logprobs, values, returns, advantages), shown


def loss_of(models: Models, part: Rollout, arguments) -> Tensor:
    """Return PPO's loss: clipped ratios for the policy, clipped squares for the value model."""
    length = part.mask.shape[1]
    logprobs = models.logprobs(models.policy, part.ids, part.seen, length)
    ratio = (logprobs - part.logprobs).exp()
    clipped = ratio.clamp(1 - arguments.clip, 1 + arguments.clip)
    policy_loss = -torch.minimum(ratio * part.advantages, clipped * part.advantages)
    values = models.values(part.ids, part.seen, length)
    near = part.values + (values - part.values).clamp(-arguments.clip, arguments.clip)
    squares = torch.maximum((values - part.returns) ** 2, (near - part.returns) ** 2)
    return masked_mean(policy_loss + arguments.value_weight * squares / 2, part.mask)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).sum() / mask.sum()


def whitened(x: Tensor, mask: Tensor) -> Tensor:
    """Return x with mean 0 and variance 1 over the mask."""
    centred = x - masked_mean(x, mask)
    return centred * torch.rsqrt(masked_mean(centred**2, mask) + 1e-8) * mask


def train(arguments) -> dict:
    """Train policy and value, save the policy to <output>/model and return the run's result."""
    start = prepare(arguments)
    start.tokenizer.padding_side = "left"  # answers begin where prompts end
    steps = arguments.steps or (25 if arguments.quick else 30)
    accelerator = Accelerator()
    set_seed(arguments.seed)
    # Weights that are trained in float32: what "mixed" precision means. The others in BF16.
    judge = arguments.reward_model or own_reward_model(start, arguments)
    policy = AutoModelForCausalLM.from_pretrained(start.model, dtype=torch.float32)
    value = AutoModelForTokenClassification.from_pretrained(
        judge, num_labels=1, dtype=torch.float32
    )
    reward = AutoModelForSequenceClassification.from_pretrained(
        judge, num_labels=1, dtype=torch.bfloat16
    )
    reference = AutoModelForCausalLM.from_pretrained(start.model, dtype=torch.bfloat16)
    trained = [*policy.parameters(), *value.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=arguments.learning_rate, weight_decay=0.0)
    loader = torch.utils.data.DataLoader(
        [row["prompt"] for row in start.train],
        arguments.batch_size,
        shuffle=True,
        drop_last=True,
        collate_fn=lambda prompts: start.tokenizer.apply_chat_template(
            prompts,
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
            tokenizer_kwargs={"return_token_type_ids": False},
        ),
    )
    reward = accelerator.prepare_model(reward.eval(), evaluation_mode=True)
    reference = accelerator.prepare_model(reference.eval(), evaluation_mode=True)
    policy, value, optimizer, loader = accelerator.prepare(
        policy.eval(), value.eval(), optimizer, loader
    )
    models = Models(policy, value, reward, reference)

    record = Record(arguments.output, accelerator.is_main_process)
    held_out = HeldOut(start.eval, start.tokenizer)
    record.add(0, **held_out(policy, reference))
    bar = tqdm(total=steps, mininterval=1.0, disable=not accelerator.is_local_main_process)
    step = 0

    def count(point: str) -> None:
        if step <= COUNTED_STEPS:
            record.count_memory(point, vars(models), optimizer)

    while step < steps:
        for batch in loader:
            step += 1
            rollout, shown = roll_out(accelerator, models, batch, start.tokenizer, arguments)
            count("after sampling")
            for _ in range(arguments.epochs):
                for part in rollout.minibatches(arguments.minibatches):
                    loss = loss_of(models, part, arguments)
                    accelerator.backward(loss)
                    count("before the step")
                    accelerator.clip_grad_norm_(trained, 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    count("after the step")
            record.add(step, loss=float(loss.detach()), **shown)
            bar.update()
            bar.set_postfix({name: f"{value:.3f}" for name, value in shown.items()})
            if step % max(1, steps // 6) == 0 or step == steps:
                record.add(step, **held_out(policy, reference))
            if step == steps:
                break
    bar.close()
    accelerator.unwrap_model(policy).save_pretrained(
        arguments.output / "model", state_dict=accelerator.get_state_dict(policy)
    )
    return record.finish(arguments, accelerator)


def own_reward_model(start, arguments) -> Path:
    """Return a reward model that was trained, once, from the model to start from."""
    steps = arguments.start_steps or (60 if arguments.quick else 120)
    data = arguments.data.stem if arguments.data else "docstrings"
    folder = Path(start.model).parent if arguments.model is None else arguments.assets
    return made_once(
        folder / f"reward-{Path(start.model).name}-{data}-{steps}",
        lambda made: teach_preferences(start, start.train, steps, made),
    )


if __name__ == "__main__":
    side_by_side.run(parse_arguments, train)
