"""Losses of TRL's trainers that read logits: as stock's, and without logits in memory."""

import importlib
import os

import pytest

pytest.importorskip("trl.experimental.orpo")

from tests.accelerate_fp8.test_trl_frozen import lab as lab
from tests.internals import sqnr_db
from tests.models import llama
from tests.torch_fp8.loss_head.logits_cases import Largest, small_chunks
from torch_fp8 import FP8Config

pytestmark = pytest.mark.long
V = 4096
TEXT = [f"{words} " * 8 for words in ("the cat sat", "one dog ran in", "for ever a cat")] * 2
PAIRS = {"prompt": ["the cat"] * 6, "chosen": TEXT, "rejected": TEXT[::-1]}


@pytest.fixture(autouse=True)
def _chunks(monkeypatch):
    small_chunks(monkeypatch)


def _train(lab, kind, loss_head, **options):
    """Return the logs of two steps, the first gradients, the head's state, and a tensor's size."""
    from accelerate.state import AcceleratorState
    from datasets import Dataset
    from transformers import set_seed

    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["TORCH_FP8_CONFIG"] = FP8Config("tensorwise", loss_head=loss_head).to_json()
    home = importlib.import_module(f"trl.experimental.{kind}")
    set_seed(0)
    model = llama(vocab_size=V, num_attention_heads=2, max_position_embeddings=128, pad_token_id=1)
    grads = {}

    def keep(parameter):
        grads.setdefault("lm_head", parameter.grad.float().clone())

    model.lm_head.weight.register_post_accumulate_grad_hook(keep)
    trainer = getattr(home, f"{kind.upper()}Trainer")(
        model=model,
        args=getattr(home, f"{kind.upper()}Config")(
            **lab.options(logging_steps=1, gradient_checkpointing=False, **options)
        ),
        train_dataset=Dataset.from_dict(PAIRS),
        processing_class=lab.tokenizer,
    )
    with Largest() as largest:
        trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return logs, grads, model.lm_head, largest.numel


@pytest.mark.parametrize(
    ("kind", "options"),
    [("orpo", {}), ("cpo", {}), ("cpo", {"loss_type": "simpo", "cpo_alpha": 0.0})],
    ids=["ORPO", "CPO", "SimPO"],
)
def test_log_probabilities_need_no_logits(lab, kind, options, monkeypatch):
    monkeypatch.setenv("TORCH_FP8_CONFIG", "")
    wanted, want_grads, _, most = _train(lab, kind, "off", **options)
    got, grads, head, numel = _train(lab, kind, "bf16", **options)
    assert head.loss_head.fused > 0
    assert head.loss_head.reads == 0
    assert numel < most / 2
    assert sqnr_db(want_grads["lm_head"], grads["lm_head"]) >= 42
    for want, log in zip(wanted, got, strict=True):
        assert want.keys() == log.keys()
        for name in want:
            if "loss" in name or "logps" in name:
                assert log[name] == pytest.approx(want[name], rel=2e-4), name
            elif "logits" in name:
                assert log[name] == pytest.approx(want[name], abs=1e-3), name
