import ast
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import torch_fp8.ops.registry as module
from tests.internals import CastOptions, make_recipe
from tests.processes import ran
from torch_fp8.ops import quantize as casts
from torch_fp8.ops.quantize import quantize_layouts
from torch_fp8.ops.swiglu import swiglu_save

OPTIONS = CastOptions(torch.float8_e4m3fn, "tensorwise", False, True, True)


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def direct(monkeypatch):
    calls = []

    def implementation(*arguments):
        calls.append(arguments)
        qdata, scale, _, _ = casts.quantize_2d.reference(*arguments)
        return qdata, scale, None, None

    monkeypatch.setattr(module, "on_cuda", lambda x: True)
    monkeypatch.setattr(module, "emulates_casts", lambda device: False)
    monkeypatch.setattr("torch_fp8.kernels.quantize.quantize_2d", implementation)
    return calls


@pytest.mark.parametrize("make", [torch.randn, lambda *s: nn.Parameter(torch.randn(*s))])
def test_plain_tensors_go_to_the_implementation(direct, make):
    x, spec = make(32, 64), make_recipe("tensorwise").input
    with torch.no_grad():
        row, col = quantize_layouts(x, CastOptions.of(spec, rowwise=True, columnwise=False))
    assert len(direct) == 1
    assert col is None
    expected = casts.quantize_2d.reference(x.detach(), OPTIONS)
    assert torch.equal(row.qdata.float(), expected[0].float())
    assert torch.equal(row.scale, expected[1])


def test_the_cpu_goes_through_the_dispatcher(monkeypatch):
    monkeypatch.setattr("torch_fp8.kernels.quantize.quantize_2d", None)
    made = casts.quantize_2d(torch.randn(32, 64), OPTIONS)
    assert made[2].shape == (64, 32)


def test_a_mode_sees_the_operator(direct):
    with Seen() as seen:
        casts.quantize_2d(torch.randn(32, 64), OPTIONS)
    assert "torch_fp8::quantize_2d" in seen.names
    assert not direct


def test_a_subclass_is_dispatched(direct):
    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.randn(32, 64))
    made = casts.quantize_2d(x, OPTIONS)
    assert type(made[0]) is type(x)
    assert not direct


def test_autograd_is_told(direct):
    x = torch.randn(32, 64, requires_grad=True)
    casts.quantize_2d(x, OPTIONS)
    assert not direct
    with torch.no_grad():
        casts.quantize_2d(x, OPTIONS)
    assert len(direct) == 1


def test_a_compiled_graph_has_the_operator(direct):
    targets = []

    def backend(graph, inputs):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    compiled = torch.compile(
        lambda x: casts.quantize_2d(x, OPTIONS)[0], backend=backend, fullgraph=True
    )
    compiled(torch.randn(32, 64))
    assert any("torch_fp8.quantize_2d" in target for target in targets)


def _names_in_sources():
    """Return the operators that the sources of the engine define."""
    for path in Path(module.__file__).parents[1].rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                calls = [d.func for d in node.decorator_list if isinstance(d, ast.Call)]
                if "operator" in {call.id for call in calls if isinstance(call, ast.Name)}:
                    yield node.name
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "define":
                schemas = (a.value for a in node.args[:1] if isinstance(a, ast.Constant))
                yield from (schema.partition("(")[0] for schema in schemas)


def test_importing_the_package_of_operators_defines_all_of_them(forked_python):
    code = (
        "import json, torch, torch_fp8.ops; names = torch._C._dispatch_get_all_op_names();"
        "print(json.dumps([n for n in names if n.startswith('torch_fp8::')]))"
    )
    printed = ran(forked_python, "-c", code).stdout
    names = {name.removeprefix("torch_fp8::") for name in json.loads(printed)}
    assert names == set(_names_in_sources())
    assert len(names) > 30


def test_arguments_with_their_defaults_reach_the_reference():
    gate, up = torch.randn(4, 16), torch.randn(4, 16)
    made, told = swiglu_save(gate, up, None), swiglu_save(gate, up, None, True)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(made, told, strict=True))
    assert [part.numel() for part in swiglu_save(gate, up, None, False)] == [0, 0, 0, 0, 1]


def test_graphs_replay_what_the_launcher_did(monkeypatch):
    """What the dispatcher calls on CUDA is recorded as eager calls are, in the same recordings."""
    defined, calls = [], []
    monkeypatch.setattr(
        module,
        "define",
        lambda schema, *functions, eager, traced, of_tuple: (
            defined.extend((*functions, eager)) or _call
        ),
    )

    def _call(*args):
        raise AssertionError

    def launch(x, factor):
        calls.append(x)
        return x.new_empty(x.shape), None

    monkeypatch.setattr(module, "_module", lambda name: SimpleNamespace(tried=launch))
    monkeypatch.setattr(module, "emulates_casts", lambda device: False)

    @module.operator(lambda x, factor: (x, x), results=2)
    def tried(x: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor | None]:
        raise AssertionError

    _cpu, cuda, _fake, eager = defined
    for run in (cuda, cuda, cuda, eager):
        result, nothing = run(torch.ones(4), 2.0)
        assert result.shape == (4,)
        assert nothing is None if run is eager else nothing.shape == (0,)
    assert len(calls) == 2
