import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.internals import SplitWeight, is_released, stored
from torch_fp8 import (
    FP8Config,
    convert_optimizer,
    convert_to_float8,
    high_precision,
    memory_report,
    merged_state_dict,
    restore_weights,
)


class Tied(nn.Module):
    def __init__(self, checkpointed=None):
        super().__init__()
        self.embedding = nn.Embedding(80, 64)
        self.twice = nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64)
        self.hidden = nn.Linear(64, 64, bias=False)
        self.output = nn.Linear(64, 80, bias=False)
        self.output.weight = self.embedding.weight
        self._checkpointed = checkpointed

    def block(self, x):
        return self.norm(self.hidden(F.gelu(self.twice(x))))

    def forward(self, tokens):
        x = self.twice(self.embedding(tokens))
        if self._checkpointed is None:
            x = self.block(self.block(x))
        else:
            for _ in range(2):
                x = checkpoint(self.block, x, **self._checkpointed)
        return self.output(x)


each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def _converted(model=None, cls=torch.optim.AdamW, dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = (model or Tied()).to(dtype)
    config = FP8Config(skip=(), **options)
    convert_to_float8(model, config)
    optimizer = cls(model.parameters(), lr=1e-2, weight_decay=0.1)
    convert_optimizer(optimizer, config, model=model)
    return model, optimizer


def _backward(model, step, **options):
    tokens = torch.randint(0, 80, (32,), generator=torch.Generator().manual_seed(step))
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(tokens).float(), tokens.roll(1))
    loss.backward(**options)
    return loss


def _train(model, optimizer, steps=5):
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        _backward(model, step)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def _assert_equal(one, other):
    merged, expected = merged_state_dict(*one), merged_state_dict(*other)
    assert all(torch.equal(merged[name], value) for name, value in expected.items())
    states = [optimizer.state_dict()["state"] for _, optimizer in (one, other)]
    for i, state in states[1].items():
        assert all(torch.equal(states[0][i][name], value) for name, value in state.items())


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("checkpointed", [None, {"use_reentrant": False}], ids=str)
def test_the_run_is_the_same_bit_for_bit(level, checkpointed, cls):
    torch.manual_seed(1)
    model = Tied(checkpointed)
    kept = _converted(copy.deepcopy(model), cls, opt_level=level)
    released = _converted(model, cls, opt_level=level, gradient_release=True)
    _train(*kept)
    _train(*released)
    _assert_equal(released, kept)
    steps = [state["step"].item() for state in released[1].state.values()]
    assert steps == [5.0] * len(list(model.parameters()))


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_gradients_live_one_at_a_time(level):
    def nbytes(parameter):
        return 0 if parameter.grad is None else parameter.grad.untyped_storage().nbytes()

    layers = [nn.Linear(64, 64, bias=False) for _ in range(12)]
    model = nn.Sequential(*layers)
    alive = []
    for layer in layers:
        layer.weight.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(bool(nbytes(m.weight)) for m in layers))
        )
    model, optimizer = _converted(model, opt_level=level, gradient_release=True)
    assert not optimizer.state
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(8, 64)).float().sum().backward()
    assert alive == [1] * 12
    assert all(p.grad is not None and nbytes(p) == 0 for p in model.parameters())
    assert memory_report(model, optimizer).gradients == 0
    assert len(optimizer.state) == 12
    optimizer.step()
    assert all(p.grad is None for p in model.parameters())


@each_dtype
def test_weights_that_are_written_before_every_step_keep_their_residuals(dtype):
    runs = [_converted(dtype=dtype, gradient_release=release) for release in (False, True)]
    for model, optimizer in runs:
        for step in range(4):
            with torch.no_grad():
                model.hidden.weight.div_(model.hidden.weight.norm())
            _backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
    _assert_equal(*runs)


@pytest.mark.parametrize("zeroed", [False, True])
def test_a_second_backward_before_the_step_is_refused(zeroed):
    model, optimizer = _converted(gradient_release=True)
    _backward(model, 0)
    if zeroed:  # the weights have been stepped all the same
        optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"accumulation.*gradient_release=False"):
        _backward(model, 1)
    optimizer.step()
    optimizer.zero_grad()
    _backward(model, 2)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_backward_that_builds_a_graph_steps_the_same():
    runs = []
    for create_graph in (False, True):
        runs.append(_converted(gradient_release=True))
        with high_precision():
            _backward(runs[-1][0], 0, create_graph=create_graph)
        runs[-1][1].step()
    _assert_equal(*runs)


CLIPS = {
    "clip_grad_norm_": lambda p: nn.utils.clip_grad_norm_(p, 1.0),
    "without foreach": lambda p: nn.utils.clip_grad_norm_(p, 1.0, foreach=False),
    "clip_grad_value_": lambda p: nn.utils.clip_grad_value_(p, 1.0),
}


@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
@pytest.mark.parametrize("level", ["O2", "O3"])
@each_dtype
def test_whoever_clips_freed_gradients_is_told(clip, level, dtype):
    model, optimizer = _converted(dtype=dtype, opt_level=level, gradient_release=True)
    before = [type(p) for p in model.parameters()]
    assert (SplitWeight in before) == (dtype == torch.float32)
    _backward(model, 0)
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_.*gradient_release=False"):
        clip(list(model.parameters()))
    optimizer.step()
    assert [type(p) for p in model.parameters()] == before
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) == 0


def test_a_norm_of_ones_own_is_refused():
    model, optimizer = _converted(gradient_release=True)

    def norm():
        return sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None) ** 0.5

    for step in range(2):
        _backward(model, step)
        optimizer.zero_grad(set_to_none=False)
        memory_report(model, optimizer)
        copy.deepcopy(model)
        with pytest.raises(RuntimeError, match=r"register_hook"):
            norm()
        weight = model.hidden.weight
        with pytest.raises(RuntimeError, match=r"register_hook"):
            torch._foreach_add([torch.zeros_like(weight)], [weight.grad])
        optimizer.step()
        assert norm() == 0
    squares = []
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: squares.append(grad.float().square().sum()))
    _backward(model, 2)
    assert sum(squares) > 0


@each_dtype
def test_a_released_parameter_can_be_copied_moved_and_given_a_gradient(dtype):
    model, optimizer = _converted(dtype=dtype, gradient_release=True)
    _backward(model, 0)
    weight = model.hidden.weight
    assert is_released(weight)
    assert weight.dtype == dtype
    assert stored(weight).dtype == torch.bfloat16
    optimizer.zero_grad(set_to_none=False)
    assert model.to("cpu") is model
    copied = copy.deepcopy(model)
    assert torch.equal(copied.hidden.weight, weight)
    if dtype == torch.float32:
        assert type(copied.hidden.weight) is SplitWeight
        pickled = pickle.loads(pickle.dumps(model)).hidden.weight
        assert type(pickled) is nn.Parameter
        assert torch.equal(pickled, weight)
        with torch.no_grad():
            weight.mul_(1 - 1e-6)
        assert torch.equal(weight, copied.hidden.weight * (1 - 1e-6))
    before = weight.detach().clone()
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert not torch.equal(weight, before)
    _backward(model, 1)
    optimizer.zero_grad()
    assert weight.grad is None


def test_reentrant_checkpoints_of_a_shared_weight_are_refused():
    model, _optimizer = _converted(Tied({"use_reentrant": True}), gradient_release=True)
    with pytest.raises(RuntimeError, match="use_reentrant=True"):
        _backward(model, 0)


def test_reentrant_checkpoints_of_other_weights_are_no_matter():
    def run(**options):
        torch.manual_seed(0)
        model, optimizer = _converted(
            nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), **options
        )
        for step in range(3):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).requires_grad_()
            for layer in model:
                with torch.autocast("cpu", torch.bfloat16):
                    x = checkpoint(layer, x, use_reentrant=True)
            x.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    _assert_equal(run(gradient_release=True), run())


@pytest.mark.parametrize("call", ["unscale_", "step", "step without gradients"])
def test_grad_scaler_is_refused(call):
    model, optimizer = _converted(gradient_release=True)
    scaler = torch.amp.GradScaler("cpu")
    tokens = torch.arange(8)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens).float().mean()
    scaler.scale(loss).backward()
    if call.endswith("without gradients"):
        optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="GradScaler"):
        getattr(scaler, call.split()[0])(optimizer)


def test_a_closure_steps_within_its_backward():
    model, optimizer = _converted(gradient_release=True)
    losses = []

    def closure():
        optimizer.zero_grad()
        losses.append(_backward(model, 0))
        return losses[-1]

    assert optimizer.step(closure) is losses[0]
    assert optimizer.step(closure) < losses[0]
    assert optimizer.state[model.hidden.weight]["step"] == 2


def test_release_ends_with_the_configuration():
    model, optimizer = _converted(gradient_release=True)
    _train(model, optimizer, 1)
    convert_optimizer(optimizer, FP8Config(skip=()), model=model)
    _backward(model, 0)
    _backward(model, 1)
    assert all(p.grad is not None for p in model.parameters())


def test_an_optimizer_that_is_restored_meanwhile_steps_as_stock_ones():
    model, optimizer = _converted(gradient_release=True)
    _backward(model, 0)
    restore_weights(optimizer)
    before = model.hidden.weight.detach().clone()
    optimizer.step()
    assert torch.equal(model.hidden.weight, before), "backward has stepped it"
