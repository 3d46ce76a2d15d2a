"""In graphs for CUDA the compiler sees kernels; tests/emulator/test_graphs.py runs such graphs."""

from collections import Counter
from unittest import mock

import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.codecache import compiled_fx_graph_hash

from tests.compiled_graphs import traced_for_card
from tests.internals import cast_kernel
from torch_fp8 import FP8Config, convert_to_float8

KERNELS, CASTS = "triton_kernel_wrapper_functional", "torch_fp8.quantize_2d.default"


def layer(**options):
    torch.manual_seed(0)
    linear = nn.Linear(64, 48, bias=False, dtype=torch.bfloat16)
    convert_to_float8(linear, FP8Config(recipe="tensorwise", **options))
    return linear


def forward_graph(tokens=32, **options):
    graphs = []

    def keep(module, inputs):
        graphs.append((module, inputs))
        return make_boxed_func(lambda *args: [torch.empty(tokens, 48, dtype=torch.bfloat16)])

    x = torch.randn(tokens, 64, dtype=torch.bfloat16)
    torch.compiler.reset()
    with torch.no_grad():
        model = layer(eval_fp8=True).eval()
        torch.compile(model, backend=aot_autograd(fw_compiler=keep), **options)(x)
    return graphs[-1]


def counts(module):
    return Counter(str(node.target) for node in module.graph.nodes)


def test_a_cast_is_its_kernels():
    with traced_for_card():
        nodes = counts(forward_graph()[0])
        several = counts(forward_graph(dynamic=True)[0])
    assert (nodes[KERNELS], nodes[CASTS]) == (2, 0)  # input and weight, each in one tile
    assert (several[KERNELS], several[CASTS]) == (3, 0)  # any number of tokens: amax, then cast


def test_operators_stay_whole_on_the_cpu_and_on_older_cards():
    old = mock.patch("torch_fp8.ops.registry.emulates_casts", return_value=True)
    with traced_for_card(), old:
        older = counts(forward_graph()[0])
    assert (older[KERNELS], older[CASTS]) == (0, 2)
    on_cpu = counts(forward_graph()[0])
    assert (on_cpu[KERNELS], on_cpu[CASTS]) == (0, 2)


def test_without_tokens_only_the_weight_is_cast():
    with traced_for_card():
        nodes = counts(forward_graph(0)[0])
    assert (nodes[KERNELS], nodes[CASTS]) == (1, 0)


def test_a_changed_kernel_is_compiled_again():
    def key():
        torch.compiler.reset()
        with traced_for_card():
            module, inputs = forward_graph()
        return compiled_fx_graph_hash(module, inputs, {}, [])[0]

    first = key()
    assert key() == first
    outlines = vars(cast_kernel)["_outlines"]
    for known in outlines.values():
        known.fn.text += "\n    # changed"
    changed = key()
    outlines.clear()
    assert changed != first
