"""Tiny random models of transformers' architectures, and batches that they can learn by heart.

Each model comes from its own configuration class, with small values for every size that has one of
the usual names, also in nested configurations. `OPTIONS` has what an architecture needs in
addition. DBRX is left out: its experts add bfloat16 to float32 in place, so that it does not train
under autocast in BF16 either (transformers 5.23).
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

ROWS, LENGTH, VOCABULARY, IMAGE = 4, 16, 128, 32
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 128),
    **dict.fromkeys(("d_ff", "n_inner", "ffn_hidden_size", "shared_intermediate_size"), 128),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "rotary_dim", "rotary_pct_dim"), 16),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length"), 64),
    **{"image_size": IMAGE, "patch_size": 8, "num_mel_bins": 16, "max_source_positions": 16},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 1},
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "attn_pdrop", "embd_pdrop"), 0.0),
    **dict.fromkeys(("resid_pdrop", "dropout", "dropout_rate", "activation_dropout"), 0.0),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    **dict.fromkeys(("classifier_dropout", "embedding_dropout", "layerdrop"), 0.0),
}

_NAMES = {
    "causal": """
        apertus arcee bamba biogpt bitnet bloom codegen cohere cohere2 ctrl deepseek_v2
        deepseek_v3 diffllama ernie4_5 exaone4 falcon falcon_h1 falcon_mamba gemma gemma2
        gemma3_text glm glm4 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss gptj granite
        granitemoe granitemoehybrid helium jamba lfm2 llama llama4_text mamba mamba2
        ministral mistral mixtral mpt nemotron nemotron_h olmo olmo2 olmoe openai-gpt opt
        persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next smollm3
        stablelm starcoder2 xglm zamba2
    """,
    "text to text": """
        bart blenderbot m2m_100 marian mbart mt5 pegasus t5
    """,
    "masked": """
        albert bert camembert deberta-v2 distilbert electra modernbert roberta
    """,
    "images": """
        beit convnext deit dinov2 siglip swin vit
    """,
    "audio": """
        hubert wav2vec2 whisper
    """,
}
KINDS = {name: kind for kind, names in _NAMES.items() for name in names.split()}
"""What each architecture is trained for."""
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
_MLA = {
    **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16},
    **{"v_head_dim": 16, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1},
    "first_k_dense_replace": 1,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "convnext": {"hidden_sizes": [32, 64, 64, 64], "depths": [1, 1, 1, 1], "patch_size": 4},
    "ctrl": {"dff": 128},
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "deit": {"architectures": ["DeiTForImageClassification"]},
    "distilbert": {"hidden_dim": 128},
    "falcon_h1": {**_MAMBA, "mamba_n_heads": 4, "mamba_d_ssm": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"]},
    "hubert": {"mask_time_prob": 0.0, "conv_dim": [32] * 7},
    "jamba": {
        **{"attn_layer_offset": 1, "attn_layer_period": 2, "use_mamba_kernels": False},
        **{"expert_layer_offset": 1, "expert_layer_period": 2},
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 16},
    "mpt": {"attn_config": {"rope": False}},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1},
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"],
        **dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads"), 4),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    },
    "swin": {
        **{"num_heads": [2, 4], "depths": [1, 1], "embed_dim": 32, "window_size": 2},
        **{"patch_size": 4, "hidden_size": 64, "num_layers": 2},
    },
    "t5": {"decoder_start_token_id": 0},
    "wav2vec2": {"mask_time_prob": 0.0, "conv_dim": [32] * 7},
    "zamba2": {
        **{"layers_block_type": ["mamba", "hybrid"], "n_mamba_heads": 8, "mamba_ngroups": 1},
        **{"mamba_d_state": 16, "num_key_value_heads": 4, "use_mamba_kernels": False},
    },
}


def make(name: str) -> nn.Module:
    """Return the architecture `name` of `KINDS` with random weights, in training mode."""
    import transformers

    auto = {
        "causal": transformers.AutoModelForCausalLM,
        "text to text": transformers.AutoModelForSeq2SeqLM,
        "masked": transformers.AutoModelForMaskedLM,
        "images": transformers.AutoModelForImageClassification,
        "audio": transformers.AutoModelForAudioClassification,
    }[KINDS[name]]
    config = _tiny(transformers.CONFIG_MAPPING[name], OPTIONS.get(name, {}))
    model: nn.Module = auto.from_config(config, attn_implementation="eager")
    return model.train()


def _tiny(cls: Any, options: dict[str, Any]) -> Any:
    given = {**_sizes(cls), **options}
    within = getattr(cls, "sub_configs", {})
    for name, sub in within.items():
        if inspect.isclass(sub) and name not in options:
            given[name] = _tiny(sub, {}).to_dict()
    return cls(**given)


def _sizes(cls: Any) -> dict[str, Any]:
    """Return the entries of `SIZES` that the class has, under its own name or a synonym."""
    known = set(inspect.signature(cls.__init__).parameters) | set(cls.attribute_map)
    own = {name: size for name, size in SIZES.items() if name in known}
    # Both a name and what it stands for would be the same attribute twice.
    return {n: s for n, s in own.items() if cls.attribute_map.get(n) not in own}


def batch_for(name: str, model: nn.Module, generator: torch.Generator) -> dict[str, Tensor]:
    """Return the arguments of the model's forward, its labels among them."""
    return _BATCHES[KINDS[name]](model, generator)


def _text(model: nn.Module, generator: torch.Generator) -> dict[str, Tensor]:
    tokens = torch.randint(2, VOCABULARY, (ROWS, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def _hidden_text(model: nn.Module, generator: torch.Generator) -> dict[str, Tensor]:
    tokens = torch.randint(2, VOCABULARY, (ROWS, LENGTH), generator=generator)
    hidden = torch.rand(tokens.shape, generator=generator) < 0.25
    inputs, labels = tokens.masked_fill(hidden, 0), tokens.masked_fill(~hidden, -100)
    return {"input_ids": inputs, "labels": labels, "attention_mask": torch.ones_like(tokens)}


def _images(model: nn.Module, generator: torch.Generator) -> dict[str, Tensor]:
    pixels = torch.randn(ROWS, 3, IMAGE, IMAGE, generator=generator)
    return {"pixel_values": pixels, "labels": torch.arange(ROWS) % 2}


def _sound(model: nn.Module, generator: torch.Generator) -> dict[str, Tensor]:
    if getattr(model, "main_input_name", "") == "input_features":
        features = torch.randn(ROWS, SIZES["num_mel_bins"], 2 * LENGTH, generator=generator)
        return {"input_features": features, "labels": torch.arange(ROWS) % 2}
    waves = torch.randn(ROWS, 100 * LENGTH, generator=generator)
    return {"input_values": waves, "labels": torch.arange(ROWS) % 2}


_BATCHES: dict[str, Callable[[nn.Module, torch.Generator], dict[str, Tensor]]] = {
    "causal": _text,
    "text to text": _text,
    "masked": _hidden_text,
    "images": _images,
    "audio": _sound,
}
