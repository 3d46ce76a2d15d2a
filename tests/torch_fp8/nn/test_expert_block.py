import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tests.internals import (
    GateForm,
    cast_stacked,
    expert_block,
    expert_recipe,
    sqnr_db,
    transposed_at_once,
    transposed_stacked,
)
from tests.kernel_cases.comparison import same_bits
from tests.moe_experts import CLASSES, E, K
from tests.moe_experts import batch as _batch
from tests.moe_experts import experts as _experts
from tests.moe_experts import run as _run
from tests.saved_activations import count_saved
from torch_fp8 import FP8Config, convert_to_float8

LIMITS = {"alpha": 1.702, "limit": 7.0}
FORMS = {
    "plain": GateForm(),
    "gpt-oss": GateForm(True, True, **LIMITS),
    "transposed": GateForm(),
    "transposed-bias": GateForm(False, True, **LIMITS),
}


@pytest.mark.parametrize("layout", CLASSES)
def test_the_form_of_a_gate_is_found(layout):
    experts = _experts(layout)
    convert_to_float8(experts)
    form = None if experts.fp8_gate is None else experts.fp8_gate.spec
    assert form == FORMS.get(layout)


def test_a_gate_of_its_own_runs_layer_by_layer():
    experts, batch = _experts(), _batch(64)
    experts.act_fn = torch.nn.GELU()
    want = _run(experts, *batch)
    convert_to_float8(experts)
    assert experts.fp8_gate is None
    assert sqnr_db(want["y"], _run(experts, *batch)["y"]) >= 22.5


def test_hooks_of_the_activation_are_called():
    experts, batch, seen = _experts(), _batch(20), []
    convert_to_float8(experts)
    experts(*batch)
    handle = experts.act_fn.register_forward_hook(lambda *_: seen.append(1))
    experts(*batch)
    handle.remove()
    experts(*batch)
    assert len(seen) == 1


@pytest.mark.parametrize("layout", ["plain", "gpt-oss"])
def test_a_block_has_the_gradients_of_its_layers(layout):
    """Layer by layer the activation comes from BF16, here from E4M3 in backward: both are 22 dB or
    more from BF16, and the outputs differ by roundings to BF16 alone.
    """
    sizes = {"hidden_size": 512, "moe_intermediate_size": 384, "intermediate_size": 384}
    experts, (_, index, scores) = _experts(layout, **sizes), _batch(400)
    x, grad = torch.randn(400, 512), torch.randn(400, 512)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=512**-0.5)
    want = _run(experts, x, index, scores, grad)
    convert_to_float8(experts)
    block = _run(experts, x, index, scores, grad)
    experts.fp8_gate = None
    layers = _run(experts, x, index, scores, grad)
    for name, value in want.items():
        assert sqnr_db(value, block[name]) >= 22 - (name == "scores"), name  # few values
        assert sqnr_db(layers[name], block[name]) >= 24.5 + 10 * (name == "y"), name


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "hidden", "width", "count", "block", "bound"),
    [
        pytest.param("plain", 256, 96, (16, 8), True, 0.15, id="qwen3"),
        pytest.param("plain", 448, 128, (16, 8), True, 0.15, id="deepseek-v3"),
        pytest.param("plain", 256, 896, (8, 2), True, 0.25, id="mixtral"),
        pytest.param("gpt-oss", 192, 192, (16, 4), True, 0.2, id="gpt-oss"),
        pytest.param("plain", 256, 96, (16, 8), False, 0.5, id="qwen3, layer by layer"),
    ],
)
def test_few_of_the_bytes_of_stock_are_saved(layout, hidden, width, count, block, bound):
    """At sizes in the ratio of the models'; weights are BF16 in stock, too."""
    sizes = {"hidden_size": hidden, "moe_intermediate_size": width, "intermediate_size": width}
    num_experts, top_k = count
    tokens = 24576 // num_experts
    numbers = dict.fromkeys(("num_experts", "num_local_experts"), num_experts)
    experts = _experts(layout, **sizes, **numbers).bfloat16()
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    scores, index = torch.randn(tokens, num_experts).softmax(-1).topk(top_k)
    scores = scores.bfloat16().requires_grad_()
    with count_saved(experts.parameters()) as stock:
        experts(x, index, scores)
    convert_to_float8(experts)
    if not block:
        experts.fp8_gate = None
    with count_saved(experts.parameters()) as ours:
        experts(x, index, scores)
    assert ours.total <= bound * stock.total


class _Sizes(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.bytes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        if func.namespace == "torch_fp8":
            self.bytes += [t.nbytes for t in tree_leaves(results)]
        return results


def test_no_tensor_of_rows_and_hidden_is_made_for_the_scores():
    """Backward of the scores alone makes the gradient of each row's first operand, (R, I)."""
    experts, (_, index, scores) = _experts(hidden_size=256).requires_grad_(False), _batch(64)
    convert_to_float8(experts, FP8Config(frozen_weights="keep"))
    scores.requires_grad_()
    y = experts(torch.randn(64, 256), index, scores)
    rows = 64 * K + 16 * E
    with _Sizes() as sizes:
        (grad,) = torch.autograd.grad(y, scores, torch.ones_like(y))
    assert grad.any()
    assert rows * 256 <= max(sizes.bytes) < 2 * rows * 256, "the gathered payload is the largest"


def test_weights_transposed_at_once_are_those_of_one_after_the_other():
    spec = expert_recipe(FP8Config()).weight
    weights = torch.randn(3, 48, 40) * 2.0 ** torch.randint(-8, 9, (3, 48, 1))
    weights[1, 5] = 0
    payload = cast_stacked(weights, spec, flip=False)
    for got, want in zip(
        transposed_at_once(payload), transposed_stacked(payload, spec), strict=True
    ):
        if isinstance(want, torch.Tensor):
            same_bits(got, want)


@pytest.mark.parametrize("frozen", [("gate_up_proj",), ("down_proj",), ()])
def test_only_wanted_gradients_are_made(frozen):
    experts, (x, index, scores) = _experts("gpt-oss"), _batch(40)
    convert_to_float8(experts, FP8Config(frozen_weights="keep"))
    want = _run(experts, x, index, scores)
    for name in frozen:
        getattr(experts, name).requires_grad_(False)
    y = experts(x, index, scores)  # neither tokens nor scores want one
    experts.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        y = experts(x, index, scores)
    y.float().backward(torch.ones(y.shape))
    for name, parameter in experts.named_parameters():
        assert (parameter.grad is None) == (name in frozen)
        assert name in frozen or torch.equal(parameter.grad, want[name])


def test_a_forward_without_gradients_saves_nothing():
    experts, batch = _experts(), _batch(40)
    convert_to_float8(experts)
    want = experts(*batch)
    with torch.no_grad(), count_saved() as saved:
        assert torch.equal(experts(*batch), want)
    assert saved.total == 0


def test_the_first_pass_of_a_checkpoint_makes_nothing_to_save(spy):
    experts, (x, index, scores) = _experts(), _batch(40)
    convert_to_float8(experts)
    saves = spy(expert_block, "expert_gate_quantize", lambda *args: args[-1])
    x.requires_grad_()
    y = checkpoint(experts, x, index, scores, use_reentrant=False)
    (got,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert saves == [False, True]
    (want,) = torch.autograd.grad(experts(x, index, scores), x, torch.ones_like(y))
    assert torch.equal(got, want)
