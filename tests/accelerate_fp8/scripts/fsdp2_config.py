"""FSDP2 as a configuration file of ``accelerate launch`` asks for it, in unmodified code.

Usage: fsdp2_config.py MODEL_FOLDER KIND..., of loop, trainer, dpo, lora and experts (LoRA on those
of a model that has some). Each rank has half of the data.
"""

import os
import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from as_on_gpu import output
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainingArguments,
)
from trl import DPOConfig, DPOTrainer

import torch_fp8
from tests.comm_counter import count_communication
from torch_fp8.tensor.dtensor import local
from torch_fp8.tensor.frozen_weight import Float8FrozenWeight

folder, *kinds = sys.argv[1:]
text = ["the cat sat on a mat", "one dog ran in this park", "a cat ran for ever"] * 4


def whole(model):
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]


def loop():
    accelerator = Accelerator()
    model, optimizer = prepared(accelerator)
    with count_communication() as counted:
        losses = train(accelerator, model, optimizer, range(3))
    # A gather of the block in forward and one in backward; one exchange of its gradients.
    assert counted.of("all-gather", torch.uint8).calls == 3 * 2 * 2, counted
    assert counted.of("all-to-all", torch.uint8).calls == 3 * 2, counted
    accelerator.save_state(str(output / "state"))
    losses += train(accelerator, model, optimizer, range(3, 5))
    expected = whole(model)
    accelerator.load_state(str(output / "state"))
    assert train(accelerator, model, optimizer, range(3, 5)) == losses[3:]
    assert all(map(torch.equal, whole(model), expected))
    assert losses[-1] < losses[0], losses
    with torch.no_grad():  # which leaves the weights of the root gathered
        model.eval()(input_ids=torch.arange(4, 16)[None])
    state = accelerator.get_state_dict(model)
    accelerator.save_model(model, str(output / "model"))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        saved = load_file(output / "model" / "model.safetensors")
        assert saved.keys() <= state.keys()
        for (name, tensor), value in zip(model.named_parameters(), expected, strict=True):
            assert type(state[name]) is torch.Tensor
            assert tensor.dtype == saved[name].dtype == torch.float32
            assert torch.equal(saved[name], value.cpu())
        whole_ones = [t for t in saved.values() if not torch.equal(t, t.bfloat16().float())]
        assert len(whole_ones) > len(saved) / 2
    return f"{losses[0]:.4f} {losses[-1]:.4f}"


def prepared(accelerator):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def train(accelerator, model, optimizer, steps):
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(2 * (step % 2) + dist.get_rank())
        tokens = torch.randint(4, 64, (2, 12), generator=generator)
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


common = {
    "output_dir": str(output),
    "per_device_train_batch_size": 2,
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
}


def trainer():
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoded = [dict(row, labels=row["input_ids"]) for row in map(tokenizer, text)]

    def fit(steps, checkpoint=None, **more):
        made = Trainer(
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            TrainingArguments(**common, max_steps=steps, **{"learning_rate": 1e-2, **more}),
            train_dataset=encoded,
            eval_dataset=encoded,
            data_collator=DataCollatorForSeq2Seq(tokenizer),
        )
        made.train(resume_from_checkpoint=checkpoint)
        return made

    full = fit(4, save_strategy="steps", save_steps=2, lr_scheduler_type="constant")
    going_on = {"save_strategy": "no", "lr_scheduler_type": "constant"}
    resumed = fit(4, str(output / "checkpoint-2"), **going_on)
    assert all(map(torch.equal, whole(full.model), whole(resumed.model)))
    assert {p.dtype for p in resumed.model.parameters()} == {torch.float32}
    each_step = dict.fromkeys(("eval_strategy", "save_strategy"), "steps")
    each_step |= dict.fromkeys(("eval_steps", "save_steps"), 1)
    best = fit(2, **each_step, load_best_model_at_end=True, learning_rate=0.3)
    evaluated = [entry["eval_loss"] for entry in best.state.log_history if "eval_loss" in entry]
    assert min(evaluated) < evaluated[-1], evaluated
    assert best.evaluate()["eval_loss"] == min(evaluated)
    return f"{resumed.evaluate()['eval_loss']:.4f}"


def dpo():
    pairs = Dataset.from_dict({"prompt": text, "chosen": text[::-1], "rejected": text})
    made = DPOTrainer(
        folder,
        args=DPOConfig(**common, max_steps=2, save_strategy="no"),
        train_dataset=pairs,
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    reference = made.ref_model
    assert isinstance(next(reference.parameters()), DTensor)
    layers = [m for m in reference.modules() if isinstance(m, torch_fp8.Float8Linear)]
    assert len(layers) == 14, len(layers)
    before = whole(reference)
    made.train()
    with count_communication() as counted, torch.no_grad():
        reference(input_ids=torch.randint(4, 64, (1, 8)))
    assert counted.of("all-gather", torch.uint8).calls == 1, counted  # TRL shards it as one
    frozen = [p for p in reference.parameters() if isinstance(local(p), Float8FrozenWeight)]
    assert len(frozen) == 14, len(frozen)  # no optimizer trains it
    for now, then in zip(whole(reference), before, strict=True):
        assert (now.float() - then).norm() < 0.04 * then.norm()
    return "reference"


def lora(count=14, ndim=2, **targets):
    accelerator = Accelerator()
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(folder)
    targets = targets or {"target_modules": "all-linear"}
    model = get_peft_model(base, LoraConfig(r=4 * ndim - 4, **targets))
    trained = [p for p in model.parameters() if p.requires_grad]
    made = torch.optim.AdamW(trained, lr=1e-2)
    model, optimizer = accelerator.prepare(model, made)

    def frozen():
        shards = [local(p) for p in model.parameters() if p.ndim == ndim]
        return [shard for shard in shards if isinstance(shard, Float8FrozenWeight)]

    def step():
        ids = torch.arange(64).view(2, 32) % 60 + 4
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    assert len(frozen()) == count
    assert ndim == 2 or all(shard.shape[0] == 2 for shard in frozen())  # two experts of four
    kept = [shard.qdata.view(torch.uint8).clone() for shard in frozen()]
    losses = [step() for _ in range(3)]
    assert losses[-1] < losses[0], losses
    accelerator.save_state(str(output / "lora"))
    following = step()
    accelerator.load_state(str(output / "lora"))
    assert step() == following
    assert len(frozen()) == count
    for shard, then in zip(frozen(), kept, strict=True):
        assert torch.equal(shard.qdata.view(torch.uint8), then)
    state = accelerator.get_state_dict(model)
    assert all(type(value) is torch.Tensor for value in state.values())
    return f"{losses[-1]:.3f}"


def experts():
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return lora(4, 3, target_modules=["q_proj"], target_parameters=targets)


for kind in kinds:
    ways = {"loop": loop, "trainer": trainer, "dpo": dpo, "lora": lora, "experts": experts}
    said = ways[kind]()
    print(f"rank {dist.get_rank()}: {kind} {said}\n", end="", flush=True)
    dist.barrier()
# Without it gloo may end a process at exit: "terminate called without an active exception". The
# threads and collectives that are left are those of BF16: gloo's three, and no Work.
os._exit(0)
