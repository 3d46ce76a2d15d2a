"""Losses of a chunk of logits on CUDA: the twin of `torch_fp8.ops.cross_entropy`.

Memory traffic in bytes per BF16 logit: `cross_entropy_rows` reads 2, or 4 with a gradient, which it
writes in 2 more; if the rows that are at work fit in the L2 cache, their second read is from there.
`cross_entropy_quantize` reads 2 and writes 1 per layout. Everything else is per row, or per column
and 64 rows.

Legend: M tokens, V classes.
"""

import torch
from torch import Tensor

from torch_fp8.kernels.cast_launch import cdiv, next_power_of_2, pointers
from torch_fp8.kernels.cross_entropy_kernels import cross_entropy_cast_kernel, cross_entropy_kernel
from torch_fp8.kernels.loss_arguments import LogitForm, LossTerms
from torch_fp8.quantization.formats import E5M2
from torch_fp8.quantization.payload_shape import multiple_of_16

BLOCK, PER_WARP = 4096, 512
"""Classes that a program of `cross_entropy_rows` reads at once, 16 for each thread."""
BAND, TILE_C, WARPS = 64, 64, 8
"""Tile of a cast: the transposed store writes 64 contiguous bytes, two sectors."""
PROGRAMS, LEAST_TILES = 2048, 8
"""Programs of a cast, several for each place on a card, so that all end at about the same time; and
tiles of each, so that the sums of its rows are few.
"""


def _floats(form: LogitForm) -> tuple[float, float, float, float]:
    inverse = 1.0 / form.softcap if form.softcap else 0.0
    return float(form.scale), float(form.softcap), inverse, 1.0 / form.temperature


def _flags(terms: LossTerms, form: LogitForm) -> dict[str, object]:
    plain = form.scale == 1 and form.temperature == 1
    return {
        "FORM": "capped" if form.softcap else "plain" if plain else "scaled",
        "SMOOTH": terms.smooth is not None,
        "WEIGHTED": terms.smooth is not None and terms.class_weight is not None,
        "SPREAD": terms.spread is not None,
    }


def _inputs(terms: LossTerms) -> list[Tensor]:
    return pointers(
        (terms.label, terms.mass, terms.hit, terms.smooth, terms.class_weight, terms.spread),
        terms.mass,
    )


def cross_entropy_rows(
    logits: Tensor, terms: LossTerms, form: LogitForm, gradient: bool, wants_entropy: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """See `torch_fp8.ops.cross_entropy.cross_entropy_rows`."""
    rows, cols = logits.shape
    known, entropy = terms.lse is not None, terms.entropy
    loss = lse = None
    if not known:
        loss, lse = (logits.new_empty(rows, dtype=torch.float32) for _ in range(2))
        entropy = logits.new_empty(rows, dtype=torch.float32) if wants_entropy else None
    block = min(BLOCK, max(next_power_of_2(cols), PER_WARP))
    if rows and (gradient or not known):
        cross_entropy_kernel[(rows,)](
            logits,
            *_inputs(terms),
            *pointers((terms.lse if known else lse, entropy, loss), terms.mass),
            logits.stride(0),
            cols,
            *_floats(form),
            **_flags(terms, form),
            KNOWN=known,
            ENTROPY=wants_entropy and not known,
            GRADIENT=gradient,
            BLOCK=block,
            num_warps=block // PER_WARP,
            enable_fp_fusion=False,
        )
    return loss, lse, None if known else entropy


def cross_entropy_quantize(
    logits: Tensor,
    terms: LossTerms,
    form: LogitForm,
    scale: Tensor,
    rowwise: bool,
    columnwise: bool,
    wants_bias: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]:
    """See `torch_fp8.ops.cross_entropy.cross_entropy_quantize`."""
    (rows, cols), float32 = logits.shape, torch.float32
    bands, tiles = cdiv(rows, BAND), cdiv(multiple_of_16(cols), TILE_C)
    tiles_of_part = max(LEAST_TILES, cdiv(tiles, max(1, PROGRAMS // max(1, bands))))
    parts = cdiv(tiles, tiles_of_part)
    row = col = of_bias = None
    if rowwise:
        row = logits.new_empty((rows, multiple_of_16(cols)), dtype=E5M2.dtype)
    if columnwise:
        col = logits.new_empty((cols, multiple_of_16(rows)), dtype=E5M2.dtype)
    sums = logits.new_empty((3, parts, rows), dtype=float32)
    if wants_bias:
        of_bias = logits.new_empty((bands, cols), dtype=float32)
    if rows:
        cross_entropy_cast_kernel[(bands, parts)](
            logits,
            *_inputs(terms),
            *pointers((terms.lse, terms.entropy, scale, row, col), terms.mass),
            *pointers((sums, of_bias), terms.mass),
            logits.stride(0),
            rows,
            cols,
            tiles_of_part,
            *_floats(form),
            **_flags(terms, form),
            ROW=rowwise,
            COL=columnwise,
            BIAS=wants_bias,
            BLOCK_R=BAND,
            BLOCK_C=TILE_C,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
    sums = sums.sum(1)
    return row, col, sums, None if of_bias is None else of_bias.sum(0)
