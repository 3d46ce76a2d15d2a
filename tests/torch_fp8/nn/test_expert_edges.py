import pytest
import torch

from tests.internals import experts_dispatch, sqnr_db
from tests.moe_experts import LAYOUTS, E, H, experts, forget_entries
from torch_fp8 import FP8Config, convert_to_float8, revert

FLOOR = 20.5
"""See `tests.torch_fp8.nn.test_experts`: 22.2 dB of a block's gradients, one GEMM more for a post
norm, and 1 dB for few values."""

pytestmark = pytest.mark.parametrize("layout", LAYOUTS)


def _is_batched(module):
    return not hasattr(module, "has_gate")


def _run(module, x, index, scores):
    """Return the output and all gradients; Llama-4 gets the tokens of each expert, and zeros."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if _is_batched(module):
            chosen = torch.zeros(len(x), E).scatter(1, index, scores).t()[..., None]  # (E, T, 1)
            y = module((x[None] * chosen).reshape(-1, H)).view(E, len(x), H).sum(0)
        else:
            y = module(x, index, scores)
    y.float().backward(torch.ones_like(y, dtype=torch.float32))
    grads = {name: p.grad.clone() for name, p in module.named_parameters()}
    return {"y": y.detach().float(), "x": x.grad, **grads}


def _given(tokens, index):
    torch.manual_seed(1)
    return torch.randn(tokens, H), index, torch.rand(tokens, index.shape[1]) + 0.5


CHOICES = {
    "no-token": (0, torch.empty(0, 2, dtype=torch.long)),
    "one-token": (1, torch.tensor([[1, 3]])),
    "all-to-one-expert": (200, torch.full((200, 1), 2)),
    "odd-number": (37, torch.arange(37)[:, None] % 3),
}


@pytest.mark.parametrize("choice", list(CHOICES))
def test_few_tokens_and_one_expert_compute_what_stock_does(layout, choice):
    module, given = experts(layout), _given(*CHOICES[choice])
    want = _run(module, *given)
    convert_to_float8(module, FP8Config(recipe="rowwise"))
    got = _run(module, *given)
    used = {int(i) for i in given[1].unique()}
    for name, value in got.items():
        assert value.isfinite().all(), name
        assert not used or sqnr_db(want[name], value) >= FLOOR, name
        if value.ndim == 3 or "bias" in name:
            for i in range(E):
                assert bool(value[i].any()) == (i in used), (name, i)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_token(layout, bad):
    module = experts(layout)
    convert_to_float8(module, FP8Config(recipe="rowwise"))
    x, index, scores = _given(40, torch.arange(40)[:, None] % 2)
    x[7, 3] = bad
    got = _run(module, x, index, scores)
    rest = torch.arange(40) != 7
    for name in ("y", "x"):
        assert got[name][rest].isfinite().all(), name
    assert not got["y"][7].isfinite().all()
    first = module.fp8_weight_names[0]
    assert not got[first][1].isfinite().all()  # visible, and in its own expert alone
    if not _is_batched(module):  # Llama-4's other experts multiply the token by zero
        assert got[first][0].isfinite().all()


def test_two_models_are_independent_and_the_entries_go_with_the_last(layout):
    forget_entries()
    given = _given(20, torch.arange(20)[:, None] % E)
    first, second, stock = (experts(layout) for _ in range(3))
    want = [_run(m, *given)["y"] for m in (first, second, stock)]
    kinds = [type(m) for m in (first, second, stock)]
    before = {name: experts_dispatch.functions()[name] for name in ("grouped_mm", "batched_mm")}
    convert_to_float8(first), convert_to_float8(second)
    assert torch.equal(_run(stock, *given)["y"], want[2])
    assert type(stock) is kinds[2]
    assert not torch.equal(_run(first, *given)["y"], want[0])
    revert(first)
    assert torch.equal(_run(first, *given)["y"], want[0])
    assert not torch.equal(_run(second, *given)["y"], want[1])
    revert(second)
    assert torch.equal(_run(second, *given)["y"], want[1])
    assert [type(m) for m in (first, second, stock)] == kinds
    after = {name: experts_dispatch.functions()[name] for name in before}
    assert after == before
    assert not any(isinstance(f, experts_dispatch.Dispatch) for f in after.values())
