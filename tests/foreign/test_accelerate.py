"""Accelerate's tests as far as they ship in its wheel, and what the others check, under the flag.

Of its tests the wheel has scripts for the launcher alone. `test_accelerator`, `test_optimizer` and
`test_scheduler` do not ship; what they are about is expressed here, on layers that FP8 can run.
"""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.test_utils import scripts
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.internals import Float8Optimizer

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("script", "processes"), [("test_ops.py", 1)])
def test_scripts_that_ship(script, processes, tmp_path):
    launch = ["-m", "accelerate.commands.launch", "--cpu", "--mixed_precision", "fp8"]
    launch += ["--num_processes", str(processes)]
    path = Path(scripts.__file__).with_name(script)
    done = subprocess.run(
        [sys.executable, *launch, str(path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def components(monkeypatch):
    """An Accelerator as the launcher's flag makes it, and what it has prepared."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    def make(**options):
        for state in (AcceleratorState, PartialState):
            state._reset_state(**({"reset_partial_state": True} if "Acc" in str(state) else {}))
        GradientState._reset_state()
        accelerator = Accelerator(**options)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 - n / 10)
        data = DataLoader(TensorDataset(torch.randn(16, 64)), batch_size=4)
        return accelerator, *accelerator.prepare(model, optimizer, scheduler, data)

    yield make
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


def _step(accelerator, model, optimizer, scheduler, x):
    accelerator.backward(model(x).square().mean())
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


def test_a_prepared_optimizer_can_be_pickled(components):
    accelerator, model, _, _, _ = components()
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
    copy = pickle.loads(pickle.dumps(optimizer))
    assert isinstance(copy.optimizer, Float8Optimizer)
    assert copy.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


@pytest.mark.parametrize(("accumulation", "steps"), [(1, 4), (2, 2)])
def test_the_scheduler_steps_with_the_optimizer(components, accumulation, steps):
    accelerator, model, optimizer, scheduler, data = components(
        gradient_accumulation_steps=accumulation
    )
    for (x,) in data:
        with accelerator.accumulate(model):
            _step(accelerator, model, optimizer, scheduler, x)
    assert scheduler.get_last_lr()[0] == pytest.approx(1 - steps / 10)
    assert {float(state["step"]) for state in optimizer.state.values()} == {steps}


def test_a_skipped_step_is_said(components):
    accelerator, model, optimizer, scheduler, data = components(gradient_accumulation_steps=2)
    before = model[0].weight.detach().clone()
    with accelerator.accumulate(model):
        _step(accelerator, model, optimizer, scheduler, next(iter(data))[0])
    assert torch.equal(before, model[0].weight)
    assert not accelerator.sync_gradients
    assert not accelerator.optimizer_step_was_skipped


def test_hooks_of_the_user_see_the_state_that_is_saved_and_loaded(components, tmp_path):
    accelerator, model, optimizer, scheduler, data = components()
    seen = []
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: seen.append("saved"))
    remove = accelerator.register_load_state_pre_hook(lambda models, folder: seen.append("loaded"))
    accelerator.save_state(str(tmp_path))
    before = [p.detach().clone() for p in model.parameters()]
    _step(accelerator, model, optimizer, scheduler, next(iter(data))[0])
    accelerator.load_state(str(tmp_path))
    remove.remove()
    accelerator.load_state(str(tmp_path))
    assert seen == ["saved", "loaded"]
    assert all(map(torch.equal, before, model.parameters()))
