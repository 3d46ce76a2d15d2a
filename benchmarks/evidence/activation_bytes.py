"""Count the bytes per token that one Llama block saves for backward.

    python -m benchmarks.evidence.activation_bytes    # runs/benchmarks/activation_bytes.csv

Hugging Face's decoder layer with BF16 weights and torch's attention, on 256 tokens: eager BF16, and
converted with each recipe. The bytes are those of the distinct storages that saved-tensor hooks see
in one forward, without parameters and without the rotary angles, which all layers share. `share` is
relative to eager BF16. COAT publishes 0.59 for Llama-2-7B (arXiv 2410.19313, table 3).

The last row runs the default recipe inside ``torch.utils.checkpoint``. `gemms_again` is the number
of the forward's GEMMs that backward runs again.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from benchmarks.measurement import environment, print_table
from benchmarks.rows import add_csv, write_rows
from tests.saved_activations import count_saved
from torch_fp8 import Float8Linear, FP8Config, convert_to_float8

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
CHECKPOINTED = "checkpointed"
COLUMNS = (
    *("layout", "variant", "bytes_per_token", "share", "gemms_again"),
    *("torch", "commit", "command"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_csv(parser, "activation_bytes")
    path = parser.parse_args().csv
    about = {k: v for k, v in environment(torch.device("cpu")).items() if k in COLUMNS}
    rows = []
    for layout, sizes in LAYOUTS.items():
        counted = {"BF16 eager": (kept(sizes, None), 0)}
        for variant, options in VARIANTS.items():
            counted[variant] = kept(sizes, FP8Config(**options)), 0
        counted[CHECKPOINTED] = kept_checkpointed(sizes)
        for variant, (total, gemms) in counted.items():
            row = {"layout": layout, "variant": variant, "bytes_per_token": round(total, 1)}
            share = round(total / counted["BF16 eager"][0], 4)
            rows.append({**row, "share": share, "gemms_again": gemms, **about})
        write_rows(path, COLUMNS, rows)
    print_table(COLUMNS[:5], rows)


def kept(sizes: dict[str, int], config: FP8Config | None) -> float:
    """Return bytes per token that a layer of these sizes saves; None leaves it stock."""
    _, there, run, x = forward_of(sizes, config)
    with count_saved(there) as saved:
        run(x)
    return saved.total / TOKENS


def kept_checkpointed(sizes: dict[str, int]) -> tuple[float, int]:
    """Return the bytes per token of a checkpointed layer, and how many GEMMs run again."""
    layer, there, run, x = forward_of(sizes, FP8Config())
    with count_saved(there) as saved:
        y = checkpoint(run, x, use_reentrant=False)
    with Gemms() as gemms:
        y.backward(torch.ones_like(y))
    linears = sum(isinstance(m, Float8Linear) for m in layer.modules())
    return saved.total / TOKENS, gemms.count - 2 * linears


def forward_of(
    sizes: dict[str, int], config: FP8Config | None, tokens: int = TOKENS
) -> tuple[LlamaDecoderLayer, list[Tensor], Callable[[Tensor], Tensor], Tensor]:
    """Return a layer, tensors that exist anyway, the layer as a function, and its argument."""
    of_model = LlamaConfig(num_hidden_layers=1, **sizes)
    of_model._attn_implementation = "sdpa"
    layer, rotary = LlamaDecoderLayer(of_model, 0).bfloat16(), LlamaRotaryEmbedding(of_model)
    if config is not None:
        convert_to_float8(layer, config)
    x = torch.randn(1, tokens, of_model.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    angles = rotary(x, torch.arange(tokens)[None])
    run = functools.partial(layer, position_embeddings=angles)
    return layer, [*layer.parameters(), *angles], run, x


class Gemms(TorchDispatchMode):
    """Counts FP8 GEMMs."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += "scaled_mm" in func._schema.name
        return func(*args, **(kwargs or {}))


if __name__ == "__main__":
    main()
