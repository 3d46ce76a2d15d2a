import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.internals import keep_stream
from torch_fp8 import revert

NORMS = {
    "layer": lambda: nn.LayerNorm(16),
    "group": lambda: nn.GroupNorm(4, 16),
    "batch": lambda: nn.BatchNorm1d(16),
    "instance": lambda: nn.InstanceNorm1d(16, affine=True, track_running_stats=True),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(x) + x


@pytest.mark.usefixtures("single_process_group")
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_computes_in_float32(norm, training):
    sharded = NORMS[norm]().train(training)
    nn.init.normal_(sharded.weight)
    reference = copy.deepcopy(sharded)
    reference.weight.data = reference.weight.data.bfloat16().float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    fully_shard(sharded, mp_policy=policy)
    keep_stream(sharded)
    x = torch.randn(8, 16) if norm != "instance" else torch.randn(8, 16, 4)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = sharded(x), reference(x)
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    for output in (y, expected):
        output.square().sum().backward()
    grad = sharded.weight.grad.full_tensor()
    torch.testing.assert_close(grad, reference.weight.grad, rtol=2**-7, atol=2**-7)
    assert "weight" not in vars(sharded)
    revert(sharded)
    ours = [*sharded._forward_pre_hooks.values(), *sharded._forward_hooks.values()]
    assert not any("_fp8" in type(hook).__module__ for hook in ours)


def test_a_norm_that_raised_has_its_weights():
    norm = nn.LayerNorm(16).bfloat16()
    keep_stream(norm)
    with pytest.raises(RuntimeError):
        norm(torch.randn(2, 15))
    assert norm.weight is norm._parameters["weight"]


def test_compiled_blocks_share_one_graph():
    counter = CompileCounter()
    model = nn.Sequential(*[Block() for _ in range(3)]).bfloat16()
    keep_stream(model)
    for block in model:
        block.compile(backend=counter, fullgraph=True)
    with torch.no_grad():
        model(torch.randn(2, 16))
    assert counter.frame_count == 1
