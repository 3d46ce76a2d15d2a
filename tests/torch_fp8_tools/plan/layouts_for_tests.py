"""Five small layouts, and a step of training that fills everything that a plan predicts."""

import contextlib

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.internals import LEVELS, make_setup, plan_setup
from tests.models import SIZES
from torch_fp8 import convert_optimizer, convert_to_float8

_SIZES = SIZES | {"vocab_size": 96, "intermediate_size": 144, "pad_token_id": 0}
_SIZES |= {"max_position_embeddings": 64}
del _SIZES["num_key_value_heads"]
LAYOUTS = {
    "llama": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 24, "tie_word_embeddings": False},
    "gpt_neox": {"use_parallel_residual": False, "tie_word_embeddings": False},
    "phi3": {"num_key_value_heads": 4, "tie_word_embeddings": False},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 16},
}


WIDE = "wide llama"
"""A sixth, for which the padding of messages is small."""


def levels_of(way, ranks):
    """Return the levels at which a layout is trained in a way, all of them on two ranks."""
    fewer = {"replicas": ("bf16-mixed", "O2"), "halves": ("bf16-mixed", "O2", "O3")}
    return LEVELS if ranks == 2 else fewer.get(way, LEVELS)


_TURNS = ["sliding_attention", "sliding_attention", "full_attention"] * 3
MIXED = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 64, "mlp_only_layers": [0, 1, 2]},
    "gemma3_text": {"num_key_value_heads": 2, "head_dim": 16},
    "gpt_oss": {"num_local_experts": 4, "num_key_value_heads": 2, "head_dim": 16},
    "bamba": {"attn_layer_indices": [2, 5, 8], "num_key_value_heads": 2, "mamba_n_heads": 8},
}
"""Layouts whose layers are of two kinds."""


def config_of(layout, layers=2):
    if layout in MIXED:
        sizes = {**_SIZES, "num_hidden_layers": layers, **MIXED[layout]}
        turns = {"layer_types": _TURNS[:layers]} if layout in ("gemma3_text", "gpt_oss") else {}
        return AutoConfig.for_model(layout, **{**sizes, **turns})
    if layout == WIDE:
        sizes = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 2}
        return AutoConfig.for_model("llama", **{**_SIZES, **sizes})
    sizes = {**_SIZES, "num_hidden_layers": layers}
    return AutoConfig.for_model(layout, **sizes, **LAYOUTS[layout])


def adam(model, config):
    optimizer = torch.optim.AdamW(model.parameters())
    if config is not None and config.opt_level != "O1":
        convert_optimizer(optimizer, config, model=model)
    return model, optimizer


def trained(layout, config, prepare=adam, watched=contextlib.nullcontext):
    """Return model and optimizer after a step, with the gradients of another one.

    Args:
        prepare: takes the converted model and `config`, returns what runs, and an optimizer.
        watched: makes the context that the other step's forward and backward run in.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(layout), dtype=torch.float32).train()
    if config is not None:
        convert_to_float8(model, config)
    model, optimizer = prepare(model, config)
    tokens = torch.randint(96, (1, 32))
    for last in (False, True):
        optimizer.zero_grad()
        with watched() if last else contextlib.nullcontext():
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
        if not last:
            optimizer.step()
    return model, optimizer


def plan_beside(counted, model, levels=LEVELS, **options):
    """Plan a run with steps that are counted already; the plan adds its own."""
    return plan_setup(make_setup(model, **options), levels, counted)
