import copy
import io

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from tests.internals import warn_once
from tests.torch_fp8.converted_models import KINDS, SIZE, stock_and_converted
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8, revert, rollout

RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8")


def _x():
    return torch.randn(4, SIZE, generator=torch.Generator().manual_seed(1))


def _exported(model, strict=False, **options):
    program = torch.export.export(model, (_x(),), strict=strict, **options)
    targets = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    assert not [t for t in targets if "fp8" in t.split(".")[0] or "empty" in t]
    return program.module()


def _made_fx(mode):
    def run(model):
        weights = dict(model.named_parameters())

        def called(weights, x):
            return functional_call(model, weights, (x,))

        graph = make_fx(called, tracing_mode=mode)(weights, _x())
        return lambda x: graph(weights, x)

    return run


def _onnx(dynamo):
    def run(model):
        onnx = pytest.importorskip("onnx")
        if dynamo:
            pytest.importorskip("onnxscript")
            made = torch.onnx.export(model, (_x(),), dynamo=True, verbose=False).model_proto
        else:
            file = io.BytesIO()
            torch.onnx.export(model, (_x(),), file, dynamo=False)
            made = onnx.load_from_string(file.getvalue())
        session = pytest.importorskip("onnx.reference").ReferenceEvaluator(made)
        return lambda x: torch.tensor(session.run(None, {made.graph.input[0].name: x.numpy()})[0])

    return run


TRACERS = {
    "make_fx": _made_fx("real"),
    "make_fx of fake tensors": _made_fx("fake"),
    "jit.trace": lambda m: torch.jit.trace(m, (_x(),), check_trace=False),
    "symbolic_trace": torch.fx.symbolic_trace,
}
SLOW = {
    "make_fx of symbols": _made_fx("symbolic"),
    "onnx": _onnx(True),
    "onnx of jit": _onnx(False),
}


def _check(stock, graph):
    torch.testing.assert_close(graph(_x()), stock(_x()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_is_that_of_the_stock_model(kind):
    stock, converted = stock_and_converted(kind)
    _check(stock, _exported(converted.eval()))


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_export_in_training_mode_of_each_recipe(recipe):
    stock, converted = stock_and_converted("linear", recipe)
    before = {name: b.clone() for name, b in converted.named_buffers()}
    _check(stock, _exported(converted))
    for name, buffer in converted.named_buffers():
        assert torch.equal(before[name], buffer)


def test_a_strict_export():
    stock, converted = stock_and_converted("SwiGLU")
    _check(stock, _exported(converted.eval(), strict=True))


def test_an_export_without_gradients_for_any_number_of_rows():
    stock, converted = stock_and_converted("linear")
    rows = {"dynamic_shapes": ({0: torch.export.Dim("rows")},)}
    with torch.no_grad():
        graph = _exported(converted.eval(), **rows)
        x = torch.randn(7, SIZE)
        torch.testing.assert_close(graph(x), stock(x))


def test_an_export_in_a_rollout():
    stock, converted = stock_and_converted("linear")
    with rollout(converted, compiled=True), torch.no_grad():
        _check(stock, _exported(converted))


def test_an_export_of_weights_in_16_bits_takes_inputs_of_32():
    stock, converted = stock_and_converted("linear")
    optimizer = torch.optim.AdamW(converted.parameters())
    convert_optimizer(optimizer, FP8Config(opt_level="O2"), model=converted)
    y = _exported(converted.eval())(_x())
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, stock(_x()), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_tracer_records_the_stock_model(kind, tracer):
    if kind == "frozen" and tracer == "make_fx of fake tensors":
        return  # of fake tensors alone, which a Parameter that is no plain tensor is not
    stock, converted = stock_and_converted(kind)
    _check(stock, TRACERS[tracer](converted.eval()))


@pytest.mark.long
@pytest.mark.parametrize("tracer", SLOW)
def test_a_slow_tracer_records_the_stock_model(tracer):
    stock, converted = stock_and_converted("linear")
    _check(stock, SLOW[tracer](converted.eval()))


def test_a_graph_of_dynamo_is_exported_with_its_products_in_fp8():
    """What stands for a layer in it is called under the modes of export, as under Dynamo's own."""
    _, converted = stock_and_converted("SwiGLU")
    graphs = []

    def keep(graph, inputs):
        graphs.append((graph, tuple(inputs)))
        return graph

    y = torch.compile(converted, backend=keep, fullgraph=True)(_x())
    ((graph, inputs),) = graphs
    program = torch.export.export(graph, inputs, strict=False)
    assert "torch_fp8.scaled_mm" in str(program.graph)
    torch.testing.assert_close(program.module()(*inputs)[0], y)


def test_what_asks_for_shapes_alone_still_runs_in_fp8():
    _, converted = stock_and_converted("SwiGLU")
    y = converted(_x())
    with FlopCounterMode(display=False) as counter:
        assert torch.equal(converted(_x()), y)
    assert counter.get_total_flops() == 2 * 4 * 3 * 48 * SIZE
    assert converted.to("meta")(_x().to("meta")).shape == y.shape


def test_a_model_trains_in_fp8_after_an_export(scaled_mm_calls):
    _, converted = stock_and_converted("linear")
    _exported(converted)
    converted(_x()).sum().backward()
    assert len(scaled_mm_calls) > 2


@pytest.mark.parametrize("tool", ["trace", "export"])
def test_a_program_with_weights_in_two_halves_says_how_to_save_it(tool):
    """`torch.jit.save` crashes the process for such weights, and ONNX raises an error."""
    model = nn.Sequential(nn.Linear(SIZE, 128))
    config = FP8Config(recipe="tensorwise")
    convert_to_float8(model, config)
    convert_optimizer(torch.optim.AdamW(model.parameters()), config, model=model)
    tools = {
        "trace": lambda m: torch.jit.trace(m, (_x(),), check_trace=False),
        "export": lambda m: torch.export.export(m, (_x(),)),
    }
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match=r"torch_fp8.revert\(stock\)"):
        tools[tool](model)
    stock = copy.deepcopy(model)
    revert(stock)
    program = tools[tool](stock)
    if tool == "trace":
        torch.jit.save(program, io.BytesIO())
    else:
        program.run_decompositions()
