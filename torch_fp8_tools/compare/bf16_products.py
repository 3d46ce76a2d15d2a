"""BF16 products on a CPU that has no fast ones: computed in float32 and rounded once.

On x86 without AVX-512 BF16 or AMX, torch's BF16 products take 4 to 37 times as long as float32's.
A fast BF16 product sums in float32, too, and rounds once, so `compute_in_float32` only
changes the order of the sums. It replaces the CPU kernels of `mm`, `addmm`, `bmm` and
`baddbmm` in this process, which autocast, autograd and compiled graphs all call.

Comparisons and tests use this module. `torch_fp8` never changes BF16 products.
"""

import time
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, get_kernel

SLOW = 2.0
"""BF16 products that take at least this multiple of the time in float32 are computed in float32."""
VARIANTS = {
    "mm": ("", ".out"),
    "addmm": ("", ".out", "_"),
    "bmm": ("", ".out"),
    "baddbmm": ("", ".out", "_"),
}
_installed: list[Library] = []


def choose(choice: str | None = None) -> str:
    """Choose where this process computes BF16 products, and print the choice in one line.

    Args:
        choice: "bf16" for torch's own products, or "float32", or None for the faster of the two on
            this CPU, by a short measurement, and "bf16" if there is a GPU.
    Returns:
        The choice.
    """
    reason = "as requested"
    if choice is None and torch.cuda.is_available():
        return "bf16"
    if choice is None and _installed:
        choice, reason = "float32", "as before"
    if choice is None:
        multiple = slowness()
        choice = "float32" if multiple >= SLOW else "bf16"
        reason = f"on this CPU, torch's own take {multiple:.1f} times as long as those in float32"
    if choice == "float32":
        compute_in_float32()
        print(f"BF16 products: computed in float32 and rounded once ({reason})", flush=True)
    else:
        restore()
        print(f"BF16 products: torch's own ({reason})", flush=True)
    return choice


def slowness(seconds: float = 0.05) -> float:
    """Return the time of torch's BF16 products as a multiple of that in float32, casts included.

    One thread's processor time is measured, because threads of a busy machine wait for one another.
    The result is about 1 after `compute_in_float32`.
    """
    a = torch.ones(128, 128, dtype=torch.bfloat16)
    best = [float("inf")] * 2
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        for i, wide in enumerate((False, True)):
            began = time.thread_time()
            for b in (a, a.t()):
                (a.float() @ b.float()).bfloat16() if wide else a @ b
            best[i] = min(best[i], time.thread_time() - began)
    torch.set_num_threads(threads)
    return best[0] / best[1]


def compute_in_float32() -> None:
    """Compute BF16 products on the CPU in float32 and round them once, from now on."""
    if _installed:
        return
    library = Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for name, variants in VARIANTS.items():
            product = get_kernel(f"aten::{name}", "CPU")
            for variant in variants:
                kernel = _kernel(product, get_kernel(f"aten::{name}{variant}", "CPU"), variant)
                library.impl(f"{name}{variant}", kernel, "CPU", with_keyset=True)
    _installed.append(library)


def restore() -> None:
    """Compute BF16 products as torch does, from now on."""
    while _installed:
        _installed.pop()._destroy()


def _kernel(product: Any, original: Any, variant: str) -> Any:
    """Return a kernel that calls `product` on BF16 operands in float32, and `original` on others.

    Args:
        product: torch's kernel that returns a new tensor.
        original: torch's kernel of the variant: "" as `product`, "_" in place, ".out" with `out`.
    """

    def compute(keys: Any, *operands: Tensor, out: Tensor | None = None, **scalars: Any) -> Tensor:
        tensors = operands if out is None else (*operands, out)
        options = scalars if out is None else {**scalars, "out": out}
        if any(tensor.dtype is not torch.bfloat16 for tensor in tensors):
            return original.call_boxed(keys, *operands, **options)
        wide = product.call_boxed(keys, *(operand.float() for operand in operands), **scalars)
        target = operands[0] if variant == "_" else out
        if target is None:
            return wide.bfloat16()
        if target.shape != wide.shape:  # torch resizes it with a warning, or refuses it
            original.call_boxed(keys, *operands, **options)
        return target.copy_(wide)

    return compute
