import contextlib
import inspect

import pytest
import torch
from torch import nn

import accelerate_fp8
import torch_fp8
from tests.internals import make_setup
from torch_fp8 import FP8Config, convert_to_float8, distributed, memory_report
from torch_fp8.distributed import Float8ColwiseParallel, PrepareFloat8ModuleInput

FUNCTIONS = {
    name: getattr(package, name)
    for package in (torch_fp8, distributed, accelerate_fp8)
    for name in package.__all__
    if inspect.isfunction(getattr(package, name))
}
CLASSES = (torch_fp8.Monitor, Float8ColwiseParallel, PrepareFloat8ModuleInput)
FUNCTIONS |= {cls.__name__: cls for cls in CLASSES}
CHECKED = {**FUNCTIONS, "plan": make_setup}
"""The functions with the annotations. `plan` passes its options on."""
CASES = [("plan", "levels")] + [
    (name, parameter.name)
    for name, function in CHECKED.items()
    for parameter in inspect.signature(function).parameters.values()
    if "Any" not in str(parameter.annotation)
]


def _call(name, /, **wrong):
    """Call a public function with valid values for the other arguments without defaults."""
    model = nn.Sequential(nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    valid = {"cls": nn.Identity, "config": FP8Config(monitor=1), "path": "missing", "state": {}}
    indices = torch.zeros(2, dtype=torch.long)
    valid |= {"indices": indices.view(2, 1, 1), "optimizers": [optimizer]}
    valid |= {"model": "llama-3.2-1b" if name == "plan" else model, "optimizer": optimizer}
    valid |= {"module": model, "ddp": model, "precision": "bf16"}
    valid |= {"hidden": torch.zeros(2, 64), "weight": torch.zeros(8, 64), "labels": indices}
    parameters = inspect.signature(FUNCTIONS[name]).parameters.values()
    given = {p.name: valid[p.name] for p in parameters if p.default is p.empty and p.kind != 4}
    result = FUNCTIONS[name](**(given | wrong))
    if inspect.isgenerator(result):
        list(result)
    elif isinstance(result, contextlib.AbstractContextManager):
        result.__enter__()


@pytest.mark.parametrize(("name", "argument"), CASES, ids=map("-".join, CASES))
def test_an_argument_of_another_type_is_named(name, argument):
    for value in (object(), b"x", [object()], 1j):
        with pytest.raises(TypeError, match=rf"^{name}\({argument}=...\) takes |^config is "):
            _call(name, **{argument: value})


def test_a_value_that_a_type_cannot_exclude_is_named():
    model = nn.Sequential(nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match=r"^freeze\(device=...\) takes a device .*'abacus'"):
        torch_fp8.freeze(model, device="abacus")
    with pytest.raises(ValueError, match=r"floating-point dtype, got torch.int8"):
        torch_fp8.merged_state_dict(model, optimizer, torch.int8)
    with pytest.raises(TypeError, match=r"takes an Iterable of Optimizer, got AdamW"):
        distributed.join_sharded(model, optimizer)
    with pytest.raises(ValueError, match=r"'0.weight' is on the meta device"):
        torch_fp8.merged_state_dict(model.to("meta"), optimizer)
    for options in ({"levels": ()}, {"memory": float("inf")}, {"micro_batch": 10**40}):
        (name,) = options
        with pytest.raises(ValueError, match=name.removesuffix("s")):
            torch_fp8.plan("llama-3.2-1b", **options)


def test_converted_layers_are_not_constructed():
    """`Float8Linear(64, 64)` was a layer without a state, and failed when it was printed."""
    with pytest.raises(TypeError, match=r"convert_to_float8\(model\) turns existing layers"):
        torch_fp8.Float8Linear(64, 64)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("devices", [("cpu", "meta"), ("meta", "cpu")], ids="-".join)
def test_an_input_on_another_device_is_refused_in_forward(recipe, devices):
    """Forward returned memory that nobody had written, or backward failed in autograd."""
    weight, other = devices
    model = nn.Sequential(nn.Linear(64, 64, device=weight))
    convert_to_float8(model, recipe, device="cpu")
    for mode in (torch.enable_grad, torch.no_grad):
        with mode(), pytest.raises(ValueError, match=f"on {weight}, but its input is on {other}"):
            model(torch.ones(16, 64, device=other))


def test_an_optimizer_of_no_class_of_torch_is_taken_as_hosts_take_it():
    class Wrapper:
        def __init__(self, optimizer):
            self.param_groups, self.state = optimizer.param_groups, optimizer.state

    model = nn.Sequential(nn.Linear(64, 64))
    wrapper = Wrapper(torch.optim.AdamW(model.parameters()))
    assert memory_report(model, wrapper).moments == 0
    assert distributed.ddp_options(model, [wrapper]) == {"gradient_as_bucket_view": True}
    with pytest.raises(TypeError, match=r"Wrapper does not derive from torch.optim.Optimizer"):
        torch_fp8.convert_optimizer(wrapper, model=model)


def test_several_optimizers_are_counted_whatever_holds_them():
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    reports = [memory_report(model, given) for given in (optimizer, {optimizer}, iter([optimizer]))]
    assert reports[0].moments > 0
    assert reports == reports[:1] * 3
