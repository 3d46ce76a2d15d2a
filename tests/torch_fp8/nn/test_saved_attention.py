"""Attention that saves q, k and v in FP8."""

import copy
import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from transformers import Gemma2Config, GptOssConfig, LlamaConfig, MistralConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.mistral.modeling_mistral import MistralAttention

from tests.saved_activations import count_saved
from torch_fp8 import FP8Config, convert_to_float8, revert
from torch_fp8.nn.attention_dispatch import eager_function
from torch_fp8.quantization.metrics import sqnr_db

HEADS, GROUPS, TOKENS, DIM = 8, 2, 96, 64
SIZES = {
    "hidden_size": HEADS * DIM,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": DIM,
}
MODULES = {
    "llama": (LlamaConfig, LlamaAttention),
    "mistral": (MistralConfig, MistralAttention),
    "gemma2": (Gemma2Config, Gemma2Attention),
    "gpt_oss": (GptOssConfig, GptOssAttention),
}
QKV = FP8Config(opt_level="O1", save_attention="qkv")
GRADIENT = 25.0
"""dB that attention's gradients keep; products of E4M3 with E4M3 keep 28.5, and k takes part in two
of the products behind one gradient.
"""


@pytest.fixture(autouse=True, scope="module")
def _nothing_left():
    """Models of other tests that are gone leave entries until the next model is reverted."""
    gc.collect()
    with _Attention():
        pass


@pytest.fixture(autouse=True)
def _registry():
    """Each test leaves transformers' functions as they were."""
    before = {name: ALL_ATTENTION_FUNCTIONS[name] for name in ALL_ATTENTION_FUNCTIONS.valid_keys()}
    yield
    now = {name: ALL_ATTENTION_FUNCTIONS[name] for name in ALL_ATTENTION_FUNCTIONS.valid_keys()}
    assert now == before


class _Attention:
    """The attention of a model, converted for a test and reverted after it."""

    def __init__(self, kind="llama", implementation="sdpa", config=QKV):
        torch.manual_seed(0)
        make, cls = MODULES[kind]
        self.config = make(**SIZES, attn_implementation=implementation)
        self.config._attn_implementation = implementation
        self.module = cls(self.config, 0).train()
        self.implementation, self.fp8 = implementation, config

    def __enter__(self):
        convert_to_float8(self.module, self.fp8)
        return self

    def __exit__(self, *exception):
        revert(self.module)

    def __call__(self, q, k, v, mask=None, **kwargs):
        name = self.implementation
        function = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_function(self.module))
        if self.implementation == "eager" and mask is None:
            hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
            mask = torch.zeros(TOKENS, TOKENS).masked_fill(hidden, -1e9).to(q.dtype)[None, None]
        out, _ = function(self.module, q, k, v, mask, scaling=DIM**-0.5, dropout=0.0, **kwargs)
        return out


def _operands(dtype=torch.float32, batch=2, frozen=()):
    generator = torch.Generator().manual_seed(1)
    tensors = []
    for heads in (HEADS, GROUPS, GROUPS):
        # As projections leave them: (B, S, H, D) in memory.
        x = torch.randn(batch, TOKENS, heads, DIM, generator=generator).transpose(1, 2)
        if len(tensors) == 1:
            x = x + 1.5 * torch.randn(1, heads, 1, DIM, generator=generator)
        tensors.append(x.to(dtype).detach().requires_grad_(len(tensors) not in frozen))
    return tensors


def _gradients(attention, tensors, **kwargs):
    out = attention(*tensors, **kwargs)
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
    trained = [t for t in tensors if t.requires_grad]
    return out.detach(), torch.autograd.grad(out, trained, g)


def _padding_mask():
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril().repeat(2, 1, 1, 1)
    mask[0, :, :, :30] = False  # padding on the left
    return mask | torch.eye(TOKENS, dtype=torch.bool)


CASES = {
    "sdpa": ("llama", "sdpa", {}),
    "padding": ("llama", "sdpa", {"mask": _padding_mask()}),
    "eager": ("llama", "eager", {}),
    "sliding window": (
        "mistral",
        "sdpa",
        {"mask": (torch.ones(TOKENS, TOKENS).tril() - torch.ones(TOKENS, TOKENS).tril(-16) > 0)},
    ),
    "flex": ("llama", "flex_attention", {}),
    "flash": ("llama", "flash_attention_2", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_keep_25_db(case, monkeypatch):
    kind, implementation, kwargs = CASES[case]
    _replace_kernels(monkeypatch)
    if "mask" in kwargs and kwargs["mask"].ndim == 2:
        kwargs = {"mask": kwargs["mask"][None, None]}
    attention = _Attention(kind, implementation)
    dtype = torch.bfloat16 if case == "flash" else torch.float32
    want = _gradients(attention, _operands(dtype), **kwargs)
    with attention:
        got = _gradients(attention, _operands(dtype), **kwargs)
    decibels = [sqnr_db(*pair) for pair in zip((want[0], *want[1]), (got[0], *got[1]), strict=True)]
    assert min(decibels) > GRADIENT, decibels
    assert decibels[0] < 40  # the values are rounded


class _Kernel(torch.autograd.Function):
    """A function that saves what it is given, as flash and flex attention do on a GPU."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return _causal(q, k, v)

    @staticmethod
    def backward(ctx, grad):
        operands = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            return torch.autograd.grad(_causal(*operands), operands, grad)


def _causal(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )


def _replace_kernels(monkeypatch):
    """Have transformers call `_Kernel` for flex and flash attention, which need a GPU."""
    from transformers.integrations import flash_attention, flex_attention

    def flash(query, key, value, *args, **kwargs):
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        return _Kernel.apply(q, k, v).transpose(1, 2)

    monkeypatch.setattr(
        flex_attention,
        "compile_friendly_flex_attention",
        lambda q, k, v, **_: _Kernel.apply(q, k, v),
    )
    monkeypatch.setattr(flash_attention, "_flash_attention_forward", flash)


@pytest.mark.parametrize(
    ("kind", "kwargs", "least"),
    [("gpt_oss", {}, 22.0), ("gemma2", {"softcap": 2.0}, 20.0)],
    ids=["sinks", "softcap"],
)
def test_k_is_not_centred_where_more_than_a_softmax_follows(kind, kwargs, least):
    """Without centring 23 to 27 dB are left; centred, attention would compute something else."""
    attention = _Attention(kind, "eager")
    want = _gradients(attention, _operands(), **kwargs)
    with attention:
        got = _gradients(attention, _operands(), **kwargs)
    decibels = [sqnr_db(*pair) for pair in zip((want[0], *want[1]), (got[0], *got[1]), strict=True)]
    assert min(decibels) > least, decibels


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", ["sdpa", "padding", "eager", "flash"])
def test_what_backward_reads_is_what_forward_has_multiplied(case, dtype, monkeypatch):
    """Packing loses nothing: gradients are those of attention over the rounded tensors."""
    from torch_fp8.nn import attention_dispatch

    kind, implementation, kwargs = CASES[case]
    if case == "flash":
        _replace_kernels(monkeypatch)
        if dtype == torch.float32:
            pytest.skip("flash attention takes no float32")
    rounded = []

    class Operands(attention_dispatch.SavedOperands):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            rounded.append([t.detach().clone().requires_grad_() for t in self.tensors])

    monkeypatch.setattr(attention_dispatch, "SavedOperands", Operands)
    attention = _Attention(kind, implementation)
    with attention:
        got = _gradients(attention, _operands(dtype), **kwargs)
    want = _gradients(attention, rounded[0], **kwargs)
    for one, other in zip((want[0], *want[1]), (got[0], *got[1]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("case", ["sdpa", "padding", "eager", "flex", "flash"])
def test_one_byte_an_element_is_saved(case, monkeypatch):
    kind, implementation, kwargs = CASES[case]
    _replace_kernels(monkeypatch)
    attention, tensors = _Attention(kind, implementation), _operands(torch.bfloat16)
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


@pytest.mark.parametrize("case", ["sdpa", "padding", "eager"])
def test_autocast_computes_with_the_rounded_tensors(case):
    """Rotated q and k are float32 in a model of float32; attention casts them by itself."""
    kind, implementation, kwargs = CASES[case]
    attention, tensors = _Attention(kind, implementation), _operands()
    with torch.autocast("cpu", torch.bfloat16):
        want = _gradients(attention, tensors, **kwargs)
        with attention, count_saved(tensors) as saved:
            got = _gradients(attention, tensors, **kwargs)
    assert [g.dtype for g in got[1]] == [torch.float32] * 3
    pairs = zip((want[0], *want[1]), (got[0], *got[1]), strict=True)
    assert all(sqnr_db(*pair) > GRADIENT for pair in pairs)
    sizes = {t.shape: t.dtype for t in saved.tensors}
    heads = HEADS + 2 * GROUPS
    codes = [t for t in saved.tensors if t.dtype == torch.float8_e4m3fn]
    assert sum(t.numel() for t in codes) == 2 * TOKENS * heads * DIM
    assert (2, GROUPS, TOKENS, DIM) not in sizes


def test_nothing_is_rounded_without_gradients():
    attention, tensors = _Attention(), _operands(torch.bfloat16)
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
    attention = _Attention()
    with attention:
        want = _gradients(attention, _operands())
        got = _gradients(attention, _operands(frozen=frozen))
    assert torch.equal(want[0], got[0])
    trained = [g for i, g in enumerate(want[1]) if i not in frozen]
    assert all(map(torch.equal, trained, got[1]))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("case", ["sdpa", "padding", "eager"])
def test_checkpoints_keep_nothing_and_give_the_same_gradients(case, reentrant):
    kind, implementation, kwargs = CASES[case]
    attention = _Attention(kind, implementation)

    def run(*tensors, **options):
        return checkpoint(attention, *tensors, use_reentrant=False, **options)

    with attention:
        want = _gradients(attention, _operands())
        if reentrant:
            out = checkpoint(attention, *_operands(), use_reentrant=True)
            assert sqnr_db(want[0], out) > GRADIENT
            return
        got = _gradients(run, _operands())
        tensors = _operands()
        with count_saved(tensors) as saved:
            run(*tensors, **kwargs)
    assert all(map(torch.equal, (want[0], *want[1]), (got[0], *got[1])))
    assert saved.total < 1024


def test_a_checkpoint_drops_what_attention_saves_beside_q_k_and_v():
    attention, storages = _Attention(), []

    def with_more(module, query, key, value, mask, **kwargs):
        more = (query / 8).exp()  # which saves its result
        storages.append(StorageWeakRef(more.untyped_storage()))
        return _causal(query, key, value) * more, None

    ALL_ATTENTION_FUNCTIONS["test_more"] = with_more
    attention.implementation = attention.config._attn_implementation = "test_more"
    try:
        with attention:
            out = checkpoint(attention, *_operands(), use_reentrant=False)
            assert storages[0].expired()
            out.sum().backward()
    finally:
        del ALL_ATTENTION_FUNCTIONS["test_more"]


def test_offloaded_tensors_are_codes():
    attention, offloaded = _Attention(), []

    def pack(tensor):
        offloaded.append(tensor.dtype)
        return tensor.clone()

    with attention:
        want = _gradients(attention, _operands())
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            got = _gradients(attention, _operands())
    assert all(map(torch.equal, (want[0], *want[1]), (got[0], *got[1])))
    assert offloaded.count(torch.float8_e4m3fn) == 3


def test_the_graph_can_run_twice():
    attention, tensors = _Attention(), _operands()
    with attention:
        out = attention(*tensors)
        first = torch.autograd.grad(out.sum(), tensors, retain_graph=True)
        second = torch.autograd.grad(out.sum(), tensors)
    assert all(map(torch.equal, first, second))


def test_tensors_that_were_written_to_are_saved_as_they_are():
    """A function that scales q in place, and no other tensor, gets the values that it wrote."""
    attention, tensors = _Attention(), _operands(batch=1)  # of which products take no copies

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
                results.append(_gradients(attention, tensors))
            assert ALL_ATTENTION_FUNCTIONS["test_scaled"] is function
        finally:
            del ALL_ATTENTION_FUNCTIONS["test_scaled"]
    (out, grads), (other, others) = results
    assert all(map(torch.equal, (out, *grads), (other, *others)))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_compiled_attention_stays_as_it_is(implementation):
    attention, tensors = _Attention("llama", implementation), _operands()
    want = _gradients(attention, tensors)
    with attention:
        got = _gradients(torch.compile(attention, fullgraph=True, backend="eager"), tensors)
    assert all(map(torch.equal, (want[0], *want[1]), (got[0], *got[1])))


def test_flash_attention_with_padding_gets_what_it_was_given():
    """It takes hidden tokens out, into tensors that are no views of what was rounded."""
    attention, tensors, seen = _Attention(), _operands(torch.bfloat16), []
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
    attention, tensors = _Attention(), _operands()
    with attention:
        want = attention(*tensors)
        attention.module = copy.deepcopy(attention.module)
        assert torch.equal(attention(*tensors), want)
        revert(attention.module)
    # The original is gone by now or is left, which the mapping does not outlive.
