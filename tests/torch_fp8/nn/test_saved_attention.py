"""Attention that saves q, k and v in FP8."""

import copy
import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.attention import (
    CASES,
    DIM,
    GROUPS,
    HEADS,
    TOKENS,
    Attention,
    causal,
    gradients,
    operands,
    replace_kernels,
)
from tests.saved_activations import LiveBytes, count_saved
from torch_fp8 import revert
from torch_fp8.quantization.metrics import sqnr_db

GRADIENT = 25.0
"""dB that attention's gradients keep; products of E4M3 with E4M3 keep 28.5, and k takes part in two
of the products behind one gradient.
"""


@pytest.fixture(autouse=True, scope="module")
def _nothing_left():
    """Models of other tests that are gone leave entries until the next model is reverted."""
    gc.collect()
    with Attention():
        pass


@pytest.fixture(autouse=True)
def _registry():
    """Each test leaves transformers' functions as they were."""
    before = {name: ALL_ATTENTION_FUNCTIONS[name] for name in ALL_ATTENTION_FUNCTIONS.valid_keys()}
    yield
    now = {name: ALL_ATTENTION_FUNCTIONS[name] for name in ALL_ATTENTION_FUNCTIONS.valid_keys()}
    assert now == before


@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_keep_25_db(case, monkeypatch):
    kind, implementation, kwargs = CASES[case]
    replace_kernels(monkeypatch)
    if "mask" in kwargs and kwargs["mask"].ndim == 2:
        kwargs = {"mask": kwargs["mask"][None, None]}
    attention = Attention(kind, implementation)
    dtype = torch.bfloat16 if case == "flash" else torch.float32
    want = gradients(attention, operands(dtype), **kwargs)
    with attention:
        got = gradients(attention, operands(dtype), **kwargs)
    decibels = [sqnr_db(*pair) for pair in zip((want[0], *want[1]), (got[0], *got[1]), strict=True)]
    assert min(decibels) > GRADIENT, decibels
    assert decibels[0] < 40  # the values are rounded


@pytest.mark.parametrize(
    ("kind", "kwargs", "least"),
    [("gpt_oss", {}, 22.0), ("gemma2", {"softcap": 2.0}, 20.0)],
    ids=["sinks", "softcap"],
)
def test_k_is_not_centred_where_more_than_a_softmax_follows(kind, kwargs, least):
    """Without centring 23 to 27 dB are left; centred, attention would compute something else."""
    attention = Attention(kind, "eager")
    want = gradients(attention, operands(), **kwargs)
    with attention:
        got = gradients(attention, operands(), **kwargs)
    decibels = [sqnr_db(*pair) for pair in zip((want[0], *want[1]), (got[0], *got[1]), strict=True)]
    assert min(decibels) > least, decibels


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", ["sdpa", "padding", "eager", "flash"])
def test_what_backward_reads_is_what_forward_has_multiplied(case, dtype, monkeypatch):
    """Packing loses nothing: gradients are those of attention over the rounded tensors."""
    from torch_fp8.conversion import attention_layers

    kind, implementation, kwargs = CASES[case]
    if case == "flash":
        replace_kernels(monkeypatch)
        if dtype == torch.float32:
            pytest.skip("flash attention takes no float32")
    rounded = []

    class Operands(attention_layers.SavedOperands):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            rounded.append([t.detach().clone().requires_grad_() for t in self.tensors])

    monkeypatch.setattr(attention_layers, "SavedOperands", Operands)
    attention = Attention(kind, implementation)
    with attention:
        got = gradients(attention, operands(dtype), **kwargs)
    want = gradients(attention, rounded[0], **kwargs)
    for one, other in zip((want[0], *want[1]), (got[0], *got[1]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("case", ["sdpa", "padding", "eager", "flex", "flash"])
def test_one_byte_an_element_is_saved(case, monkeypatch):
    kind, implementation, kwargs = CASES[case]
    replace_kernels(monkeypatch)
    attention, tensors = Attention(kind, implementation), operands(torch.bfloat16)
    with count_saved(tensors) as stock:
        attention(*tensors, **kwargs)
    with attention, count_saved(tensors) as saved:
        attention(*tensors, **kwargs)
    heads = HEADS + 2 * GROUPS
    codes = [t for t in saved.tensors if t.dtype == torch.float8_e4m3fn]
    assert sum(t.numel() for t in codes) == 2 * TOKENS * heads * DIM
    # Beside them are scales, and what attention saves of its results, as without FP8.
    of_results = [t for t in saved.tensors if t.dtype != torch.float8_e4m3fn]
    copies = {2 * TOKENS * h * DIM for h in (HEADS, GROUPS)} - {0}
    large = [t for t in of_results if t.untyped_storage().nbytes() // 2 in copies]
    assert len(large) <= 1  # the output of attention
    assert saved.total <= stock.total + 2 * TOKENS * heads * (DIM + 4)


@pytest.mark.parametrize("case", ["sdpa", "padding", "flex", "flash"])
def test_rounded_values_go_with_the_call(case, monkeypatch):
    """Hooks see what is saved, and not what else holds it: the graph, or a cycle around it."""
    kind, implementation, kwargs = CASES[case]
    replace_kernels(monkeypatch)
    attention, tensors = Attention(kind, implementation), operands(torch.bfloat16)

    def live():
        with LiveBytes() as mode:
            out = attention(*(t * 1 for t in tensors), **kwargs)
            alive = mode.total
            del out
            assert mode.total == 0
        return alive

    gc.disable()
    try:
        stock = live()
        with attention:
            saved = live()
    finally:
        gc.enable()
    heads = HEADS + 2 * GROUPS
    assert saved <= stock - 2 * TOKENS * heads * (DIM - 4)


@pytest.mark.parametrize("case", ["sdpa", "padding", "eager"])
def test_autocast_computes_with_the_rounded_tensors(case):
    """Rotated q and k are float32 in a model of float32; attention casts them by itself."""
    kind, implementation, kwargs = CASES[case]
    attention, tensors = Attention(kind, implementation), operands()
    with torch.autocast("cpu", torch.bfloat16):
        want = gradients(attention, tensors, **kwargs)
        with attention, count_saved(tensors) as saved:
            got = gradients(attention, tensors, **kwargs)
    assert [g.dtype for g in got[1]] == [torch.float32] * 3
    pairs = zip((want[0], *want[1]), (got[0], *got[1]), strict=True)
    assert all(sqnr_db(*pair) > GRADIENT for pair in pairs)
    sizes = {t.shape: t.dtype for t in saved.tensors}
    heads = HEADS + 2 * GROUPS
    codes = [t for t in saved.tensors if t.dtype == torch.float8_e4m3fn]
    assert sum(t.numel() for t in codes) == 2 * TOKENS * heads * DIM
    assert (2, GROUPS, TOKENS, DIM) not in sizes


def test_nothing_is_rounded_without_gradients():
    attention, tensors = Attention(), operands(torch.bfloat16)
    want = attention(*tensors).detach()
    with attention:
        with torch.no_grad():
            assert torch.equal(attention(*tensors), want)
        attention.module.eval()
        assert torch.equal(attention(*tensors), want)
        attention.module.train()
        assert torch.equal(attention(*(t.detach() for t in tensors)), want)
        assert not torch.equal(attention(*tensors), want)


@pytest.mark.parametrize("frozen", [(0, 1), (2,), (1,)], ids=str)
def test_operands_that_nobody_trains_have_no_gradients(frozen):
    attention = Attention()
    with attention:
        want = gradients(attention, operands())
        got = gradients(attention, operands(frozen=frozen))
    assert torch.equal(want[0], got[0])
    trained = [g for i, g in enumerate(want[1]) if i not in frozen]
    assert all(map(torch.equal, trained, got[1]))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("case", ["sdpa", "padding", "eager"])
def test_checkpoints_keep_nothing_and_give_the_same_gradients(case, reentrant):
    kind, implementation, kwargs = CASES[case]
    attention = Attention(kind, implementation)

    def run(*tensors, **options):
        return checkpoint(attention, *tensors, use_reentrant=False, **options)

    with attention:
        want = gradients(attention, operands())
        if reentrant:
            out = checkpoint(attention, *operands(), use_reentrant=True)
            assert sqnr_db(want[0], out) > GRADIENT
            return
        got = gradients(run, operands())
        tensors = operands()
        with count_saved(tensors) as saved:
            run(*tensors, **kwargs)
    assert all(map(torch.equal, (want[0], *want[1]), (got[0], *got[1])))
    assert saved.total < 1024


def test_a_checkpoint_drops_what_attention_saves_beside_q_k_and_v():
    attention, storages = Attention(), []

    def with_more(module, query, key, value, mask, **kwargs):
        more = (query / 8).exp()  # which saves its result
        storages.append(StorageWeakRef(more.untyped_storage()))
        return causal(query, key, value) * more, None

    ALL_ATTENTION_FUNCTIONS["test_more"] = with_more
    attention.implementation = attention.config._attn_implementation = "test_more"
    try:
        with attention:
            out = checkpoint(attention, *operands(), use_reentrant=False)
            assert storages[0].expired()
            out.sum().backward()
    finally:
        del ALL_ATTENTION_FUNCTIONS["test_more"]


def test_offloaded_tensors_are_codes():
    attention, offloaded = Attention(), []

    def pack(tensor):
        offloaded.append(tensor.dtype)
        return tensor.clone()

    with attention:
        want = gradients(attention, operands())
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            got = gradients(attention, operands())
    assert all(map(torch.equal, (want[0], *want[1]), (got[0], *got[1])))
    assert offloaded.count(torch.float8_e4m3fn) == 3


def test_the_graph_can_run_twice():
    attention, tensors = Attention(), operands()
    with attention:
        out = attention(*tensors)
        first = torch.autograd.grad(out.sum(), tensors, retain_graph=True)
        second = torch.autograd.grad(out.sum(), tensors)
    assert all(map(torch.equal, first, second))


def test_tensors_that_were_written_to_are_saved_as_they_are():
    """A function that scales q in place, and no other tensor, gets the values that it wrote."""
    attention, tensors = Attention(), operands(batch=1)  # of which products take no copies

    def scaled_in_place(module, query, key, value, mask, scaling, **kwargs):
        query.mul_(scaling)
        out = (query @ key.repeat_interleave(4, 1).mT).softmax(-1)
        return (out @ value.repeat_interleave(4, 1)).transpose(1, 2), None

    def scaled(module, query, key, value, mask, scaling, **kwargs):
        return scaled_in_place(module, query.clone(), key, value, mask, scaling)

    results = []
    for function in (scaled_in_place, scaled):
        ALL_ATTENTION_FUNCTIONS["test_scaled"] = function
        attention.implementation = attention.config._attn_implementation = "test_scaled"
        try:
            with attention:
                results.append(gradients(attention, tensors))
            assert ALL_ATTENTION_FUNCTIONS["test_scaled"] is function
        finally:
            del ALL_ATTENTION_FUNCTIONS["test_scaled"]
    (out, grads), (other, others) = results
    assert all(map(torch.equal, (out, *grads), (other, *others)))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_compiled_attention_stays_as_it_is(implementation):
    attention, tensors = Attention("llama", implementation), operands()
    want = gradients(attention, tensors)
    with attention:
        got = gradients(torch.compile(attention, fullgraph=True, backend="eager"), tensors)
    assert all(map(torch.equal, (want[0], *want[1]), (got[0], *got[1])))


def test_flash_attention_with_padding_gets_what_it_was_given():
    """It takes hidden tokens out, into tensors that are no views of what was rounded."""
    attention, tensors, seen = Attention(), operands(torch.bfloat16), []
    before = ALL_ATTENTION_FUNCTIONS["flash_attention_2"]

    def flash(module, *operands, **kwargs):
        seen.append(operands)
        return operands[0], None

    ALL_ATTENTION_FUNCTIONS["flash_attention_2"] = flash
    attention.implementation = attention.config._attn_implementation = "flash_attention_2"
    try:
        with attention:
            attention(*tensors, mask=torch.ones(2, TOKENS))
            attention(*tensors)
    finally:
        ALL_ATTENTION_FUNCTIONS["flash_attention_2"] = before
        del ALL_ATTENTION_FUNCTIONS["flash_attention_2"]
    assert seen[0][0] is tensors[0]
    assert not torch.equal(seen[1][0], tensors[0])


def test_a_copy_of_a_module_rounds_too():
    attention, tensors = Attention(), operands()
    with attention:
        want = attention(*tensors)
        attention.module = copy.deepcopy(attention.module)
        assert torch.equal(attention(*tensors), want)
        revert(attention.module)
    # The original is gone by now or is left, which the mapping does not outlive.
