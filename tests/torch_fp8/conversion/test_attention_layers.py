"""Which attention modules save q, k and v in FP8, and what the summary says of them."""

import gc

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BertConfig, BertModel, LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from torch_fp8 import FP8Config, conversion_report, convert_to_float8, revert
from torch_fp8.conversion.attention_layers import is_marked

QKV = FP8Config(opt_level="O1", save_attention="qkv")
SIZES = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 64},
    **{"num_attention_heads": 4, "max_position_embeddings": 64},
}


def _llama(implementation="sdpa"):
    torch.manual_seed(0)
    config = LlamaConfig(num_key_value_heads=2, **SIZES)
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation)


def _lines(report):
    lines = str(report).splitlines()
    return [line.strip() for line in lines if "attention" in line.split(":")[0]]


class _Own(nn.Module):
    """Attention that calls torch itself, in a model of one's own."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)


class CausalSelfAttention(_Own):
    pass


def test_each_attention_module_is_counted_and_named():
    model = _llama()
    report = convert_to_float8(model, QKV)
    names = tuple(f"model.layers.{i}.self_attn" for i in range(2))
    assert report.attention == names
    assert [n for n, m in model.named_modules() if is_marked(m)] == list(names)
    assert _lines(report) == [
        "attention 2 modules with q, k and v saved in FP8, except within torch.compile"
    ]
    assert convert_to_float8(model, QKV).attention == names  # a second call changes nothing
    assert convert_to_float8(model, FP8Config(opt_level="O1")).attention == ()
    assert not any(map(is_marked, model.modules()))


def test_skip_leaves_attention_as_it_is():
    model = _llama()
    config = FP8Config(opt_level="O1", save_attention="qkv", skip=("layers.1.self_attn", "lm_head"))
    report = convert_to_float8(model, config)
    assert report.attention == ("model.layers.0.self_attn",)
    (left,) = report.other_attention
    assert left == ("model.layers.1.self_attn", "skip='layers.1.self_attn'")
    revert(model)


def test_unknown_attention_is_named():
    model = nn.Sequential(CausalSelfAttention(), nn.MultiheadAttention(64, 4), nn.Linear(64, 64))
    report = convert_to_float8(model, QKV)
    assert [name for name, _ in report.other_attention] == ["0"]
    (line,) = _lines(report)
    assert line.startswith("attention 0: not an attention function from transformers' registry")


def test_a_model_without_attention_has_a_warning():
    report = convert_to_float8(nn.Sequential(nn.Linear(64, 64)), QKV)
    assert "save_attention='qkv' changes nothing: no attention was found" in str(report)


def test_attention_of_another_implementation_is_named():
    model = _llama()
    model.config._attn_implementation = "paged|eager"
    report = convert_to_float8(model, QKV)
    assert not report.attention
    assert "attn_implementation='paged|eager' computes it" in str(report)


def test_modules_around_attention_are_not_named():
    """Bert's attention is a module with the one that computes it, and with its output layer."""
    model = BertModel(BertConfig(**SIZES))
    report = convert_to_float8(model, QKV)
    assert report.attention == tuple(f"encoder.layer.{i}.attention.self" for i in range(2))
    assert not report.other_attention
    revert(model)


def test_a_report_without_conversion_marks_nothing():
    model = _llama()
    assert len(conversion_report(model, QKV).attention) == 2
    assert not any(map(is_marked, model.modules()))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_models_train_and_generate(implementation):
    """A padded batch, with a mask by transformers; generation is that of a stock model."""
    tokens = torch.randint(2, 64, (2, 24), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[0, :7] = 0
    model = _llama(implementation)
    losses = []
    for save_attention in ("bf16", "qkv"):
        config = FP8Config(opt_level="O1", save_attention=save_attention)
        convert_to_float8(model, config)
        model.train()
        loss = model(tokens, attention_mask=mask, labels=tokens).loss
        loss.backward()
        losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            losses.append(model(tokens, attention_mask=mask, labels=tokens).loss.item())
    assert losses[1] == losses[3]
    assert losses[0] != losses[2]
    assert losses[0] == pytest.approx(losses[2], rel=2e-3)
    revert(model)


def test_a_token_does_not_see_later_ones():
    """A function under a name without a mask of its own would see the whole sequence."""
    model = _llama("eager").train()
    convert_to_float8(model, QKV)
    tokens = torch.randint(2, 64, (1, 24), generator=torch.Generator().manual_seed(1))
    other = tokens.clone()
    other[:, 12:] = (tokens[:, 12:] + 7) % 64
    with torch.enable_grad():
        first, second = (model(t).logits[:, :12] for t in (tokens, other))
    torch.testing.assert_close(first, second, rtol=0.05, atol=0.05)
    revert(model)


def test_two_models_share_the_entries():
    first, second, stock = _llama(), _llama(), _llama().train()
    tokens = torch.randint(2, 64, (1, 24), generator=torch.Generator().manual_seed(1))
    want = stock(tokens).logits
    gc.collect()  # models of other tests, whose entries go with the next one that is reverted
    convert_to_float8(first, QKV)
    revert(first)
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    for model in (first, second):
        convert_to_float8(model, QKV)
    assert torch.equal(stock(tokens).logits, want)
    revert(first)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not before
    assert torch.equal(first.train()(tokens).logits, want)
    revert(second)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is before


def test_attention_rests_while_its_layers_are_paused():
    from torch_fp8.nn.linear import Float8Layer, pause

    model = _llama().train()
    tokens = torch.randint(2, 64, (1, 24), generator=torch.Generator().manual_seed(1))
    want = model(tokens).logits
    convert_to_float8(model, QKV)
    for layer in model.modules():
        if isinstance(layer, Float8Layer):
            pause(layer)
    assert torch.allclose(model(tokens).logits, want, atol=1e-6)
    revert(model)
