"""How exact attention's gradients are where it saves FP8, as CSV.

    python -m benchmarks.evidence.attention_gradients    # runs/benchmarks/attention_gradients.csv

SQNR in dB of the gradients of q, k and v, against attention in float32 of the same BF16 values, for
the same gradient of the output. ``saved`` is `FP8Config.save_attention`; with ``qkvo`` the output
that backward reads is what `recipe` makes of the layer's input for its wgrad. 8 heads of 64
elements, 2 of them in k and v, 96 tokens, two sequences; k has an offset by channel of 1.5.
``padding`` hides the first 30 tokens of one sequence, and no gradient comes back to them;
``gradients in padding`` has some there: a token that sees itself alone has none in truth.
"""

import argparse
from typing import Any

import torch
from torch import Tensor

from benchmarks.measurement import environment, print_table
from benchmarks.rows import add_csv, write_rows
from tests.attention import CASES, Attention, operands, replace_kernels
from torch_fp8 import FP8Config
from torch_fp8.quantization.metrics import sqnr_db
from torch_fp8.quantization.recipe import RECIPES

COLUMNS = ("case", "saved", "recipe", "dq", "dk", "dv", "torch", "commit", "date", "command")
FORMS = {
    "causal": ("sdpa", {}),
    "padding": ("padding", {}),
    "gradients in padding": ("padding", {}),
    "sliding window": ("sliding window", {}),
    "flash": ("flash", {}),
    "sinks": (("gpt_oss", "eager", {}), {}),
    "softcap": (("gemma2", "eager", {}), {"softcap": 2.0}),
}
PADDED = 30


class _Replacements:
    """Functions in place of others, as pytest's ``monkeypatch`` sets them."""

    @staticmethod
    def setattr(place: Any, name: str, value: Any) -> None:
        setattr(place, name, value)


def gradients(form: str, saved: str, recipe: str) -> list[Tensor]:
    """Return those of q, k and v; `saved` ``float32``: of attention as it is."""
    case, options = FORMS[form]
    kind, implementation, kwargs = CASES[case] if isinstance(case, str) else case
    masks = {n: m[None, None] if m.ndim == 2 else m for n, m in kwargs.items()}
    tensors = operands(torch.bfloat16)
    if saved == "float32":
        saved, tensors = "bf16", [t.detach().float().requires_grad_() for t in tensors]
    config = FP8Config(opt_level="O1", save_attention=saved, recipe=recipe)
    attention = Attention(kind, implementation, config)
    attention.module.to(tensors[0].dtype)
    with attention:
        out = attention(*tensors, **masks, **options)
        taken = attention.module.o_proj(out.flatten(2).contiguous())
        g = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
        if form == "padding":
            g[0, :PADDED] = 0
        grads = torch.autograd.grad(out, tensors, g)
        assert taken.requires_grad
    return list(grads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_csv(parser, "attention_gradients")
    path = parser.parse_args().csv
    about = {k: v for k, v in environment(torch.device("cpu")).items() if k in COLUMNS}
    replace_kernels(_Replacements)
    rows = []
    for form in FORMS:
        want = gradients(form, "float32", "tensorwise")
        for saved in ("bf16", "qkv", "qkvo"):
            for recipe in RECIPES if saved == "qkvo" else ("tensorwise",):
                pairs = zip(want, gradients(form, saved, recipe), strict=True)
                decibels = (f"{sqnr_db(*pair):.1f}" for pair in pairs)
                row = dict(zip(("dq", "dk", "dv"), decibels, strict=True))
                rows.append({"case": form, "saved": saved, "recipe": recipe, **row, **about})
    write_rows(path, COLUMNS, rows)
    print_table(COLUMNS[:6], rows)


if __name__ == "__main__":
    main()
