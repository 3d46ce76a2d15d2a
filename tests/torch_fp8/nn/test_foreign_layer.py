import warnings

import pytest
import torch
from torch import nn

from tests.internals import quantized_by
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8, freeze, revert


def of(name, module, *bases, **members):
    return type(name, bases or (nn.Module,), {"__module__": module, **members})


def packed(**tensors):
    def make(cls):
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        for name, tensor in tensors.items():
            layer.register_buffer(name, tensor)
        return layer

    return make


def linear4bit():
    parameter = of("Params4bit", "bitsandbytes.nn.modules", nn.Parameter)
    weight = torch.zeros(32 * 64 // 2, 1, dtype=torch.uint8).as_subclass(torch.Tensor)
    weight = parameter(weight, requires_grad=False)
    weight.quant_type = "nf4"
    layer = nn.Linear(64, 32)
    layer.__class__ = of(
        "Linear4bit", "bitsandbytes.nn.modules", nn.Linear, forward=lambda self, x: x[..., :32]
    )
    layer._parameters["weight"] = weight
    return layer


def packed_compressed():
    layer = nn.Linear(64, 32)
    del layer._parameters["weight"]
    layer.register_parameter(
        "weight_packed", nn.Parameter(torch.zeros(32, 8, dtype=torch.int32), requires_grad=False)
    )
    layer.quantization_scheme = object()
    return layer


INT32 = torch.zeros(8, 32, dtype=torch.int32)
LAYERS = {
    "bitsandbytes (NF4)": linear4bit,
    "compressed-tensors": packed_compressed,
    "AWQ": lambda: packed(qweight=INT32)(of("WQLinear_GEMM", "awq.modules.linear.gemm")),
    "AWQ of GPTQModel": lambda: packed(qweight=INT32)(
        of("AwqTorchQuantLinear", "gptqmodel.nn_modules.qlinear.torch_awq")
    ),
    "GPTQ": lambda: packed(qweight=INT32)(
        of("TorchQuantLinear", "gptqmodel.nn_modules.qlinear.torch")
    ),
    "MXFP4": lambda: packed(gate_up_proj=torch.zeros(4, 64, 8, 16, dtype=torch.uint8))(
        of("Mxfp4GptOssExperts", "transformers.integrations.mxfp4")
    ),
    "HQQ": lambda: packed(W_q=torch.zeros(64, 32, dtype=torch.uint8))(
        of("HQQLinear", "hqq.core.quantize")
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_told_by_its_library_and_stays(name):
    model = nn.ModuleDict({"plain": nn.Linear(64, 64), "layer": LAYERS[name]()})
    before = type(model["layer"])
    library = name.partition(" of ")[0]
    assert quantized_by(model["layer"]) == library
    report = convert_to_float8(model, FP8Config(recipe="tensorwise"))
    assert report.converted == ("plain",)
    assert type(model["layer"]) is before
    line = f"  quantized 1 layer by {library}, which runs them as it does without FP8; to run"
    assert line in report.summary()
    assert "skipped   layer" not in report.summary()
    assert report.num_layers == 2
    assert 0 < report.flops_share <= 1
    freeze(model, FP8Config(recipe="tensorwise"))
    assert type(model["layer"]) is before


def test_plain_layers_are_nobodys():
    for layer in (nn.Linear(64, 64), nn.LayerNorm(8), nn.Embedding(4, 8), nn.ReLU()):
        assert quantized_by(layer) is None
    embedding = of("StableEmbedding", "bitsandbytes.nn.modules", nn.Embedding)(4, 8)
    assert quantized_by(embedding) is None


def test_a_model_that_is_quantized_throughout_is_no_error():
    model = nn.Sequential(linear4bit(), nn.RMSNorm(32), linear4bit())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = convert_to_float8(model, FP8Config(recipe="tensorwise"))
    assert report.converted == ()
    assert report.producers == ()
    assert "FP8: 0 of 2 linear layers, 0.0 %" in report.summary()
    assert "quantized 2 layers by bitsandbytes (NF4)" in report.summary()
    with pytest.raises(ValueError, match="no linear layer of Sequential can run in FP8"):
        convert_to_float8(nn.Sequential(nn.Linear(4, 4)), "tensorwise")


def test_an_optimizer_of_others_is_named_with_its_library():
    model = nn.Sequential(nn.Linear(64, 64))
    convert_to_float8(model, FP8Config(recipe="tensorwise"))
    adam = of("AdamW", "bitsandbytes.optim.adamw", torch.optim.Optimizer)
    report = convert_optimizer(adam(model.parameters(), {}), model=model)
    assert str(report).startswith("AdamW of bitsandbytes keeps its own states: ")


def test_a_weight_that_torchao_has_quantized_after_the_conversion_is_refused_by_name():
    class Int8Tensor(torch.Tensor):
        __module__ = "torchao.quantization"

    model = nn.Sequential(nn.Linear(64, 64))
    convert_to_float8(model, FP8Config(recipe="tensorwise"))
    weight = model[0].weight.detach().as_subclass(Int8Tensor)
    model[0].weight = nn.Parameter(weight, requires_grad=False)
    with pytest.raises(TypeError, match=r"'0' is torchao's Int8Tensor: call torch_fp8.revert"):
        model(torch.randn(4, 64))
    revert(model)
    model(torch.randn(4, 64))
