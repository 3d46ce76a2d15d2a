"""Models of transformers that compute their own loss: as stock, without logits in memory."""

import copy
import pickle
import types

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)
from trl.trainer.utils import add_fused_lm_head

from tests.internals import LazyLogits, OutputLayer, sqnr_db
from tests.torch_fp8.loss_head.logits_cases import Largest, V, batch, is_fused, small_chunks
from torch_fp8 import Float8Linear, FP8Config, convert_optimizer, convert_to_float8, revert

TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": V,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": {},
    "qwen3": {},
    "gemma2": {"final_logit_softcapping": 30.0},
    "granite": {"logits_scaling": 8.0},
    "cohere": {"logit_scale": 0.0625},
    "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 2},
    "mixtral": {"num_local_experts": 2, "output_router_logits": True},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "gpt_neox": {},
    "phi": {},
    "bloom": {},
}


@pytest.fixture(autouse=True)
def _chunks(monkeypatch):
    small_chunks(monkeypatch)


def _model(family="llama", auto=AutoModelForCausalLM, **options):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**TINY, **FAMILIES.get(family, {}), **options})
    return auto.from_config(config).train()


def _pair(model, level="O1", **options):
    models = []
    for loss_head in ("off", "bf16"):
        models.append(copy.deepcopy(model))
        config = FP8Config("tensorwise", opt_level=level, loss_head=loss_head, **options)
        convert_to_float8(models[-1], config)
    return models


def _step(model, labels=None, **inputs):
    tokens, default = batch()
    model.zero_grad()
    torch.manual_seed(1)
    with Largest() as largest:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(tokens, labels=default if labels is None else labels, **inputs)
        output.loss.backward()
    return output, largest.numel


def _assert_alike(stock, fused, rtol=1e-5, **inputs):
    want, _ = _step(stock, **inputs)
    output, numel = _step(fused, **inputs)
    assert is_fused(numel)
    assert isinstance(output.logits, LazyLogits)
    torch.testing.assert_close(output.loss, want.loss, rtol=rtol, atol=0)
    for name, parameter in stock.named_parameters():
        grad = fused.get_parameter(name).grad
        assert (grad is None) == (parameter.grad is None), name
        if grad is not None and parameter.grad.any() and not name.endswith("k_proj.bias"):  # is 0
            # Layers behind the head cast to FP8 a gradient that is rounded differently.
            db = sqnr_db(parameter.grad.float(), grad.float())
            assert db >= (45 if name.startswith("lm_head") else 18), (name, db)
    torch.testing.assert_close(output.logits.float(), want.logits.float())


@pytest.mark.parametrize("family", FAMILIES)
def test_causal_models(family):
    rounded = family == "gemma2"  # stock rounds to BF16 at three more places
    _assert_alike(*_pair(_model(family)), rtol=1e-4 if rounded else 1e-5)


@pytest.mark.parametrize(
    "inputs",
    [
        {"num_items_in_batch": torch.tensor(61)},
        {"num_items_in_batch": 61},
        {"shift_labels": batch()[1]},
        {"position_ids": torch.arange(24).remainder(8).expand(4, -1)},
        {"logits_to_keep": 0},
        {"output_hidden_states": True},
    ],
    ids=lambda inputs: next(iter(inputs)),
)
def test_what_trainers_pass(inputs):
    _assert_alike(*_pair(_model()), **inputs)


def test_a_packed_batch_without_padding():
    tokens, labels = (t.reshape(1, -1) for t in batch())
    starts = torch.arange(96).remainder(24)[None]
    stock, fused = _pair(_model())
    losses = []
    for model in (stock, fused):
        with Largest() as largest, torch.autocast("cpu", torch.bfloat16):
            losses.append(model(tokens, labels=labels, position_ids=starts).loss)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
    assert is_fused(largest.numel)


def test_masked_language_models():
    model = _model("bert", AutoModelForMaskedLM, type_vocab_size=2)
    stock, fused = _pair(model)
    assert isinstance(fused.get_output_embeddings(), OutputLayer)
    want, _ = _step(stock)
    output, numel = _step(fused)
    torch.testing.assert_close(output.loss, want.loss, rtol=1e-5, atol=0)
    assert is_fused(numel)


def test_sequence_to_sequence_models():
    options = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_heads": 2, "num_layers": 1}
    model = _model("t5", AutoModelForSeq2SeqLM, decoder_start_token_id=0, **options)
    stock, fused = _pair(model)
    want, _ = _step(stock)
    output, numel = _step(fused)
    torch.testing.assert_close(output.loss, want.loss, rtol=1e-5, atol=0)
    assert is_fused(numel)


def test_a_classifier_and_small_vocabularies_stay_as_they_are():
    for model in (_model("llama", AutoModelForSequenceClassification), _model(vocab_size=4095)):
        report = convert_to_float8(model, FP8Config("tensorwise"))
        assert not report.loss_heads
        assert not any(isinstance(m, OutputLayer) for m in model.modules())


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_few_steps_at_each_level(level, tied):
    losses = []
    for model in _pair(_model(tie_word_embeddings=tied), level):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if level != "O1":
            config = FP8Config("tensorwise", opt_level=level)
            convert_optimizer(optimizer, config, model=model)
        own = []
        for seed in range(4):
            tokens, labels = batch(seed)
            with Largest() as largest, torch.autocast("cpu", torch.bfloat16):
                loss = model(tokens, labels=labels).loss
            (loss / 2).backward()
            if seed % 2:  # accumulation
                optimizer.step()
                optimizer.zero_grad()
            own.append(loss.detach())
        losses.append(torch.stack(own))
    assert is_fused(largest.numel)
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-4, atol=0)


def test_gradient_release_writes_the_weight_in_backward():
    losses = []
    for model in _pair(_model(), "O2", gradient_release=True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        config = FP8Config("tensorwise", opt_level="O2", gradient_release=True)
        convert_optimizer(optimizer, config, model=model)
        own = []
        for seed in range(3):
            tokens, labels = batch(seed)
            with Largest() as largest, torch.autocast("cpu", torch.bfloat16):
                loss = model(tokens, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            own.append(loss.detach())
        losses.append(torch.stack(own))
    assert is_fused(largest.numel)
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-4, atol=0)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_lora_with_a_frozen_head_computes_no_gradient_of_it(level):
    model = get_peft_model(_model(), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    stock, fused = _pair(model, level)
    want, _ = _step(stock)
    output, numel = _step(fused)
    torch.testing.assert_close(output.loss, want.loss, rtol=1e-5, atol=0)
    assert is_fused(numel)
    assert all(p.grad is None for n, p in fused.named_parameters() if "lora" not in n)
    assert sum(p.grad is not None for p in fused.parameters()) == 4
    for name, parameter in stock.named_parameters():
        if parameter.grad is not None and parameter.grad.any():
            assert sqnr_db(parameter.grad, fused.get_parameter(name).grad) >= 18


def test_lora_on_the_head_and_a_trained_copy_of_it_compute_as_stock():
    for options in ({"target_modules": ["lm_head"]}, {"modules_to_save": ["lm_head"]}):
        options = {"target_modules": ["q_proj"], **options}
        model = get_peft_model(_model(), LoraConfig(r=4, **options))
        stock, fused = _pair(model)
        want, _ = _step(stock)
        output, _ = _step(fused)
        torch.testing.assert_close(output.loss, want.loss, rtol=1e-5, atol=0)
        for name, parameter in stock.named_parameters():
            grad = fused.get_parameter(name).grad
            assert (grad is None) == (parameter.grad is None), name


def test_gradient_checkpointing():
    stock, fused = _pair(_model())
    for model in (stock, fused):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    _assert_alike(stock, fused)


def test_evaluation_and_generation_are_those_of_stock():
    stock, fused = _pair(_model())
    tokens, labels = batch()
    for model in (stock, fused):
        _step(model)
        model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        want, got = (model(tokens, labels=labels) for model in (stock, fused))
        torch.testing.assert_close(got.loss, want.loss, rtol=0, atol=0)
        torch.testing.assert_close(got.logits, want.logits, rtol=0, atol=0)
        texts = [
            m.generate(tokens[:, :4], max_new_tokens=4, do_sample=False) for m in (stock, fused)
        ]
    assert torch.equal(*texts)


def test_a_loss_of_distillation_reads_the_logits_with_their_gradient():
    stock, fused = _pair(_model())
    tokens, labels = batch()
    grads = []
    for model in (stock, fused):
        with torch.autocast("cpu", torch.bfloat16):
            output = model(tokens, labels=labels)
            target = torch.zeros(V, dtype=torch.float32).softmax(0)
            distilled = F.kl_div(output.logits.log_softmax(-1), target, reduction="sum") / 96
        (output.loss + distilled).backward()
        grads.append(model.lm_head.weight.grad)
    assert sqnr_db(*grads) >= 42


def test_options_and_the_summary():
    def heads(model=None, **options):
        model = _model() if model is None else model
        return dict(convert_to_float8(model, FP8Config("tensorwise", **options)).loss_heads)

    assert heads() == heads(skip=("lm_head", "q_proj")) == {"lm_head": "bf16"}
    assert heads(loss_head="off") == {}
    assert heads(skip=("lm_head*",)) == {}
    assert heads(overrides={"lm_head": {"recipe": "bf16"}}) == {}
    model = _model()
    report = convert_to_float8(model, FP8Config("tensorwise"))
    assert "loss head lm_head: cross entropy in chunks, products in BF16" in str(report)
    assert heads(model, loss_head="off") == {}  # a second conversion takes it back
    assert type(model.lm_head) is torch.nn.Linear
    convert_to_float8(model, FP8Config("tensorwise"))
    assert isinstance(model.lm_head, OutputLayer)
    assert type(model.lm_head).__name__ == "Linear"
    revert(model)
    assert type(model.lm_head) is torch.nn.Linear
    assert "loss_head" not in vars(model.lm_head)
    for options in ({"loss_head": "fp8"}, {"skip": ()}, {"loss_head": "fp8", "skip": ()}):
        model = _model()
        report = convert_to_float8(model, FP8Config("tensorwise", **options))
        assert report.loss_heads == {"lm_head": "fp8"}
        assert "loss head lm_head: cross entropy in chunks, products in FP8" in str(report)
        assert isinstance(model.lm_head, Float8Linear)
        revert(model)
        assert type(model.lm_head) is torch.nn.Linear
    assert heads(loss_head="fp8", skip=("lm_head*",)) == {}
    with pytest.raises(ValueError, match="loss_head"):
        FP8Config(loss_head="fp16")


@pytest.mark.parametrize("frozen", [False, True])
def test_a_loss_of_liger_kernel_stays_its_own(frozen):
    def forward(self, *args, **kwargs):
        return type(self).forward(self, *args, **kwargs)

    forward.__module__ = "liger_kernel.transformers.model.llama"
    model = _model()
    model.forward = types.MethodType(forward, model)
    model.lm_head.weight.requires_grad_(not frozen)
    for options in ({}, {"loss_head": "fp8"}, {"skip": ()}):
        report = convert_to_float8(model, FP8Config("tensorwise", **options))
        assert report.loss_heads == {"lm_head": "liger"}
        assert "loss head lm_head: Liger Kernel's own loss, in chunks and in high" in str(report)
        assert type(model.lm_head) is torch.nn.Linear


@pytest.mark.parametrize("adapted", [False, True], ids=["trained", "LoRA"])
def test_a_loss_of_trl_stays_its_own(adapted):
    model = _model()
    add_fused_lm_head(model)
    inner = model
    if adapted:  # a frozen layer, whose weight TRL multiplies by in BF16
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
    for loss_head in ("auto", "auto", "fp8"):
        report = convert_to_float8(model, FP8Config("tensorwise", loss_head=loss_head))
        assert set(report.loss_heads.values()) == {"trl"}
        assert "lm_head: TRL's own loss, in chunks and in high precision (four" in str(report)
        assert f"loss_head={loss_head!r} does not apply to it" in str(report)
        assert any(name.endswith("lm_head") for name, _ in report.skipped)
        assert type(inner.lm_head) is torch.nn.Linear
        assert type(inner.lm_head.weight) is torch.nn.Parameter
    tokens, labels = batch()
    with torch.autocast("cpu", torch.bfloat16):
        output = model(tokens, labels=labels, fused_lm_head=True)
        output.loss.backward()
    assert output.log_probs.shape == (4, 23)


def test_copies_and_pickles_of_a_model_keep_the_head():
    model = _pair(_model())[1]
    _step(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert is_fused(_step(other)[1])
