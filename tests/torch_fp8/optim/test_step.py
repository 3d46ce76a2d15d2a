import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.internals import optimizer_step as step
from tests.steps import adamw
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


class Answers(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        asks = func is torch.ops.aten._local_scalar_dense.default
        self.count += asks and args[0].dtype == torch.bool  # steps are numbers of the CPU
        return func(*args, **(kwargs or {}))


def converted(dtype, layers=6):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers))).to(dtype)
    optimizer, _ = adamw(model, FP8Config())
    return model, optimizer


def set_gradients(model, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


@each_dtype
def test_the_step_behind_state_dict_does_not_wait_for_each_weight(dtype):
    model, optimizer = converted(dtype)
    for saves in (False, True):
        set_gradients(model)
        if saves:
            model.state_dict()
            optimizer.state_dict()
            model.state_dict()
        with Answers() as asked:
            optimizer.step()
        assert asked.count == 0


@each_dtype
def test_a_gradient_behind_an_odd_bias_is_stepped_as_an_aligned_one(dtype, monkeypatch):
    """As the views of a bucket of DDP are: the kernels would read it element by element."""
    models = []
    starts = []

    def reference(matrix, *rest):
        starts.append(matrix.grad.data_ptr() % 16)
        adamw_step(matrix, *rest)

    adamw_step = step.adamw_step_reference
    monkeypatch.setattr(step, "adamw_step_reference", reference)
    for shift in (0, 1):
        model, optimizer = converted(dtype, layers=2)
        set_gradients(model)
        for parameter in model.parameters():
            bucket = torch.empty(parameter.numel() + shift, dtype=parameter.grad.dtype)
            view = bucket[shift:].view(parameter.shape)
            parameter.grad = view.copy_(parameter.grad)
        optimizer.step()
        models.append(model)
    assert len(starts) == 4
    assert not any(starts)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize(
    "cls", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Muon], ids=lambda cls: cls.__name__
)
def test_a_compiled_function_that_steps_does_what_eager_code_does(cls, level):
    weights = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2)))
        convert_to_float8(model, FP8Config(opt_level=level))
        optimizer = cls(model.parameters(), lr=1e-2)
        convert_optimizer(optimizer, FP8Config(opt_level=level), model=model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

        def update(optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        update = torch.compile(update, backend="eager") if compiled else update
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                model(torch.ones(8, 64)).square().mean().backward()
            update()
            scheduler.step()
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


@pytest.mark.parametrize("options", [{}, {"update_clipping": True}], ids=str)
def test_a_gradient_that_rounds_to_zero_steps_where_eps_is_zero(options):
    """Stock Adam survives, because its gradient is small but not zero."""
    config = FP8Config(opt_level="O3", skip=(), **options)
    model = nn.Sequential(nn.Linear(64, 64))
    optimizer, _ = adamw(model, config, eps=0)
    tokens = torch.randn(8, 64)
    tokens[:, :8] *= 1e-6  # beside the others, their gradients are zero in 8 bits
    for _ in range(2):
        model(tokens).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model[0].weight.isfinite().all()


def _replace_parts(model, optimizer, step):
    """Replace what the optimizer keeps between steps, in another way in each step."""
    weight = next(model.parameters())
    if step == 1:
        optimizer.load_state_dict(optimizer.state_dict())
    elif step == 2:
        weight.data = weight.data * 2
    elif step == 3:
        optimizer.state[weight]["exp_avg"] = optimizer.state[weight]["exp_avg"].float() * 2
    elif step == 4:
        with torch.no_grad():
            weight.mul_(0.5)
    elif step == 5:
        optimizer.state.clear()
    elif step == 6:
        optimizer.state[weight]["exp_avg"].zero_()


def test_what_a_step_keeps_does_not_outlive_what_it_was_made_of():
    results = []
    for keeps in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(2)))
        convert_to_float8(model)
        optimizer, _ = adamw(model, FP8Config(), lr=1e-2)
        for count in range(9):
            set_gradients(model, count)
            optimizer.step()
            for layer in model:
                assert layer.weight.halves.matrix is not None
                if not keeps:
                    layer.weight.halves.matrix = None
            _replace_parts(model, optimizer, count)
        moments = [x for state in optimizer.state.values() for x in state.values()]
        results.append([p.detach().clone() for p in model.parameters()] + moments)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_step_renews_the_amax_that_a_weight_keeps_since_the_last_step():
    model, optimizer = converted(torch.float32, layers=2)
    halves = model[0].weight.halves
    for count in range(4):
        set_gradients(model, count)
        away = model[0].weight.detach().sign()  # the largest values grow and shrink in turn
        model[0].weight.grad = -away if count % 2 else away
        optimizer.step()
        if count == 0:
            halves.keep_amax()
        assert halves.current_amax() == halves.high.abs().max()


def test_a_weight_that_gets_another_index_rounds_with_that():
    weights = []
    for keeps in (True, False):
        model, optimizer = converted(torch.float32, layers=2)
        for count in range(3):
            set_gradients(model, count)
            optimizer.step()
            optimizer.param_groups[0]["params"].reverse()
            if not keeps:
                for layer in model:
                    layer.weight.halves.matrix = None
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_a_step_keeps_no_gradient():
    model = nn.Sequential(nn.Linear(64, 64))
    convert_to_float8(model)
    optimizer, _ = adamw(model, FP8Config())
    for _ in range(2):
        set_gradients(model)
        gradients = [weakref.ref(p.grad) for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        assert not any(ref() is not None for ref in gradients)


def test_an_interrupted_step_leaves_no_largest_value_of_the_weight_before(monkeypatch):
    model, optimizer = converted(torch.float32, layers=1)
    halves = model[0].weight.halves
    halves.keep_amax()
    for seed in (1, 2):
        set_gradients(model, seed)
        optimizer.step()
    assert halves.is_measured
    set_gradients(model, 3)

    def stopped(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(step, "_step_on", stopped)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert not halves.is_measured
