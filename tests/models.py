"""Models that tests of several rooms train; transformers is imported when one is built."""

from typing import Any

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


def llama_config(**sizes: Any) -> Any:
    """Return a small Llama's configuration, with `sizes` in place of the usual ones."""
    from transformers import LlamaConfig

    return LlamaConfig(**SIZES | sizes)


def llama(**sizes: Any) -> Any:
    """Build a `llama_config` with transformers' weights, by the seed of the moment."""
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(llama_config(**sizes))
