import gc
import importlib
import math
from typing import Any

import pytest
import torch

from tests.internals import Float8FrozenWeight, Float8Layer, SplitWeight

TEXT = ["the cat sat on a mat", "one dog ran in this park", "a cat ran for ever"] * 2
PAIRS = {"prompt": TEXT, "chosen": TEXT[::-1], "rejected": TEXT}


def lengths(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


class Lab:
    """Makes trainers of TRL on the tiny model, as scripts under the launcher's flag do."""

    def __init__(self, folder, output):
        from transformers import AutoTokenizer

        self.folder, self.output = str(folder), str(output)
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)

    def model(self):
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.folder)

    def lora(self, **options):
        from peft import LoraConfig

        return LoraConfig(r=4, target_modules="all-linear", **options)

    def options(self, **options):
        return {
            "output_dir": self.output,
            "max_steps": 2,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-3,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
            "use_cpu": True,
            **options,
        }

    def make(self, kind, peft, args, **more):
        import trl
        from datasets import Dataset

        if peft:
            more["peft_config"] = self.lora()
        name = kind.upper() if len(kind) < 5 else kind.title()
        home = trl if kind != "gkd" else importlib.import_module("trl.experimental.gkd")
        data: dict[str, Any] = {
            "sft": {"text": TEXT},
            "kto": {**PAIRS, "completion": TEXT[::-1], "label": [True, False] * 3},
            "dpo": PAIRS,
            "reward": PAIRS,
        }.get(kind, {"prompt": TEXT})
        if kind == "kto":
            del data["chosen"], data["rejected"]
        if kind in ("grpo", "rloo"):
            args = {"num_generations": 2, "max_completion_length": 4, "beta": 0.1, **args}
            more["reward_funcs"] = lengths
        if kind == "gkd":
            data = {"messages": [_chat(*both) for both in zip(TEXT, TEXT[::-1], strict=True)]}
            args = {"max_new_tokens": 4, **args}
            more["teacher_model"] = self.model()
        if kind == "distillation":
            more["teacher_model"] = self.model()
            args = {"max_completion_length": 4, **args}
        config = getattr(home, f"{name}Config")(**self.options(**args))
        return getattr(home, f"{name}Trainer")(
            model=more.pop("model", self.folder),
            args=config,
            train_dataset=Dataset.from_dict(data),
            eval_dataset=Dataset.from_dict(data),
            processing_class=self.tokenizer,
            **more,
        )


def _chat(asked, answered):
    user = {"role": "user", "content": asked}
    return [user, {"role": "assistant", "content": answered}]


@pytest.fixture
def lab(tiny_model, tmp_path, accelerate, monkeypatch):
    del accelerate
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    return Lab(tiny_model, tmp_path)


def frozen_in(model):
    return [p for p in model.parameters() if isinstance(p, Float8FrozenWeight)]


def live_bytes():
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor]
    storages = [t.untyped_storage() for t in tensors if t.dtype == torch.float8_e4m3fn]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


LAYERS = 14
"""The linear layers of the tiny model, without the output layer."""


KINDS = ["sft", "dpo", "kto", "grpo", "rloo", "reward", "distillation", "gkd"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("peft", [True, False], ids=["lora", "full"])
def test_it_trains(lab, kind, peft):
    trainer = lab.make(kind, peft, {})
    trainer.train()
    assert all(math.isfinite(row["loss"]) for row in trainer.state.log_history if "loss" in row)
    assert len(frozen_in(trainer.model)) == LAYERS * peft
    split = sum(isinstance(p, SplitWeight) for p in trainer.model.parameters())
    assert split >= (0 if peft else LAYERS + 1)  # the embedding, and an output layer if any
    other = getattr(trainer, "ref_model", None) or getattr(trainer, "teacher_model", None)
    has_other = kind in ("distillation", "gkd") or (
        not peft and kind in ("dpo", "kto", "grpo", "rloo")
    )
    assert (other is not None) == has_other
    if other is not None:
        assert len(frozen_in(other)) == LAYERS
        assert any(isinstance(m, Float8Layer) for m in other.modules())


OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "packing": ("sft", {"packing": True, "max_length": 32}),
    "padding free": ("sft", {"padding_free": True, "max_length": None}),
    "no checkpointing": ("sft", {"gradient_checkpointing": False}),
    "reentrant": ("sft", {"gradient_checkpointing_kwargs": {"use_reentrant": True}}),
    "precomputed": ("dpo", {"precompute_ref_log_probs": True}),
    "dpo without checkpointing": ("dpo", {"gradient_checkpointing": False}),
    "dpo padding free": ("dpo", {"padding_free": True}),
    "grpo several steps": ("grpo", {"num_iterations": 2, "gradient_checkpointing": False}),
    "evaluation": ("sft", {"eval_strategy": "steps", "eval_steps": 1}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", OPTIONS)
def test_it_trains_with(lab, name):
    kind, args = OPTIONS[name]
    trainer = lab.make(kind, True, args)
    trainer.train()
    assert all(math.isfinite(row["loss"]) for row in trainer.state.log_history if "loss" in row)
    assert len(frozen_in(trainer.model)) == LAYERS


@pytest.mark.gpu
@pytest.mark.parametrize(
    "args", [{"use_liger_kernel": True}, {"activation_offloading": True}], ids=["liger", "offload"]
)
def test_it_trains_on_a_card_with(lab, caplog, args):
    if "use_liger_kernel" in args:
        pytest.importorskip("liger_kernel")
    trainer = lab.make("sft", True, {**args, "use_cpu": False})
    trainer.train()
    assert len(frozen_in(trainer.model)) == LAYERS
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert ("modules of Liger Kernel" in said) == ("use_liger_kernel" in args)


def test_policy_and_reference_are_one_base_with_adapters_on_and_off(lab):
    before = live_bytes()
    trainer = lab.make("dpo", True, {})
    trainer.train()
    base = sum(weight.numel() for weight in frozen_in(trainer.model))
    assert live_bytes() - before == base


def test_a_separate_reference_of_a_lora_policy_shares_its_base(lab, caplog):
    before = live_bytes()
    trainer = lab.make("dpo", True, {}, ref_model=lab.model())
    trainer.train()
    base = sum(weight.numel() for weight in frozen_in(trainer.model))
    assert len(frozen_in(trainer.ref_model)) == LAYERS
    assert live_bytes() - before == base
    line = "14 frozen weights equal others and share one copy with them"
    assert sum(line in record.getMessage() for record in caplog.records) == 1
    one, other = (frozen_in(m)[0] for m in (trainer.model, trainer.ref_model))
    kept = one.dequantize()
    with torch.no_grad():
        other.mul_(2.0)
    assert torch.equal(one.dequantize(), kept)
    trainer.model.merge_adapter()
    assert torch.equal(other.dequantize(), kept * 2)


@pytest.mark.parametrize("load", ["load_in_4bit", "load_in_8bit"])
def test_a_base_and_an_optimizer_of_bitsandbytes_keep_working(lab, caplog, load):
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = BitsAndBytesConfig(**{load: True})
    model = AutoModelForCausalLM.from_pretrained(lab.folder, quantization_config=quantization)
    trainer = lab.make("sft", True, {"optim": "adamw_bnb_8bit"}, model=model)
    before = [p.detach().clone() for p in trainer.model.parameters() if not p.is_floating_point()]
    trainer.train()
    after = [p for p in trainer.model.parameters() if not p.is_floating_point()]
    assert len(before) == LAYERS
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    summary = "\n".join(record.getMessage() for record in caplog.records)
    assert "quantized 14 layers by bitsandbytes" in summary
    assert "optimizer AdamW of bitsandbytes keeps its own states" in summary
