"""Loss heads under TRL: its function for log-probabilities calls ours, with the same results."""

import pytest
import torch
from trl.trainer.utils import add_fused_lm_head

import accelerate_fp8  # noqa: F401
import accelerate_fp8.log_probs as ours
from tests.torch_fp8.loss_head.logits_cases import V, batch
from tests.torch_fp8.loss_head.test_head_models import _model
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8
from torch_fp8.nn.output_layer import OutputLayer, precision_of
from torch_fp8.quantization.metrics import sqnr_db


@pytest.fixture
def calls(monkeypatch):
    """The precision of each call of our function."""
    seen = []
    compute = ours.linear_log_probs

    def counted(*args, **options):
        seen.append(options["precision"])
        return compute(*args, **options)

    monkeypatch.setattr(ours, "linear_log_probs", counted)
    return seen


def _outputs(loss_head, outputs=("log_probs", "entropy"), level="O1", family="llama"):
    model = _model(family)
    config = FP8Config("tensorwise", opt_level=level, loss_head=loss_head)
    convert_to_float8(model, config)
    if level != "O1":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        convert_optimizer(optimizer, config, model=model)
    add_fused_lm_head(model, temperature=0.7, outputs=outputs)
    tokens, labels = batch()
    with torch.autocast("cpu", torch.bfloat16):
        result = model(tokens, labels=labels, fused_lm_head=True)
    (result.log_probs.sum() + 0.1 * result.entropy.sum()).backward()
    return result, model.lm_head.weight.grad.to_dense().float()


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_log_probabilities_and_entropies_are_trls(calls, level, family):
    want, want_grad = _outputs("off", level=level, family=family)
    assert not calls
    got, grad = _outputs("bf16", level=level, family=family)
    assert calls == ["bf16"]
    torch.testing.assert_close(got.log_probs, want.log_probs, rtol=0, atol=0.02)
    torch.testing.assert_close(got.loss, want.loss, rtol=2e-4, atol=0)
    torch.testing.assert_close(got.entropy, want.entropy, rtol=0, atol=0.02)
    # Gemma's weight is also the embedding's, whose gradient comes through FP8 layers.
    assert sqnr_db(want_grad, grad) >= (24 if family == "gemma2" else 38)


@pytest.mark.parametrize(("family", "computes"), [("granite", True), ("gemma2", False)])
def test_mean_logits_are_trls(calls, family, computes):
    outputs = ("log_probs", "entropy", "mean_logits")
    want, _ = _outputs("off", outputs, family=family)
    got, _ = _outputs("bf16", outputs, family=family)
    assert calls == ["bf16"] * computes  # with a softcap, TRL's own
    torch.testing.assert_close(got.mean_logits, want.mean_logits, rtol=0, atol=1e-4)
    assert not got.mean_logits.requires_grad


def test_an_fp8_head_runs_in_fp8(calls):
    want, want_grad = _outputs("bf16")
    got, grad = _outputs("fp8")
    assert calls == ["bf16", "fp8"]
    torch.testing.assert_close(got.loss, want.loss, rtol=2e-2, atol=0)
    assert sqnr_db(want_grad, grad) >= 15


def test_further_outputs_are_trls_own(calls):
    got, _ = _outputs("bf16", outputs=("log_probs", "entropy", "is_top1"))
    assert not calls
    assert got.is_top1.dtype == torch.bool


def test_the_weight_of_another_layer_is_left_to_trl():
    model = _model()
    assert precision_of(model.lm_head.weight) is None
    convert_to_float8(model, FP8Config("tensorwise"))
    assert isinstance(model.lm_head, OutputLayer)
    assert precision_of(model.lm_head.weight) == "bf16"
    assert precision_of(torch.zeros(V, 32, dtype=torch.float32)) is None
