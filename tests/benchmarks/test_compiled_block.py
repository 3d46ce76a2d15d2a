"""What a compiled block launches, checks and moves is not more than what was recorded."""

import re
from unittest import mock

import pytest
import triton
from torch._inductor.codecache import PyCodeCache
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.evidence import compiled_block
from benchmarks.evidence.generated_code import mocked_card
from benchmarks.rows import RESULTS, read_rows
from tests.emulator.driver import all_kernels

RECORDED = {
    (row["block"], row["variant"]): row for row in read_rows(RESULTS / "compiled_block.csv")
}


def ptx_of(kernel, launched, as_bytes=False):
    """Return the instructions of a kernel, compiled as Inductor compiles `launched`.

    Args:
        as_bytes: whether the kernel takes FP8 tensors as bytes, as ours do in eager code.
    """
    meta, config = launched.triton_meta, launched.configs[0]
    types = {
        name: "*u8" if as_bytes and str(kind).startswith("*fp8") else kind
        for name, kind in meta["signature"].items()
    }
    source = ASTSource(kernel, types, meta["constants"], meta["configs"][0])
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    code = re.sub(r"//.*|\.loc.*|\.file.*", "", text.partition(".section")[0])
    return [line for line in code.splitlines() if line.strip()]


def launched_kernels(code):
    pattern = r"async_compile\.triton\('\w+', '''(.*?)''', device_str"
    for source in re.findall(pattern, code.source, re.S):
        if "user_autotune" in source:
            module = vars(PyCodeCache.load(source)).values()
            yield next(x for x in module if hasattr(x, "triton_meta"))


@pytest.mark.long
@pytest.mark.parametrize("variant", ["BF16", "tensorwise", "tensorwise last_step O2 with payloads"])
def test_a_block_needs_no_more_than_recorded(variant):
    codes = compiled_block.compiled("8B", variant)
    with mock.patch.object(compiled_block, "compiled", return_value=codes):
        row, recorded = compiled_block.row_of("8B", variant), RECORDED["8B", variant]
    for name in ("opaque", "launches", "assertions"):
        assert row[name] <= int(recorded[name]), name
    assert float(row["gb"]) <= float(recorded["gb"])
    assert row["skip_reason"] == recorded["skip_reason"] == ""
    kernels = all_kernels()
    with mocked_card():
        launched = [kernel for code in codes for kernel in launched_kernels(code)]
        for kernel in launched:
            assert "fp64" not in kernel.triton_meta["signature"].values()
            eager = ptx_of(kernels[kernel.fn.__name__], kernel, as_bytes=True)
            assert ptx_of(kernel.fn, kernel) == eager
    assert bool(launched) == (variant != "BF16")
    assert not any("view.dtype(" in code.source for code in codes)  # each is a call in every step
