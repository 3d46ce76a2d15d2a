"""Tiny mixtures of experts of transformers, by the layout of their expert weights."""

from typing import Any

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}
_DEEPSEEK = {
    "head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_MAMBA = {
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 1,
    "chunk_size": 16,
    "expand": 1,
    "hybrid_override_pattern": "ME*E",
    "num_hidden_layers": 4,
    "n_group": 1,
    "topk_group": 1,
    "moe_shared_expert_intermediate_size": 48,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
}
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "GptOss": {"num_local_experts": 4, "layer_types": ["full_attention", "full_attention"]},
    "Qwen3Next": {
        **_LINEAR,
        "num_experts": 4,
        "shared_expert_intermediate_size": 48,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "DeepseekV3": _DEEPSEEK,
    "Olmoe": {"num_experts": 4},
    "NemotronH": _MAMBA,
    "Llama4Text": {
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size": 48,
        "intermediate_size_mlp": 128,
        "interleave_moe_layer_step": 1,
    },
}
"""Class names without their endings, and the options of their own configurations."""


def moe_model(name: str, **sizes: Any) -> Any:
    """Build one with transformers' weights, by the seed of the moment."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**_SIZES | MODELS[name] | sizes)
    cls = "Llama4ForCausalLM" if name == "Llama4Text" else f"{name}ForCausalLM"
    return getattr(transformers, cls)(config)
