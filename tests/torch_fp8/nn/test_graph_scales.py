"""``graph_scales="last_step"``: graphs cast with the last step's amaxes, whatever a loop does."""

import copy
import math

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.internals import GRAD_OUTPUT, INPUT, WEIGHT, scale_buffers, scaling_buffers
from tests.steps import adamw, through_a_file
from torch_fp8 import FP8Config, convert_to_float8, load_scaling_state_dict, scaling_state_dict

E4M3, E5M2 = 448.0, 57344.0


class Run:
    def __init__(self, scales="last_step", compiled=True, through=None, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(128, 192), nn.GELU(), nn.Linear(192, 128))
        self.config = FP8Config(recipe="tensorwise", graph_scales=scales, **options)
        self.optimizer, _ = adamw(self.model, self.config, lr=1e-3)
        torch._dynamo.reset()
        self.counter = CompileCounterWithBackend("aot_eager")
        forward = self.model if through is None else lambda x: through(self.model, x)
        self.forward = torch.compile(forward, backend=self.counter) if compiled else forward

    @property
    def first(self):
        return self.model[0]

    @property
    def saturation(self):
        return self.first.fp8.scaling.saturation

    def batch(self, seed, factor=1.0):
        y = self.forward(factor * _x(seed))
        y.square().mean().backward()
        return y.detach()

    def step(self, *seeds, factor=1.0):
        outputs = [self.batch(seed, factor) for seed in seeds]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(outputs)

    def amax(self):
        return float(self.first.fp8_amax_history[INPUT])


def _x(seed):
    return torch.randn(16, 128, generator=torch.Generator().manual_seed(seed))


def _amax(*seeds):
    return max(float(_x(seed).abs().max()) for seed in seeds)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_scales_are_the_largest_of_the_last_step(level):
    run = Run(opt_level=level)
    run.step(0)
    for seeds in ((1, 2), (3, 4), (5,)):
        run.step(*seeds)
        input, gradient = run.first.fp8_amax_history[[INPUT, GRAD_OUTPUT], 0].tolist()
        assert input == _amax(*seeds)
        scales = scaling_buffers(run.first)[1][[INPUT, GRAD_OUTPUT], 0].tolist()
        assert scales == pytest.approx([4 * input / E4M3, 8 * gradient / E5M2])
        assert level != "O1" or not run.first.fp8_amax_history[WEIGHT]  # its scale is current
    assert run.counter.frame_count == 2  # the first step has current scales
    assert run.saturation.count == 0


def test_the_first_step_has_current_scales_and_the_second_one_has_not():
    run, current = Run(), Run("current")
    assert torch.equal(run.step(0), current.step(0))
    assert not torch.equal(run.step(1), current.step(1))
    assert (run.counter.frame_count, current.counter.frame_count) == (2, 1)


def test_eager_code_keeps_its_scales():
    run, current = Run(compiled=False), Run("current", compiled=False)
    for seed in range(3):
        assert torch.equal(run.step(seed), current.step(seed))
    assert not run.first.fp8_amax_history.any()


def test_what_a_graph_casts_saturates():
    run, twin = Run(), Run()
    for each in (run, twin):
        each.step(0)
    limit = 4 * _amax(0)
    got = run.forward(64 * _x(1))
    want = twin.forward((64 * _x(1)).clamp(-limit, limit))
    assert torch.equal(got, want)
    assert (64 * _x(1)).abs().max() > limit


@pytest.mark.parametrize("factor", [8, 64, 1000])
def test_a_step_after_a_jump_has_current_scales_and_no_new_graph(factor):
    run, returned, amaxes = Run(), [], []
    for step in range(8):
        returned.append(run.saturation.returns)
        run.step(step, factor=factor if step == 3 else 1)
        amaxes.append(run.amax())
    # Step 3 saturates, step 4 has the scales of step 3, after which the host has read of it.
    assert returned == [step == 5 for step in range(8)]
    assert amaxes == [_amax(2 if step == 3 else step) for step in range(8)]
    assert run.counter.frame_count == 2
    assert run.saturation.count >= 1


def test_values_that_stay_large_are_scaled_after_a_step_with_current_scales():
    run, returned, amaxes = Run(), [], []
    for step in range(9):
        returned.append(run.saturation.returns)
        run.step(step, factor=64 if step >= 3 else 1)
        amaxes.append(run.amax() / _amax(step))
    assert returned == [step in (5, 6) for step in range(9)]  # steps 3 and 4 saturate
    assert amaxes[5:] == [64] * 4


def test_nothing_saturates_in_a_step_with_current_scales():
    run, returned = Run(), []
    for step in range(9):
        returned.append(run.saturation.returns)
        run.step(step, factor=64 if step in (3, 5) else 1)
    assert returned == [step == 5 for step in range(9)]


def test_a_checkpoint_and_an_evaluation_change_no_scale():
    def through(model, x):
        return checkpoint(model, x, use_reentrant=False)

    run, twin = Run(), Run(through=through)
    for seed in range(3):
        assert torch.equal(run.step(seed), twin.step(seed))
        run.model.eval()
        with torch.no_grad():
            run.forward(100 * _x(seed))
        run.model.train()
    buffers = zip(run.model.buffers(), twin.model.buffers(), strict=True)
    assert all(torch.equal(a, b) for a, b in buffers)


def test_evaluation_before_the_first_step_has_current_scales():
    run, current = Run(), Run("current")
    for each in (run, current):
        each.model.eval()
    with torch.no_grad():
        assert torch.equal(run.forward(_x(0)), current.forward(_x(0)))
    run.model.train()
    run.optimizer.step()  # of a step in eager code, which records nothing
    assert not run.first.fp8.scales_known


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_never_becomes_a_scale(value):
    run = Run(opt_level="O1")
    run.step(0)
    run.forward(torch.full((16, 128), value))  # a loop skips this step
    run.step(1)
    assert run.amax() == _amax(0)
    run.step(2)
    assert run.amax() == _amax(2)
    assert run.saturation.count == 0


def test_steps_in_eager_code_and_layers_that_did_not_run_leave_scales_alone():
    run = Run()
    run.step(0)
    run.optimizer.step()
    run.model(_x(1)).sum().backward()
    run.optimizer.step()
    assert run.amax() == _amax(0)
    assert run.saturation.count == 0


class _Waits(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_no_eager_step_waits_for_the_device_beside_a_compiled_model():
    Run(opt_level="O1").step(0)
    run = Run(compiled=False, opt_level="O1")
    optimizer = torch.optim.SGD(run.model.parameters(), lr=1e-3)
    run.batch(0)
    with _Waits() as waits:
        optimizer.step()
    assert not waits.count


def test_several_foreign_optimizers_return_to_current_scales_together():
    run = Run(opt_level="O1")
    layers = (run.model[0], run.model[2])
    optimizers = [torch.optim.SGD(layer.parameters(), lr=1e-3) for layer in layers]
    returned = []
    for step in range(6):
        returned.append([layer.fp8.scaling.ready for layer in layers])
        run.batch(step, 64 if step == 2 else 1)
        for optimizer in optimizers:
            optimizer.step()
    assert returned == [[step not in (0, 4)] * 2 for step in range(6)]
    assert run.counter.frame_count == 2


@pytest.mark.parametrize("saved_after", [2, 4, 5])
def test_a_resumed_run_goes_on_bit_for_bit(saved_after):
    run, again = Run(), Run()
    for step in range(saved_after):
        run.step(step, factor=64 if step == 3 else 1)
    state = through_a_file(
        [run.model.state_dict(), run.optimizer.state_dict(), scaling_state_dict(run.model)], True
    )
    again.model.load_state_dict(state[0])
    again.optimizer.load_state_dict(state[1])
    load_scaling_state_dict(again.model, state[2])
    for step in range(saved_after, 8):
        factor = 64 if step == 3 else 1
        assert torch.equal(run.step(step, factor=factor), again.step(step, factor=factor)), step
        assert run.saturation.returns == again.saturation.returns


def test_copies_of_a_model_share_nothing():
    run = Run()
    run.step(0)
    twin = copy.deepcopy(run.model)
    assert twin[0].fp8.scaling.saturation is twin[2].fp8.scaling.saturation
    assert twin[0].fp8.scaling.saturation is not run.saturation
    run.saturation.load(run.first.fp8.scaling.number, torch.tensor([1.0, 0.0]))
    assert twin[0].fp8.scales_known
    assert not run.first.fp8.scales_known


def test_layers_with_frozen_weights_train_in_two_graphs():
    model = nn.Sequential(nn.Linear(128, 192), nn.GELU(), nn.Linear(192, 128))
    model[0].requires_grad_(False)
    convert_to_float8(model, FP8Config(recipe="tensorwise", graph_scales="last_step"))
    optimizer = torch.optim.SGD(model[2].parameters(), lr=1e-3)
    counter = CompileCounterWithBackend("aot_eager")
    forward = torch.compile(model, backend=counter)
    for seed in range(3):
        forward(_x(seed)).square().mean().backward()
        optimizer.step()
    assert counter.frame_count == 2
    assert float(model[2].fp8_amax_history[GRAD_OUTPUT]) > 0


class Readers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.RMSNorm(128, eps=1e-5)
        self.first, self.second, self.third = (nn.Linear(128, 128) for _ in range(3))

    def forward(self, x):
        y = self.norm(x)
        return self.third(self.first(y) + self.second(y))


def test_layers_behind_one_norm_have_one_amax_and_one_slot():
    model = Readers()
    optimizer, _ = adamw(model, FP8Config(recipe="tensorwise", graph_scales="last_step"), lr=1e-3)
    for layer in (model.first, model.second):
        layer.fp8.group = None  # a group records all amaxes in the slots of its first layer
    forward = torch.compile(model, backend="aot_eager")
    for seed in range(3):
        y = model.norm(_x(seed)).detach()
        forward(_x(seed)).square().mean().backward()
        assert not model.second.fp8_input_amax.any()
        optimizer.step()
        optimizer.zero_grad()
        first, second, third = (
            layer.fp8_amax_history[INPUT] for layer in (model.first, model.second, model.third)
        )
        assert float(first) == float(second) == pytest.approx(float(y.abs().max()))
        assert torch.equal(*(scaling_buffers(x)[1][INPUT] for x in (model.first, model.second)))
        assert third != first


def test_the_layers_of_a_block_hold_their_scales_in_one_tensor():
    """Two blocks share both graphs; a copy shares nothing, and layers that move unite again."""
    model, optimizer = _converted(nn.Sequential(Readers(), Readers()), "tensorwise")
    counter = CompileCounterWithBackend("aot_eager")
    for block in model:
        block.compile(backend=counter)
    for seed in range(3):
        model(_x(seed).requires_grad_()).square().mean().backward()
        optimizer.step()
        if seed == 1:
            assert counter.frame_count == 2
            twin = copy.deepcopy(model)
            model.double().float()
    tables = [
        {id(layer.fp8_scales) for layer in (block.first, block.second, block.third)}
        for block in (*model, *twin)
    ]
    assert [len(table) for table in tables] == [1] * 4
    assert len(set.union(*tables)) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_that_move_keep_their_scales_in_one_tensor(dtype):
    model, optimizer = _converted(Readers(), "tensorwise")
    model.compile(backend="aot_eager")
    layers = model.first, model.second, model.third

    def step(seed):
        model(_x(seed).to(model.first.weight.dtype)).float().square().mean().backward()
        optimizer.step()
        return torch.stack([scaling_buffers(layer)[1] for layer in layers])

    before = [step(seed) for seed in range(2)][-1] * torch.tensor([1.0, 2.0, 4.0])[:, None, None]
    model.first.fp8_scales.copy_(before)
    model.to(torch.float64).to(dtype)
    after = torch.stack([scaling_buffers(layer)[1] for layer in layers])
    assert before.all()
    assert torch.equal(after, before)
    assert not torch.equal(step(2), before)
    assert len({id(layer.fp8_scales) for layer in layers}) == 1


@pytest.mark.parametrize("assigns", [False, True])
def test_layers_share_a_tensor_for_their_scales_on_another_device(assigns):
    with torch.device("meta"):
        model, _ = _converted(Readers(), "tensorwise")
    model.first.to_empty(device="cpu")
    scaling_buffers(model.first)[1].fill_(3)
    if assigns:
        model.load_state_dict(Readers().state_dict(), assign=True)
    model.to_empty(device="cpu")
    assert model.first.fp8_scales is model.second.fp8_scales is model.third.fp8_scales
    assert scaling_buffers(model.first)[1].eq(3).all()
    assert not scaling_buffers(model.second)[1].any()


def test_layers_that_move_one_by_one_take_their_scales_along():
    scales, device = torch.arange(24.0).view(2, 3, 4), torch.device("cpu", 0)
    moved = [scale_buffers.on_device(scales, row, device) for row in range(2)]
    assert moved[0] is moved[1] is not scales
    assert torch.equal(moved[0], scales)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_copy_made_before_the_first_step_takes_buffers_after_it(recipe):
    model, optimizer = _converted(Readers(), recipe)
    average = AveragedModel(model)
    model.compile(backend="aot_eager")
    for seed in range(2):
        model(_x(seed).requires_grad_()).square().mean().backward()
        optimizer.step()
    average.update_parameters(model)
    assert model.second.fp8_scales.all()
    assert torch.equal(average.module.second.fp8_scales, model.second.fp8_scales)


def _converted(model, recipe):
    scales = "current" if recipe == "delayed" else "last_step"
    convert_to_float8(model, FP8Config(recipe=recipe, graph_scales=scales))
    torch._dynamo.reset()
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
@pytest.mark.parametrize("repeated", [False, True], ids=["", "checkpoint"])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_backward_has_the_scales_of_forward_if_an_optimizer_steps_before(recipe, repeated, backend):
    model, optimizer = _converted(Readers(), recipe)
    run = (lambda x: checkpoint(model, x, use_reentrant=False)) if repeated else model
    forward = torch.compile(run, backend=backend)
    for seed in range(2):
        forward(_x(seed)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    outliers = torch.eye(16, 128)  # the norm turns them into the largest inputs so far
    y, _, z = (forward(x).square().mean() for x in (_x(2), outliers, _x(2)))
    wanted = torch.autograd.grad(y, list(model.parameters()))
    scales = model.first.fp8_scales.clone()
    optimizer.step()  # it has no gradients, and writes no weight
    assert not torch.equal(model.first.fp8_scales, scales)
    z.backward()
    assert all(
        torch.equal(p.grad, want) for p, want in zip(model.parameters(), wanted, strict=True)
    )


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_scales_stay_where_they_are_if_no_backward_waits(recipe):
    """A CUDA graph would be recorded again for scales elsewhere."""
    model, optimizer = _converted(nn.Sequential(nn.Linear(128, 128)), recipe)
    forward, scales = torch.compile(model, backend="aot_eager"), model[0].fp8_scales
    for seed in range(3):
        forward(_x(seed)).square().mean().backward()
        optimizer.step()
    assert model[0].fp8_scales is scales


@pytest.mark.parametrize("memory", ["own", "captured", "shared"])
def test_scales_stay_in_memory_that_others_read(memory, monkeypatch):
    model, optimizer = _converted(nn.Sequential(nn.Linear(128, 128)), "delayed")
    forward = torch.compile(model, backend="aot_eager")
    forward(_x(0)).square().mean().backward()
    optimizer.step()
    if memory == "captured":
        monkeypatch.setattr(scale_buffers, "is_capturing", lambda device: True)
    if memory == "shared":
        model.share_memory()
    scales, waits = model[0].fp8_scales, forward(2 * _x(1))
    before = scales.clone()
    optimizer.step()
    assert waits.requires_grad
    assert not torch.equal(model[0].fp8_scales, before)
    assert torch.equal(scales, before) == (memory == "own")
