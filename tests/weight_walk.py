"""What user code does with weights in a host's loop, and checks of what it finds.

`tests.weight_properties` has every kind of operation; these few are done again in each loop.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn

from tests.host_loops import WAYS, Net, batch, rank
from tests.internals import SplitWeight
from torch_fp8 import FP8Config


def _reference(model: nn.Module) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(p.shape, generator=generator) / 8 for p in model.parameters()]


def _no_grad(function: Callable[..., Any]) -> Callable[[nn.Module], Any]:
    def run(model: nn.Module) -> Any:
        with torch.no_grad():
            return [
                function(p, r) for p, r in zip(model.parameters(), _reference(model), strict=True)
            ]

    return run


def _penalty(model: nn.Module, function: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Gradients of what a user computes of the weights alone."""
    parameters = list(model.parameters())
    loss = sum(function(p, r) for p, r in zip(parameters, _reference(model), strict=True))
    return loss, torch.autograd.grad(loss, parameters)


def _through_data(p: Tensor, r: Tensor) -> None:
    p.data = p.data * 0.5 + r


def _loaded(model: nn.Module) -> None:
    model.load_state_dict({k: v.clone() * 0.999 for k, v in model.state_dict().items()})


OPERATIONS: dict[str, Callable[[nn.Module], Any]] = {
    "values": _no_grad(lambda p, r: (p.norm(), p.abs().max(), p.std(), str(p.dtype), p.is_leaf)),
    "data": _no_grad(_through_data),
    "load_state_dict": _loaded,
    "l2": lambda model: _penalty(model, lambda p, r: (p - r).square().sum() + p.norm()),
}


def outcome(function: Callable[[nn.Module], Any], model: nn.Module) -> list[Any]:
    """Return what an operation gives and leaves, as plain tensors and values."""
    leaves = torch.utils._pytree.tree_leaves(
        (function(model), [p.detach() for p in model.parameters()])
    )
    return [x.detach().clone() if isinstance(x, Tensor) else x for x in leaves]


def differs(model: nn.Module) -> list[str]:
    """Run all operations on a model and on plain copies; return those with another outcome."""
    names = []
    for name, function in OPERATIONS.items():
        twin = Net()
        with torch.no_grad():
            for p, q in zip(twin.parameters(), model.parameters(), strict=True):
                p.copy_(q)
        got, want = outcome(function, model), outcome(function, twin)
        if len(got) != len(want) or not all(map(_same, got, want)):
            names.append(name)
    return names


def _same(a: Any, b: Any) -> bool:
    if not isinstance(b, Tensor):
        return bool(a == b)
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(a, b)


def check_gradients(model: nn.Module) -> None:
    """Gradients read as float32 wherever a user meets them, and are assigned in either dtype."""
    parameters, x, seen = list(model.parameters()), batch(), []
    before = [None if p.grad is None else p.grad.clone() for p in parameters]
    handles = [p.register_hook(lambda grad: seen.append(grad.numpy().dtype)) for p in parameters]
    with torch.autocast("cpu", torch.bfloat16):
        returned = torch.autograd.grad(model(x)["loss"], parameters)
    assert {g.dtype for g in returned} == {torch.float32}
    for p in parameters:
        p.grad = None
    with torch.autocast("cpu", torch.bfloat16):
        model(x)["loss"].backward()
    assert set(seen) == {np.dtype("float32")}
    assert len(seen) == 2 * len(parameters)
    for handle, p, grad in zip(handles, parameters, returned, strict=True):
        handle.remove()
        torch.testing.assert_close(
            p.grad.clone(), grad, rtol=0.13, atol=float(grad.abs().max()) / 8
        )
        assert p.grad.numpy().dtype == np.float32
    assert torch.cat([p.grad.flatten() for p in parameters]).dtype == torch.float32
    for p, grad in zip(parameters, before, strict=True):
        for value in (torch.ones(p.shape), grad):
            p.grad = value
            assert value is None or torch.equal(p.grad.clone(), value)
    with pytest.raises(RuntimeError, match=r"float64|double"):
        parameters[0].grad = torch.ones(parameters[0].shape, dtype=torch.float64)


def check_moments(model: nn.Module, optimizer: Any) -> None:
    """Adam's state reads and takes assignments as stock's."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    weight = model.wide.weight
    if weight in optimizer.state:
        state = optimizer.state[weight]
        for name in ("exp_avg", "exp_avg_sq"):
            assert state[name].shape == weight.shape
            assert state[name].dtype == torch.float32
            state[name] = torch.zeros_like(weight.data)
            assert not state[name].any()
        for of_weight in optimizer.state.values():
            for value in of_weight.values():
                if torch.is_tensor(value) and value.dim():
                    value.zero_()
        assert not optimizer.state_dict()["state"][0]["exp_avg"].any()


def regroup(model: nn.Module, optimizer: Any) -> None:
    """Split a group, reverse the rest of it, and put the new one first."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    group, (weight, bias) = optimizer.param_groups[0], model.wide.parameters()
    group["params"] = [p for p in group["params"] if p is not weight and p is not bias][::-1]
    optimizer.add_param_group({**group, "params": [weight, bias], "lr": group["lr"] / 2})
    optimizer.param_groups.reverse()


def check_saving(model: nn.Module, folder: Path) -> None:
    """Weights are whole in files that hooks and callbacks write, on the first rank alone."""
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    caught: list[dict[str, Tensor]] = []

    def save(module: nn.Module, *_: Any) -> None:
        torch.save(module.state_dict(), folder / "hook.pt")
        save_file(module.state_dict(), folder / "hook.safetensors")
        save_model(module, str(folder / "model.safetensors"))
        caught.append(torch.load(folder / "hook.pt"))
        caught.extend(load_file(folder / f"{name}.safetensors") for name in ("hook", "model"))

    def note(module: nn.Module, state: dict[str, Tensor], prefix: str, _: Any) -> None:
        caught.append({name: x.clone() for name, x in state.items()})

    if rank() == 0:
        handles = [
            model.register_state_dict_post_hook(note),
            model.register_forward_hook(save),
            model.register_forward_pre_hook(save),
            model.wide.weight.register_hook(lambda grad: save(model)),
        ]
        grads = [p.grad for p in model.parameters()]
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch())["loss"]
        torch.autograd.grad(loss, list(model.parameters()))
        for handle in handles:
            handle.remove()
        for p, grad in zip(model.parameters(), grads, strict=True):
            p.grad = grad
        assert len(caught) == 18  # 3 files and 3 state dicts of 3 hooks
    for state in caught:
        assert state.keys() >= expected.keys()
        for name, x in expected.items():
            assert state[name].dtype == torch.float32
            assert torch.equal(state[name], x), name


def check_kept_copies(model: nn.Module) -> None:
    """What is served after a write is the weight that was written."""
    training, x = model.training, batch()
    model.eval()
    for write in ("mul_", "_foreach_mul_", "data"):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            before = model(x)["logits"]
            for p in model.parameters():
                if write == "mul_":
                    p.mul_(1.5)
                elif write == "data":
                    p.data = p.data / 1.5
                else:
                    torch._foreach_mul_([p.detach()], 1.25)
            after, fresh = model(x)["logits"], copy.deepcopy(model)(x)["logits"]
        assert torch.equal(after, fresh), write
        assert not torch.equal(after, before), write
    model.train(training)


def walk(way: str, level: str, folder: Path) -> None:
    """Read, write, copy and save weights in the middle of a loop, then look at what it saves."""
    seen = []

    def visit(model: Any, optimizer: Any) -> None:
        assert sum(isinstance(p, SplitWeight) for p in model.parameters()) == 3
        assert differs(model) == []
        check_gradients(model)
        check_saving(model, folder)
        check_kept_copies(model)
        check_moments(model, optimizer)
        if way != "trainer":  # whose scheduler counts the groups
            regroup(model, optimizer)
        seen.append((model, model.wide.weight.detach().clone()))

    config = FP8Config(opt_level=level, emulate=True, recipe="tensorwise")
    saved = WAYS[way](config, visit, folder)
    ((model, before),) = seen
    state = model.state_dict()
    assert saved.keys() == state.keys()
    assert {x.dtype for x in saved.values()} == {torch.float32}
    assert all(torch.equal(saved[name], state[name]) for name in state)
    assert (state["wide.weight"] != before).float().mean() > 0.9  # it trains on
