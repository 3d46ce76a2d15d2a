import copy
import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.internals import ATTENTION, CASTS
from tests.torch_fp8.block_models import LlamaLayer
from torch_fp8 import FP8Config, convert_to_float8, selective_checkpoint_contexts

BF16 = torch.bfloat16


def _run(model, function, x):
    """Output and gradients of ``function(x)``, which computes on the parameters of `model`."""
    x = x.clone().requires_grad_()
    y = function(x)
    (y.float() * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    return [y.detach(), x.grad, *grads]


def _x(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(BF16)


def test_eager_mode_is_refused_with_what_to_take():
    layer = nn.Linear(64, 64).bfloat16()
    convert_to_float8(layer, FP8Config(recipe="tensorwise"))
    x = _x(32, 64).requires_grad_()
    with pytest.raises(RuntimeError, match="in eager mode: compile the model, leave"):
        checkpoint(layer, x, use_reentrant=False, context_fn=selective_checkpoint_contexts)
    checkpoint(layer, x, use_reentrant=False).sum().backward()  # nothing is left behind
    assert x.grad is not None


def test_the_list_of_casts_is_complete():
    """Every operator of a forward that returns FP8 may be kept, and none that returns 16 bits.

    Of blocks of experts nothing is kept: they run again as a whole.
    """
    ours = {
        name.partition("::")[2].partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("torch_fp8::")
    }
    backward = {name for name in ours if "backward" in name}
    others = {"rms_norm", "swiglu", "scaled_mm", "scaled_grouped_mm"}
    others |= {"transposed_bytes", "quantize_2d_beside", "cast_side_by_side"}  # in backward
    others |= {"gather_payload", "transpose_payload", "combine_rows", "expert_gate_quantize"}
    others |= {"transpose_experts", "quantize_joined", "sum_norm_quantize_once"}  # graphs for CUDA
    others |= {"linear_softmax_loss", "cross_entropy_rows", "cross_entropy_quantize"}  # the loss
    assert ours - backward - others == set(CASTS)
    for name in ATTENTION:
        assert hasattr(torch.ops.aten, name)


def _results(graph):
    """The tensors, without substance, that a traced graph returns."""
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    values = [n.meta["val"] for n in output.args[0] if isinstance(n, torch.fx.Node)]
    return [v for v in values if isinstance(v, torch.Tensor)]


@pytest.mark.long
@pytest.mark.parametrize(
    "recipe", ["tensorwise", pytest.param("blockwise", marks=pytest.mark.smoke)]
)
def test_in_a_compiled_graph_torch_keeps_fp8(recipe):
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    model, x = LlamaLayer(recipe=recipe), _x(12, 32, 128)
    twin, graphs, payloads = copy.deepcopy(model), [], []

    def keep(graph, inputs):
        graphs.append(str(graph.graph))
        payloads.append([v.shape for v in _results(graph) if v.dtype == torch.float8_e4m3fn])
        return graph

    backend = aot_autograd(
        fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition
    )
    function = functools.partial(
        checkpoint, twin, use_reentrant=False, context_fn=selective_checkpoint_contexts
    )
    got = _run(twin, torch.compile(function, backend=backend, fullgraph=True), x)
    for want, ours in zip(_run(model, model, x), got, strict=True):
        assert torch.equal(want, ours)
    forward, backward = graphs
    once = {"tensorwise": "rms_norm_statistics", "blockwise": "rms_norm_quantize_once"}[recipe]
    assert f"torch.ops.torch_fp8.{once}.default" in forward
    assert f"torch.ops.torch_fp8.{once}.default" not in backward
    assert payloads[0]
    assert all(384 in shape for shape in payloads[0])  # tokens: of weights they are made again
