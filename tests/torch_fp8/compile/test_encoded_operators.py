import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.steps import adamw
from torch_fp8 import FP8Config, convert_to_float8, freeze

SIZE = 64


def _trained(level):
    torch.manual_seed(0)
    layer = nn.Linear(SIZE, SIZE, bias=False)
    model, config = nn.Sequential(layer), FP8Config(recipe="tensorwise", opt_level=level)
    optimizer, _ = adamw(model, config, lr=1e-2)
    for steps in (True, False):
        optimizer.zero_grad()
        model(_x()).square().mean().backward()
        if steps:
            optimizer.step()
    return model, optimizer


def _x():
    return torch.randn(8, SIZE, generator=torch.Generator().manual_seed(1))


def _frozen():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, SIZE, bias=False)).requires_grad_(False)
    convert_to_float8(model, FP8Config(recipe="tensorwise"))
    freeze(model)
    return model, None


TENSORS = {
    "weight": ("O2", lambda model, optimizer: model[0].weight),
    "weight.data": ("O2", lambda model, optimizer: model[0].weight.data),
    "view": ("O2", lambda model, optimizer: model[0].weight.detach()[:32]),
    "gradient O2": ("O2", lambda model, optimizer: model[0].weight.grad),
    "gradient O3": ("O3", lambda model, optimizer: model[0].weight.grad),
    "moment": ("O2", lambda model, optimizer: optimizer.state[model[0].weight]["exp_avg"]),
    "frozen": (None, lambda model, optimizer: model[0].weight),
}


class Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.cat([x @ weight[i : i + 16].to(x.dtype).t() for i in (0, 16)], -1)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_weight = torch.zeros(weight.shape)
        for i in (0, 16):
            grad_weight[i : i + 16] += grad[:, i : i + 16].t() @ x
        return grad @ weight[:32].to(grad.dtype), grad_weight


def reads(w):
    return (
        w.view(-1) * 2,
        w[3:9].float() + 1,
        w[0] + w[torch.tensor([1, 5])],
        w.transpose(0, 1).to(torch.bfloat16).abs().max(),
        w.detach() + w.data,
        F.linear(_x(), w[:16].float()),
    )


def _written(write):
    @torch.no_grad()
    def function(w):
        write(w)
        return w.detach() + 0

    return function


WRITES = [
    _written(lambda w: w.mul_(0.5)),
    _written(lambda w: w.copy_(torch.ones(w.shape))),
    _written(lambda w: w.data.zero_()),
]


def _outside(function):
    """Run a function eagerly, where Dynamo still compiles each function that it calls."""
    return torch.compiler.disable(function, recursive=False)


def _tensor(name):
    level, choose = TENSORS[name]
    model, optimizer = _frozen() if level is None else _trained(level)
    return choose(model, optimizer), (model, optimizer)


def _check(name, function, compiled):
    (expected_of, _first), (given, _second) = _tensor(name), _tensor(name)
    expected, actual = function(expected_of), compiled(given)
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("name", ["weight", "view", "gradient O3"])
def test_what_is_read_in_a_graph(name):
    _check(name, reads, torch.compile(reads, backend="aot_eager"))


@pytest.mark.parametrize("name", TENSORS)
def test_what_is_read_and_written_beside_graphs(name):
    """Dynamo compiles none of the code that decodes and encodes."""
    for function in (reads, WRITES[0]):
        torch.compiler.reset()
        torch._dynamo.utils.clear_compilation_metrics()
        inner = _outside(function)
        compiled = torch.compile(lambda w, inner=inner: inner(w), backend="aot_eager")
        _check(name, function, compiled)
        frames = torch._dynamo.utils.get_compilation_metrics()
        ours = {m.co_name for m in frames if "torch_fp8/tensor" in m.co_filename}
        assert ours <= {"method"}  # of SplitWeight.float


@pytest.mark.long
@pytest.mark.parametrize("name", ["gradient O2", "gradient O3"])
def test_a_write_in_a_graph_is_done_by_eager_code(name):
    for function in WRITES:
        torch.compiler.reset()
        _check(name, function, torch.compile(function, backend="aot_eager"))


def test_the_gradient_of_a_weight_whose_slices_are_multiplied():
    function = _outside(lambda x, w: Chunked.apply(x, w))
    gradients = []
    for call in (
        lambda x, w: Chunked.apply(x, w),
        torch.compile(lambda x, w: function(x, w), backend="aot_eager"),
        torch.compile(lambda x, w: Chunked.apply(x, w), backend="aot_eager"),
    ):
        torch.compiler.reset()
        weight, _owners = _tensor("weight")
        weight.grad = None
        call(_x(), weight).square().mean().backward()
        gradients.append(weight.grad + 0)
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-2, atol=1e-6)
