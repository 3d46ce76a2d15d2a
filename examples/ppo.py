"""PPO on Accelerate: trained policy and value models, frozen reward and reference models.

    accelerate launch --mixed_precision fp8 examples/ppo.py \
        --model Qwen/Qwen3-0.6B --reward-model my/reward --data prompts.txt
    accelerate launch --mixed_precision fp8 examples/ppo.py --quick  # tiny models, any machine

Each line of the data is a prompt. Only the launcher's flag asks for FP8. The frozen models are
stored in FP8, one byte per parameter. Needs `pip install accelerate transformers`.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from tqdm import tqdm
from transformers import AutoModelForCausalLM as Causal
from transformers import AutoModelForSequenceClassification as Scorer
from transformers import AutoModelForTokenClassification as Valuer
from transformers import AutoTokenizer, ByT5Tokenizer, LlamaConfig

KL, CLIP, EPOCHS = 0.05, 0.2, 2


def make_models(options: argparse.Namespace) -> tuple:
    """Return policy, value, reward and reference, and the tokenizer."""
    if options.quick:
        tokenizer = ByT5Tokenizer(extra_ids=0, padding_side="left")
        sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2}
        sizes |= {"num_attention_heads": 2, "vocab_size": len(tokenizer)}
        config = LlamaConfig(num_labels=1, pad_token_id=0, **sizes)
        models = [kind.from_config(config) for kind in (Causal, Valuer, Scorer, Causal)]
        models[3].load_state_dict(models[0].state_dict())
        return *models, tokenizer
    judge = {"pretrained_model_name_or_path": options.reward_model, "num_labels": 1}
    return (
        Causal.from_pretrained(options.model, dtype=torch.float32),
        Valuer.from_pretrained(**judge, dtype=torch.float32),
        Scorer.from_pretrained(**judge, dtype=torch.bfloat16),
        Causal.from_pretrained(options.model, dtype=torch.bfloat16),
        AutoTokenizer.from_pretrained(options.model, padding_side="left"),
    )


def logprobs(model: torch.nn.Module, ids: torch.Tensor, seen: torch.Tensor, new: int):
    """Return the log-probabilities of the last `new` tokens, (rows, new)."""
    logits = model(input_ids=ids, attention_mask=seen).logits[:, -new - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, ids[:, -new:, None])[..., 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--reward-model", help="a sequence classifier of one label")
    parser.add_argument("--data", default="prompts.txt")
    parser.add_argument("--output", default="runs/ppo")
    parser.add_argument("--quick", action="store_true", help="tiny models and data of its own")
    options = parser.parse_args()
    if not (options.quick or options.reward_model):
        parser.error("--reward-model is needed, or --quick")

    accelerator = Accelerator()
    set_seed(0)
    policy, value, reward, reference, tokenizer = make_models(options)
    prompts = [f"{a}{b}" for a in "abcdefgh" for b in "stuvwxyz"]
    if not options.quick:
        prompts = Path(options.data).read_text().splitlines()
    steps, new, rate = (6, 16, 1e-3) if options.quick else (len(prompts) // 16, 128, 1e-6)
    trained = [*policy.parameters(), *value.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=rate)
    loader = torch.utils.data.DataLoader(prompts, 16, shuffle=True, drop_last=True)
    # Evaluation mode switches dropout off, so that sampled and trained probabilities are the same.
    policy, value, optimizer, loader = accelerator.prepare(
        policy.eval(), value.eval(), optimizer, loader
    )
    reward = accelerator.prepare_model(reward.eval(), evaluation_mode=True)
    reference = accelerator.prepare_model(reference.eval(), evaluation_mode=True)

    batches = (batch for _ in range(steps) for batch in loader)
    scores = []
    for _ in tqdm(range(steps), disable=not accelerator.is_main_process):
        batch = next(batches)
        asked = tokenizer(batch, return_tensors="pt", padding=True).to(accelerator.device)
        asked = {name: asked[name] for name in ("input_ids", "attention_mask")}
        with torch.no_grad():
            ids = accelerator.unwrap_model(policy).generate(
                **asked, max_new_tokens=new, min_new_tokens=new, do_sample=True, top_k=0
            )
            seen = torch.nn.functional.pad(asked["attention_mask"], (0, new), value=1)
            old = logprobs(policy, ids, seen, new)
            penalty = KL * (old - logprobs(reference, ids, seen, new))
            score = reward(input_ids=ids, attention_mask=seen).logits[:, 0].float()
            gains = torch.cat([-penalty[:, :-1], (score - penalty[:, -1])[:, None]], dim=1)
            returns = gains.flip(-1).cumsum(-1).flip(-1)
            expected = value(input_ids=ids, attention_mask=seen).logits[:, -new - 1 : -1, 0]
            advantages = returns - expected.float()
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
        for _ in range(EPOCHS):
            ratio = (logprobs(policy, ids, seen, new) - old).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            gain = torch.minimum(ratio * advantages, clipped * advantages).mean()
            guess = value(input_ids=ids, attention_mask=seen).logits[:, -new - 1 : -1, 0]
            accelerator.backward(0.1 * (guess.float() - returns).square().mean() - gain)
            accelerator.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        scores.append(accelerator.gather(score).mean().item())

    accelerator.unwrap_model(policy).save_pretrained(
        options.output,
        state_dict=accelerator.get_state_dict(policy),
        is_main_process=accelerator.is_main_process,
    )
    change = f"{scores[0]:.3f} -> {scores[-1]:.3f}"
    accelerator.print(f"score {change}; the model is in {options.output}")


if __name__ == "__main__":
    main()
