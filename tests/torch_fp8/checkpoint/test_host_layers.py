"""Linear layers as compressed-tensors changes them are taken over with their bytes.

transformers' own layers are tested where the host is: tests/accelerate_fp8/test_fp8_checkpoints.py.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from tests.fp8_checkpoints import exact, quantized
from tests.internals import residual_of, take_over
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8, merged_state_dict

BLOCKS = {"tensor": (256, 128), "channel": (1, 128), "group": (1, 32), "block": (128, 128)}


class _Quantizer:
    def remove_quantization_config(self, model):
        del model.hf_quantizer
        model.is_quantized = False


def _compressed(strategy):
    """A model as compressed-tensors 0.15 leaves it before the first forward, and its weights."""
    model = nn.Sequential(nn.Linear(128, 256, bias=False), nn.ReLU(), nn.Linear(256, 128))
    block = BLOCKS[strategy]
    qdata, scale = quantized(model[0].weight.detach(), block)
    layer = model[0]
    layer.weight = nn.Parameter(qdata)
    layer.weight_scale = nn.Parameter(scale.reshape(1) if strategy == "tensor" else scale)
    weights = SimpleNamespace(strategy=strategy, group_size=32, block_structure=[128, 128])
    layer.quantization_scheme = SimpleNamespace(weights=weights)
    layer.quantization_status = "compressed"
    layer.forward = layer.forward
    model.hf_quantizer, model.is_quantized = _Quantizer(), True
    model.decompressed = []
    model.ct_decompress_hook = model.register_forward_pre_hook(
        lambda module, args: module.decompressed.append(1)
    )
    return model, qdata, scale, block


@pytest.mark.parametrize("strategy", BLOCKS)
def test_trained_layers_continue_from_their_exact_values(strategy):
    model, qdata, scale, block = _compressed(strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    (line,) = take_over(model, FP8Config())
    assert line.startswith(
        "1 compressed-tensors layers were replaced by linear layers: 1 are trained"
    )
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "2.weight", "2.bias"]
    convert_to_float8(model)
    convert_optimizer(optimizer, model=model)
    true = exact(qdata, scale, block)
    error = (merged_state_dict(model, optimizer)["0.weight"] - true).abs()
    assert (error <= 2.0**-16 * true.abs()).all()
    model[2].bfloat16()
    model(torch.randn(4, 128).bfloat16()).float().sum().backward()
    assert model[0].weight.grad is not None
    assert model.decompressed == []
    assert not model.is_quantized


@pytest.mark.usefixtures("single_process_group")
def test_before_sharding_and_after_it_no_residual_waits():
    model, *_ = _compressed("block")
    take_over(model, FP8Config(), sharded=True)
    assert residual_of(model[0].weight) is None
    model, *_ = _compressed("block")
    mesh = init_device_mesh("cpu", (1,))
    model[2].weight = nn.Parameter(distribute_tensor(model[2].weight.detach(), mesh))
    take_over(model, FP8Config())
    assert residual_of(model[0].weight) is None


@pytest.mark.parametrize("strategy", BLOCKS)
def test_frozen_layers_hold_the_bytes_where_their_blocks_allow(strategy):
    model, qdata, scale, block = _compressed(strategy)
    model.requires_grad_(False)
    (line,) = take_over(model, FP8Config())
    convert_to_float8(model)
    held = model[0].frozen_weight
    same = held.qdata.view(torch.uint8).equal(qdata.view(torch.uint8))
    assert same == (strategy in ("tensor", "block"))
    assert ("1 keep the same bytes" if same else "1 are quantized again, block_128x128") in line
    true = exact(qdata, scale, block)
    error = (held.dequantize().double() - true).norm() / true.norm()
    assert error < (2.0**-8 if same else 2.0**-4)
    x = torch.randn(4, 128)
    expected = x.double() @ true.t()
    assert (model[0](x) - expected).norm() < 0.1 * expected.norm()
    assert "frozen" in repr(model[0])


def test_scales_of_another_shape_are_named_and_nothing_is_changed():
    model, *_ = _compressed("channel")
    model[0].weight_scale.data = model[0].weight_scale.data[1:]
    with pytest.raises(
        ValueError, match=r"'0\.weight_scale' has shape .*: the checkpoint is broken"
    ):
        take_over(model, FP8Config())
    assert model[0].weight.dtype == torch.float8_e4m3fn
    assert model.is_quantized


def test_one_broken_layer_leaves_the_others_as_they_are():
    broken, *_ = _compressed("channel")
    whole, *_ = _compressed("channel")
    broken[0].weight_scale.data[7] = -1.0
    with pytest.raises(ValueError, match=r"'0\.0\.weight_scale' holds a scale that is not finite"):
        take_over(nn.Sequential(broken, whole), FP8Config())
    assert whole[0].weight.dtype == torch.float8_e4m3fn
