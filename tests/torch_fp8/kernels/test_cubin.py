"""What is read of a cubin is what the assembler's own tool prints of it, spills included."""

import re
import subprocess
from pathlib import Path

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.cubin import usage


@triton.jit
def _scale_kernel(x_ptr, y_ptr, SIZE: tl.constexpr):
    """Keep many values of a thread at once: 64 of float32."""
    places = tl.arange(0, SIZE)
    x = tl.load(x_ptr + places)
    tl.store(y_ptr + places, x * tl.sum(x))


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("registers", [255, 32])
def test_usage_is_what_cuobjdump_prints(registers, capability, tmp_path):
    source = ASTSource(
        _scale_kernel, {"x_ptr": "*fp32", "y_ptr": "*fp32", "SIZE": "constexpr"}, {(2,): 2048}
    )
    options = {"num_warps": 1, "maxnreg": registers}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    found = usage(compiled.asm["cubin"])
    (tmp_path / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    command = [str(tool), "-res-usage", str(tmp_path / "kernel.cubin")]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    printed = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    assert found == tuple(int(printed[key]) for key in ("REG", "STACK", "LOCAL"))
    assert (found.stack > 0) == (registers == 32), "a thread's values spill"


def test_what_is_no_cubin_is_refused():
    with pytest.raises(ValueError, match="not a 64-bit ELF file"):
        usage(b"//\n.version 8.7\n")
