"""Launches, assertions and bytes of a compiled Llama block, from the code that Inductor generates.

    python -m benchmarks.evidence.compiled_block    # runs/benchmarks/compiled_block.csv

Hugging Face's decoder layer with the sizes of Llama-3.1-8B at 8,192 tokens, and of Llama-3.2-1B at
16,384, forward and backward, weights and activations in BF16, attention by cuDNN. Nothing runs: the
code is generated for a mocked H200 (`evidence.generated_code`), and its lines are counted.

* ``opaque``: calls of operators that Inductor cannot look into, through torch's dispatcher to our
  Python;
* ``launches``: kernels of Inductor's, and calls of operators;
* ``assertions``: checks of sizes, strides and alignment that run in each step;
* ``gb``: 1e9 bytes read and written, besides products and attention;
* ``skip_reason``: why Inductor would not record a CUDA graph.
"""

import argparse
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from benchmarks import peers
from benchmarks.evidence.generated_code import Code, code_of
from benchmarks.measurement import environment, print_table
from benchmarks.rows import add_csv, write_rows
from benchmarks.shapes import LLAMA_3_1_8B, LLAMA_3_2_1B
from torch_fp8 import (
    FP8Config,
    convert_optimizer,
    convert_to_float8,
    load_scaling_state_dict,
    scaling_state_dict,
)
from torch_fp8.tensor.split_weight import SplitWeight

BLOCKS = {"8B": (LLAMA_3_1_8B, 8192), "1B": (LLAMA_3_2_1B, 16384)}
BF16 = "BF16"
RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise")
PAYLOADS = " with payloads"
LAST_STEP = "tensorwise last_step"
"""With ``graph_scales="last_step"``."""
O2 = (
    "tensorwise O2",
    f"{LAST_STEP} O2",
    *(f"{recipe} O2{PAYLOADS}" for recipe in ("tensorwise", LAST_STEP, "delayed", "blockwise")),
)
"""Recipes with float32 weights in two halves, which bring their amax, or their payload."""
VARIANTS = (BF16, *RECIPES, LAST_STEP, *O2, "torchao tensorwise", "torchao rowwise")
COUNTS = ("opaque", "launches", "assertions", "gb", "skip_reason")
COLUMNS = ("block", "variant", *COUNTS, "torch", "triton", "commit", "date", "command")


def cudnn_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *mask: object, **options: object
) -> tuple[Tensor, None]:
    """Attend causally by the operator that runs on a card."""
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    output = attend(query, key, value, None, True, 0.0, True, scale=options["scaling"])[0]
    return output.transpose(1, 2), None


AttentionInterface.register("cudnn", cudnn_attention)


def _options(variant: str, **options: object) -> FP8Config:
    scales = "last_step" if LAST_STEP in variant else "current"
    return FP8Config(recipe=variant.split()[0], graph_scales=scales, **options)


class Block(nn.Module):
    """A decoder layer that takes cosines and sines of the rotary angles as inputs."""

    def __init__(self, layout: dict[str, object], variant: str) -> None:
        super().__init__()
        self.mixed = variant in O2
        config = LlamaConfig(**layout, attn_implementation="cudnn")
        with torch.device("meta"):
            layer = LlamaDecoderLayer(config, 0)
            layer.input_layernorm.to(torch.bfloat16)
            layer.post_attention_layernorm.to(torch.bfloat16)
            if self.mixed:
                options = _options(variant, cache_weights=PAYLOADS in variant)
                convert_to_float8(layer, options)
                optimizer = torch.optim.AdamW(layer.parameters())
                convert_optimizer(optimizer, options, model=layer)
            else:
                layer.to(torch.bfloat16)
        self.layer = layer.to_empty(device="cpu")
        if variant.startswith("torchao "):
            with mock.patch.object(torch.cuda, "is_available", return_value=True):  # no emulation
                self.layer = peers.torchao(self.layer, variant.removeprefix("torchao "))
        elif variant != BF16 and not self.mixed:
            convert_to_float8(self.layer, _options(variant))
        for parameter in self.layer.parameters():  # as after an optimizer's step
            if isinstance(parameter, SplitWeight):
                parameter.halves.current_payload(parameter.halves.cast)
        state = scaling_state_dict(self.layer)
        load_scaling_state_dict(self.layer, {key: torch.ones_like(x) for key, x in state.items()})

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.mixed):
            output: Tensor = self.layer(hidden, position_embeddings=(cos, sin))
        return output


def compiled(block: str, variant: str) -> list[Code]:
    """Return the code of a block's forward and backward."""
    layout, tokens = BLOCKS[block]
    module, bf16 = Block(layout, variant), {"dtype": torch.bfloat16}
    hidden = torch.empty(1, tokens, layout["hidden_size"], requires_grad=True, **bf16)
    angles = [torch.empty(1, tokens, layout["head_dim"], **bf16) for _ in range(2)]
    torch.compiler.reset()
    return code_of(module, (hidden, *angles))


def row_of(block: str, variant: str) -> dict[str, object]:
    codes = compiled(block, variant)
    counts = {name: sum(getattr(code, name) for code in codes) for name in COUNTS[:3]}
    moved = sum(code.moved_bytes for code in codes)
    reasons = "; ".join(dict.fromkeys(code.skip_reason for code in codes if code.skip_reason))
    row = {"block": block, "variant": variant, **counts}
    return row | {"gb": f"{moved / 1e9:.2f}", "skip_reason": reasons}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", nargs="+", choices=BLOCKS, default=list(BLOCKS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    add_csv(parser, "compiled_block")
    options = parser.parse_args()
    about = environment(torch.device("cpu"))
    rows: list[dict[str, object]] = []
    for block in options.blocks:
        for variant in options.variants:
            rows.append(about | row_of(block, variant))
            write_rows(options.csv, COLUMNS, rows)
    print_table(COLUMNS[:7], rows)


if __name__ == "__main__":
    main()
