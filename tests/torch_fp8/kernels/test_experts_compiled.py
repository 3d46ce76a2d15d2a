import itertools

import pytest
import torch

from tests.internals import GateBackwardInputs
from tests.internals import kernels_expert_gate as expert_gate
from tests.internals import kernels_moe_rows as moe_rows
from tests.kernel_cases.experts import FORMS
from torch_fp8.ops.quantize import save_input

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
EXPERTS, TOKENS = 8, 1024
DTYPES = {"bf16": BF16, "fp32": torch.float32, "fp16": torch.float16}
COLUMNS = {"whole": 2048, "odd": 515}


def launch_rows(cols):
    x, scale = torch.zeros(TOKENS, cols, dtype=E4M3), torch.ones(TOKENS, 1)
    token, offs = torch.zeros(4096, dtype=torch.long), torch.zeros(EXPERTS, dtype=torch.int32)
    moe_rows.gather_payload(x, scale, token)
    for rows, tokens in ((TOKENS, None), (TOKENS, token), (TOKENS - 7, None)):
        moe_rows.transpose_payload(x[:rows], scale[:rows], offs, tokens)
    for dtype, top_k in itertools.product(DTYPES.values(), (1, 2, 3, 8)):
        row = torch.zeros(TOKENS, top_k, dtype=torch.long)
        moe_rows.combine_rows(torch.zeros(4096, cols, dtype=dtype), row)


def launch_gates(dtype, width):
    h, score = torch.zeros(TOKENS, 2 * width, dtype=dtype), torch.ones(TOKENS)
    offs, grad = torch.zeros(EXPERTS, dtype=torch.int32), h[:, :width].contiguous()
    saved = save_input(grad)
    for name, form in FORMS.items():
        for bias, save in itertools.product((None, torch.zeros(EXPERTS, 2 * width)), (True, False)):
            if dtype == BF16 or (bias is None) == (name == "plain"):
                expert_gate.expert_gate_quantize(h, score, offs, bias, form, save)
        inputs = GateBackwardInputs(grad, score, *saved, *saved)
        expert_gate.expert_gate_backward(inputs, form)


@pytest.mark.long
@pytest.mark.parametrize("cols", COLUMNS)
def test_rows_compile_without_spills(cols, record_launches, compile_all):
    with record_launches(moe_rows) as launches:
        launch_rows(COLUMNS[cols])
    in_lines = set()
    for ptx in compile_all(launches, registers=128, shared=40 * 1024):
        # triton-lang/triton#11111: next to these, transposed one-byte stores are corrupted.
        assert "min.NaN" not in ptx
        assert "max.NaN" not in ptx
        if "st.global.v4.b32" in ptx:
            in_lines.add(ptx.partition(".entry ")[2].partition("(")[0].strip())
    moved = {"gather_rows_kernel", "transpose_groups_kernel", "combine_rows_kernel"}
    assert moved <= in_lines or cols == "odd", "lines of 16 bytes"


@pytest.mark.long
@pytest.mark.parametrize("width", COLUMNS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_compile_without_spills(dtype, width, record_launches, compile_all):
    with record_launches(expert_gate) as launches:
        launch_gates(DTYPES[dtype], COLUMNS[width])
    compile_all(launches)


def test_sizes_are_no_constants(record_launches):
    """Or a kernel would be compiled again for each number of tokens, or of experts."""
    with record_launches(moe_rows) as launches:
        launch_rows(2048)
    with record_launches(expert_gate) as gates:
        launch_gates(BF16, 768)
    for launch in (*launches, *gates):
        numbers = {"rows", "tokens", "groups", "size"}
        assert numbers.isdisjoint(launch.divisible)
        assert numbers.isdisjoint(name for name, _ in launch.constants)
