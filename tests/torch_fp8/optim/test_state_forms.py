"""Optimizer states in every form that is accepted: what was saved continues with the same bits."""

import collections
import copy
import dataclasses
import functools
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.internals import Float8Grad, Int8Momentum, local
from tests.steps import through_a_file
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8
from torch_fp8.distributed import split_sharded

pytestmark = pytest.mark.filterwarnings("ignore:FP8. .*the layer was never called")

OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "Muon": lambda parameters: torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=1e-3),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
}
CONFIGS = {
    "O2": FP8Config(recipe="tensorwise"),
    "O3": FP8Config(recipe="tensorwise", opt_level="O3"),
    "codes saved": FP8Config(recipe="tensorwise", checkpoint_states="fp8"),
    "weights unsplit": FP8Config(recipe="tensorwise", split_weights=False),
}


def _run(config, optimizer, dtype=torch.float32, wrap=None, with_model=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)).to(dtype)
    if wrap is not None:
        wrap(model)
    convert_to_float8(model, config)
    made = OPTIMIZERS[optimizer](model.parameters())
    if wrap is None:
        convert_optimizer(made, config, model=model if with_model else None)
    else:
        split_sharded(model, [made], config)
    return model, made


def _step(model, optimizer, step):
    for index, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(100 * step + index)
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    optimizer.step()


def _changed_steps(function):
    def changed(state):
        for entry in state["state"].values():
            if "step" in entry:
                entry["step"] = function(entry["step"])
        return state

    return changed


def _ordered(state):
    entries = {key: collections.OrderedDict(entry) for key, entry in state["state"].items()}
    return collections.OrderedDict(state, state=collections.OrderedDict(entries))


def _doubles(state):
    for entry in state["state"].values():
        for name, value in entry.items():
            if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
                entry[name] = value.double()
    return state


FORMS = {
    "as saved": lambda state: state,
    "copied": copy.deepcopy,
    "through a file": functools.partial(through_a_file, weights_only=True),
    "ordered dicts": _ordered,
    "float64": _doubles,
    "integer steps": _changed_steps(int),
    "float steps": _changed_steps(float),
    "integer tensors": _changed_steps(lambda step: torch.tensor(int(step))),
    "steps of one element": _changed_steps(lambda step: torch.tensor([float(step)])),
}


CASES = [
    *(("AdamW", "O2", form) for form in FORMS),
    *(("AdamW", "codes saved", form) for form in FORMS if form != "float64"),
    *((name, config, "through a file") for name in OPTIMIZERS for config in CONFIGS),
    *((name, "O2", form) for name in ("Muon", "SGD") for form in ("ordered dicts", "float64")),
]


@pytest.mark.parametrize(("optimizer", "config", "form"), CASES)
def test_a_state_in_another_form_continues_with_the_same_bits(optimizer, config, form):
    model, trained = _run(CONFIGS[config], optimizer)
    for step in range(3):
        _step(model, trained, step)
    twin, other = _run(dataclasses.replace(CONFIGS[config], seed=7), optimizer)
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(FORMS[form](copy.deepcopy(trained.state_dict())))
    for step in range(3, 5):
        _step(model, trained, step)
        _step(twin, other, step)
    for parameter, copied in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter.detach() + 0, copied.detach() + 0)
    assert trained.state_dict().keys() == other.state_dict().keys()


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x))}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("config", ["O2", "O3"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_copy_trains_on_as_the_original(optimizer, config, way):
    runs = [_run(CONFIGS[config], optimizer)]
    for step in range(4):
        if step == 2:
            runs.append(COPIES[way](runs[0]))
        for model, trained in runs:
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
            for _ in range(2):
                model(x).square().mean().backward()
            assert (type(model[0].weight.grad) is Float8Grad) == (config == "O3")
            trained.step()
            trained.zero_grad()
    (model, trained), (twin, other) = runs
    assert type(other) is type(trained)
    for parameter, copied in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter.detach() + 0, copied.detach() + 0)


@pytest.mark.parametrize("case", ["split", "without the model", "BF16"])
def test_momenta_of_all_large_weights_have_8_bits(case):
    dtype = torch.bfloat16 if case == "BF16" else torch.float32
    model, optimizer = _run(CONFIGS["O2"], "Muon", dtype, with_model=case != "without the model")
    for step in range(2):
        _step(model, optimizer, step)
        buffers = [state["momentum_buffer"] for state in optimizer.state.values()]
        assert len(buffers) == 2
        assert all(isinstance(buffer, Int8Momentum) for buffer in buffers)


@pytest.mark.parametrize("config", ["O2", "codes saved", "weights unsplit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_that_was_saved_whole_falls_into_the_right_rows_of_shards(dtype, config):
    whole, trained = _run(CONFIGS[config], "AdamW", dtype)
    for step in range(2):
        _step(whole, trained, step)
    saved = copy.deepcopy(trained.state_dict())
    weights = [p.detach().clone() for p in whole.parameters()]
    _step(whole, trained, 2)
    for rank in range(2):
        # The ranks' collectives move nothing.
        dist.init_process_group("fake", rank=rank, world_size=2)
        try:
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(f"rank{rank}",))
            shards, other = _run(
                CONFIGS[config], "AdamW", dtype, lambda model, m=mesh: fully_shard(model, mesh=m)
            )
            other.load_state_dict(copy.deepcopy(saved))
            for index, (parameter, weight) in enumerate(
                zip(shards.parameters(), weights, strict=True)
            ):
                with torch.no_grad():
                    local(parameter).copy_(weight.chunk(2)[rank])
                generator = torch.Generator().manual_seed(200 + index)
                gradient = torch.randn(weight.shape, generator=generator).to(dtype).chunk(2)[rank]
                parameter.grad = parameter.detach() * 0
                local(parameter.grad).copy_(gradient)
            other.step()
            for parameter, expected in zip(shards.parameters(), whole.parameters(), strict=True):
                part = expected.detach().chunk(2)[rank]
                assert torch.equal(local(parameter.detach()) + 0, part + 0)
        finally:
            dist.destroy_process_group()
