"""The layer shapes of the benchmarks, and smaller ones for a CPU."""

import math

# (in_features K, out_features N) of the linears of a Llama-3.1-8B block.
LLAMA_3_1_8B_BLOCK = {
    "q_proj": (4096, 4096),
    "k_proj": (4096, 1024),
    "v_proj": (4096, 1024),
    "o_proj": (4096, 4096),
    "gate_proj": (4096, 14336),
    "up_proj": (4096, 14336),
    "down_proj": (14336, 4096),
}
TOKENS = (8192, 32768, 4096, 1024, 16384, 2048)
"""The rows M, the most telling first: a benchmark that runs out of time leaves out the last
ones.
"""

# Keyword arguments of transformers.LlamaConfig.
LLAMA_3_2_1B = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
LLAMA_3_2_3B = LLAMA_3_2_1B | {
    "hidden_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "head_dim": 128,
}
LLAMA_3_1_8B = LLAMA_3_2_1B | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
LAYOUTS = {
    "Llama-3.2-3B": LLAMA_3_2_3B,
    "Llama-3.2-1B": LLAMA_3_2_1B,
    "Llama-3.1-8B": LLAMA_3_1_8B,
}
"""The layouts of models, from their configurations on the Hugging Face hub; the most telling
first.
"""
SEQUENCE = 4096

# TinyLlama-1.1B, its embedding and head tied: 200 tensors with 1.03e9 elements.
TINY_LLAMA_1_1B = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
}

# Blocks of experts: module of transformers, hidden size, expert width, experts, experts of a token.
MOE_BLOCKS = {
    "Qwen3-30B-A3B": ("qwen3_moe", 2048, 768, 128, 8),
    "GPT-OSS-20B": ("gpt_oss", 2880, 2880, 32, 4),
    "Mixtral-8x7B": ("mixtral", 4096, 14336, 8, 2),
    "DeepSeek-V3, 32 of its experts": ("deepseek_v3", 7168, 2048, 32, 8),
}
"""The most telling first. DeepSeek-V3 has the experts of one rank of eight and its top 8, as if all
ranks had sent tokens.
"""
MOE_TOKENS = (8192, 2048, 32768)
TOY_MOE_BLOCKS = {
    "Qwen3-30B-A3B": ("qwen3_moe", 64, 24, 8, 4),
    "GPT-OSS-20B": ("gpt_oss", 48, 48, 4, 2),
}
TOY_MOE_TOKENS = (96,)

TOY_BLOCK = {
    "q_proj": (64, 64),
    "k_proj": (64, 16),
    "v_proj": (64, 16),
    "o_proj": (64, 64),
    "gate_proj": (64, 176),
    "up_proj": (64, 176),
    "down_proj": (176, 64),
}
TOY_TOKENS = (48,)
TOY_LLAMA = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
TOY_SEQUENCE = 64


def parameter_count(**layout: int) -> int:
    """Return the number of parameters of a Llama, a tied head counted once."""
    own_head = 0 if layout["tie_word_embeddings"] else layout["vocab_size"] * layout["hidden_size"]
    return own_head + sum(math.prod(shape) for shape in parameter_shapes(**layout))


def parameter_shapes(**layout: int) -> list[tuple[int, ...]]:
    """Return shapes of the parameters of a Llama without its own head, by LlamaConfig's
    arguments.
    """
    hidden, inner = layout["hidden_size"], layout["intermediate_size"]
    queries = layout["num_attention_heads"] * layout["head_dim"]
    keys = layout["num_key_value_heads"] * layout["head_dim"]
    layer = [
        (queries, hidden),
        (keys, hidden),
        (keys, hidden),
        (hidden, queries),
        (inner, hidden),
        (inner, hidden),
        (hidden, inner),
        (hidden,),
        (hidden,),
    ]
    return [(layout["vocab_size"], hidden), *layer * layout["num_hidden_layers"], (hidden,)]
