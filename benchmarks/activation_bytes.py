"""Bytes per token that one Llama block keeps from forward to backward, counted.

    python -m benchmarks.activation_bytes    # writes benchmarks/results/activation_bytes.csv

Hugging Face's decoder layer with BF16 weights and torch's attention, on 256 tokens: eager BF16, and
converted with each recipe. Counted are the distinct storages that saved-tensor hooks see in one
forward, without parameters and without the rotary angles, which all layers share. `share` is that
of eager BF16. COAT publishes 0.59 for Llama-2-7B (arXiv 2410.19313, table 3).
"""

import argparse

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from benchmarks.measurement import RESULTS, environment, print_table, write_rows
from benchmarks.saved_activations import count_saved
from torch_fp8 import FP8Config, convert_to_float8

TOKENS = 256
LAYOUTS = {
    "Llama-2-7B": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
    "Llama-3.1-8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}
VARIANTS = {
    "tensorwise (default)": {},
    "delayed": {"recipe": "delayed"},
    "rowwise": {"recipe": "rowwise"},
    "blockwise": {"recipe": "blockwise"},
    "mxfp8": {"recipe": "mxfp8"},
    "wgrad bf16": {"wgrad": "bf16"},
    "save_activations bf16": {"save_activations": "bf16"},
}
COLUMNS = ("layout", "variant", "bytes_per_token", "share", "torch", "commit", "command")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args()
    about = {k: v for k, v in environment(torch.device("cpu")).items() if k in COLUMNS}
    rows = []
    for layout, sizes in LAYOUTS.items():
        counted = {"BF16 eager": kept(sizes, None)}
        for variant, options in VARIANTS.items():
            counted[variant] = kept(sizes, FP8Config(**options))
        for variant, total in counted.items():
            row = {"layout": layout, "variant": variant, "bytes_per_token": round(total, 1)}
            rows.append({**row, "share": round(total / counted["BF16 eager"], 4), **about})
        write_rows(RESULTS / "activation_bytes.csv", COLUMNS, rows)
    print_table(COLUMNS[:4], rows)


def kept(sizes: dict[str, int], config: FP8Config | None) -> float:
    """Bytes per token of a layer of these sizes; None: not converted."""
    of_model = LlamaConfig(num_hidden_layers=1, **sizes)
    of_model._attn_implementation = "sdpa"
    layer, rotary = LlamaDecoderLayer(of_model, 0).bfloat16(), LlamaRotaryEmbedding(of_model)
    if config is not None:
        convert_to_float8(layer, config)
    x = torch.randn(1, TOKENS, of_model.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    angles = rotary(x, torch.arange(TOKENS)[None])
    with count_saved([*layer.parameters(), *angles]) as saved:
        layer(x, position_embeddings=angles)
    return saved.total / TOKENS


if __name__ == "__main__":
    main()
