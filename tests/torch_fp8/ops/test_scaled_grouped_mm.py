import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.internals import E4M3, CastSpec, sqnr_db
from torch_fp8.ops import scaled_grouped_mm
from torch_fp8.ops.moe_rows import (
    combine_rows,
    gather_rows,
    group_of_rows,
    moe_route,
    spread_rows,
    transpose_groups,
)
from torch_fp8.ops.quantize import QuantizedTensor, dequantize, quantize
from torch_fp8.ops.scaled_grouped_mm import reason_not_grouped, scaled_grouped_matmul, too_many
from torch_fp8.ops.scaled_mm import scaled_matmul

E, K, N = 4, 48, 32
ROWWISE = CastSpec(E4M3, "rowwise", power_of_two=True)
OFFS = [16, 16, 80, 96]  # the second group is empty; 16 rows lie behind the last one
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def _stacked(x):
    rows = quantize(x.flatten(0, 1), ROWWISE)
    return rows._replace(qdata=rows.qdata.view_as(x), scale=rows.scale.view(*x.shape[:2], 1))


@DTYPES
def test_rows_are_those_of_one_product_for_each_expert(dtype):
    x, w = quantize(torch.randn(112, K), ROWWISE), _stacked(torch.randn(E, N, K))
    y = scaled_grouped_matmul(x, w, torch.tensor(OFFS, dtype=torch.int32), "rows", dtype)
    assert y.shape == (112, N)
    for i, (start, end) in enumerate(zip([0, *OFFS], OFFS, strict=False)):
        part = QuantizedTensor(x.qdata[start:end], x.scale[start:end], "rowwise")
        weight = QuantizedTensor(w.qdata[i], w.scale[i], "rowwise")
        assert torch.equal(y[start:end], scaled_matmul(part, weight, dtype))
    assert not y[OFFS[-1] :].any()


@DTYPES
def test_sums_are_those_of_one_product_for_each_expert(dtype):
    offs, empty = torch.tensor(OFFS, dtype=torch.int32), 1
    g_t = transpose_groups(quantize(torch.randn(112, N), ROWWISE), offs)
    x_t = transpose_groups(quantize(torch.randn(112, K), ROWWISE), offs)
    dw = scaled_grouped_matmul(g_t, x_t, offs, "sums", dtype)
    assert dw.shape == (E, N, K)
    assert not dw[empty].any()
    for i, (start, end) in enumerate(zip([0, *OFFS], OFFS, strict=False)):
        if i != empty:
            a, b = (
                QuantizedTensor(t.qdata[:, start:end].contiguous(), t.scale[i, :, None], "rowwise")
                for t in (g_t, x_t)
            )
            assert torch.equal(dw[i], scaled_matmul(a, b, dtype))


@pytest.mark.parametrize("rows", [16, 64, 512])
def test_transposed_groups_lose_little_more_than_one_cast(rows):
    """A direct cast by column gives 31.5 dB; shifts of exponents round once only."""
    x = torch.randn(2 * rows, K) * torch.exp2(torch.randn(2 * rows, 1))
    payload, offs = quantize(x, ROWWISE), torch.tensor([rows, 2 * rows], dtype=torch.int32)
    transposed = transpose_groups(payload, offs)
    scale = transposed.scale.repeat_interleave(rows, 0).t()
    assert sqnr_db(dequantize(payload).t(), transposed.qdata.float() * scale) > 45
    assert sqnr_db(x.t(), transposed.qdata.float() * scale) > 30.5


def test_flops_count_every_row_once():
    x, w = quantize(torch.randn(112, K), ROWWISE), _stacked(torch.randn(E, N, K))
    offs = torch.tensor(OFFS, dtype=torch.int32)
    x_t, y_t = (
        transpose_groups(x, offs),
        transpose_groups(quantize(torch.randn(112, N), ROWWISE), offs),
    )
    with FlopCounterMode(display=False) as counter:
        scaled_grouped_matmul(x, w, offs, "rows", torch.bfloat16)
    assert counter.get_total_flops() >= 2 * 112 * K * N
    counts = counter.get_flop_counts()["Global"]
    assert counts[torch.ops.torch_fp8.scaled_grouped_mm] == 2 * 112 * K * N
    with FlopCounterMode(display=False) as counter:
        scaled_grouped_matmul(y_t, x_t, offs, "sums", torch.bfloat16)
    counts = counter.get_flop_counts()["Global"]
    assert counts[torch.ops.torch_fp8.scaled_grouped_mm] == 2 * 112 * K * N


@pytest.mark.parametrize("form", ["rows", "sums"])
def test_operator_keeps_the_contract_of_torch_library(form):
    x, w = quantize(torch.randn(112, K), ROWWISE), _stacked(torch.randn(E, N, K))
    offs = torch.tensor(OFFS, dtype=torch.int32)
    a, b = x, w
    if form == "sums":
        a, b = (
            transpose_groups(quantize(torch.randn(112, N), ROWWISE), offs),
            transpose_groups(x, offs),
        )
    arguments = (a.qdata, a.scale, b.qdata, b.scale, offs, form, torch.bfloat16, False, False)
    # The test of the schema compares arguments by arithmetic that torch has not for float8.
    tests = ("test_autograd_registration", "test_faketensor")
    operator = torch.ops.torch_fp8.scaled_grouped_mm.default
    torch.library.opcheck(operator, arguments, test_utils=tests)


@pytest.mark.parametrize(
    "choice",
    [
        pytest.param(torch.randint(0, E, (37, 2)), id="random"),
        pytest.param(torch.full((37, 1), 2), id="all-to-one"),
        pytest.param(torch.tensor([[3]]), id="one-token"),
        pytest.param(torch.empty(0, 2, dtype=torch.long), id="no-token"),
        pytest.param(torch.randint(0, E + 2, (37, 2)), id="experts-elsewhere"),
        pytest.param(torch.full((5, 2), E), id="all-elsewhere"),
    ],
)
def test_route_sends_each_token_to_its_experts_and_back(choice):
    route, slots = moe_route(choice, E), choice.numel()
    assert len(route.slot) == -(-slots // 16) * 16 + 16 * E
    sizes = route.offs.diff(prepend=torch.zeros(1, dtype=torch.int32))
    assert (sizes % 16 == 0).all()
    assert (sizes >= 16).all()
    assert route.offs[-1] <= len(route.slot)
    group = group_of_rows(route.offs, len(route.slot))
    assert torch.equal(group[route.row], choice.clamp(max=E))
    own = choice < E
    assert torch.equal(route.slot[route.row[own]], torch.arange(slots).view_as(choice)[own])
    assert (route.token[route.row[~own]] == len(choice)).all()
    assert route.row.unique().numel() == slots
    x = torch.randn(len(choice), K)
    rows = spread_rows(x, route.token)
    payload = gather_rows(quantize(x, ROWWISE), route.token)
    assert sqnr_db(rows, dequantize(payload)) > 30 or not slots or not own.any()
    torch.testing.assert_close(combine_rows(rows, route.row), own.sum(1, keepdim=True) * x)


def test_what_the_kernel_does_not_take_is_named():
    assert too_many((8, 768, 2048)) is None
    assert "1023" in too_many((2000, 64, 64))


@pytest.mark.parametrize(
    ("capability", "runs"), [((8, 9), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)]
)
def test_cards_without_the_operator_are_refused(monkeypatch, capability, runs):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    reason = reason_not_grouped(torch.device("cuda"), False)
    assert (reason is None) == runs
    assert runs or f"sm_{capability[0]}{capability[1]}" in reason
    assert reason_not_grouped(torch.device("cuda"), True) is None
    assert reason_not_grouped(torch.device("cpu"), False) is None


def test_cuda_gets_the_layouts_that_torch_documents(monkeypatch):
    """The call itself, with torch's operator replaced: shapes, strides, scales, and the tail."""
    calls = []

    def fake(a, b, scale_a, scale_b, **options):
        calls.append((a, b, scale_a, scale_b, options))
        rows = b.ndim == 3
        size = (a.shape[0], b.shape[2]) if rows else (E, a.shape[0], b.shape[1])
        return torch.full(size, float("nan"), dtype=torch.bfloat16)

    monkeypatch.setattr(torch, "_scaled_grouped_mm", fake)
    offs = torch.tensor(OFFS, dtype=torch.int32)
    x, w = quantize(torch.randn(112, K), ROWWISE), _stacked(torch.randn(E, N, K))
    on_cuda = scaled_grouped_mm._on_cuda
    y = on_cuda(x.qdata, x.scale, w.qdata, w.scale, offs, "rows", torch.float32, True, False)
    assert y.dtype == torch.float32
    assert not y[OFFS[-1] :].any()
    a, b, scale_a, scale_b, options = calls[-1]
    assert (a.shape, b.shape, b.stride()) == ((112, K), (E, K, N), (N * K, 1, K))
    assert (scale_a.shape, scale_b.shape) == ((112,), (E, N))
    assert options["offs"] is offs
    assert options["use_fast_accum"]
    g_t = transpose_groups(quantize(torch.randn(112, N), ROWWISE), offs)
    x_t = transpose_groups(x, offs)
    arguments = (g_t.qdata, g_t.scale, x_t.qdata, x_t.scale, offs, "sums")
    assert on_cuda(*arguments, torch.bfloat16, False, False).shape == (E, N, K)
    a, b, scale_a, scale_b, _ = calls[-1]
    assert (a.shape, b.shape, b.stride()) == ((N, 112), (112, K), (1, 112))
    assert (scale_a.shape, scale_b.shape) == ((E * N,), (E * K,))


def test_cuda_gets_sizes_that_are_no_multiples_padded(monkeypatch):
    """Nemotron-H's experts have a width of 7688: zeros are added to operands and cut off again."""
    cols, out = 40, 24
    seen = []

    def fake(a, b, scale_a, scale_b, **options):
        seen.append((a.shape, b.shape, scale_a.shape, scale_b.shape))
        if b.ndim == 3:
            groups = group_of_rows(options["offs"], a.shape[0]).clamp(max=E - 1)
            product = torch.einsum("mk,mkn->mn", a.float(), b.float()[groups])
            return (product * scale_a[:, None] * scale_b[groups]).bfloat16()
        return torch.zeros(E, a.shape[0], b.shape[1], dtype=torch.bfloat16)

    monkeypatch.setattr(torch, "_scaled_grouped_mm", fake)
    offs = torch.tensor(OFFS, dtype=torch.int32)
    x, w = quantize(torch.randn(112, cols), ROWWISE), _stacked(torch.randn(E, out, cols))
    arguments = (x.qdata, x.scale, w.qdata, w.scale, offs, "rows")
    y = scaled_grouped_mm._on_cuda(*arguments, torch.bfloat16, True, False)
    want = scaled_grouped_matmul(x, w, offs, "rows", torch.bfloat16)
    torch.testing.assert_close(y, want, rtol=0.02, atol=0.02)
    assert seen[-1] == ((112, 48), (E, 48, 32), (112,), (E, 32))
    g_t = transpose_groups(quantize(torch.randn(112, out), ROWWISE), offs)
    x_t = transpose_groups(x, offs)
    arguments = (g_t.qdata, g_t.scale, x_t.qdata, x_t.scale, offs, "sums")
    dw = scaled_grouped_mm._on_cuda(*arguments, torch.bfloat16, False, False)
    assert dw.shape == (E, out, cols)
    assert seen[-1] == ((32, 112), (112, 48), (E * 32,), (E * 48,))
