import pytest
import torch
from torch import nn

from tests.internals import Float8Grad, SplitWeight, residual_of
from tests.steps import adamw
from torch_fp8 import FP8Config, convert_optimizer, memory_report, merged_state_dict


def _converted(dtype=torch.float32, lr=1e-3, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 128), nn.Linear(128, 256), nn.Linear(256, 128)).to(dtype)
    config = FP8Config(emulate=True, **options)
    return model, *adamw(model, config, lr=lr)


def _step(model, optimizer, seed=0):
    ids = torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    (model(ids) - 1).float().square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize(("level", "grad_bytes", "most"), [("O2", 4, 10.2), ("O3", 1, 7.3)])
def test_weights_keep_their_dtype_and_bytes_are_those_of_the_docs(level, grad_bytes, most):
    model, optimizer, report = _converted(opt_level=level, split_weights=False)
    assert "split_weights=False" in str(report)
    before = model[1].weight
    _step(model, optimizer)
    assert model[1].weight is before
    assert not any(isinstance(p, SplitWeight) for p in model.parameters())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert (type(model[1].weight.grad) is Float8Grad) == (level == "O3")
    layers = nn.ModuleList(model[1:])
    counted = memory_report(layers, optimizer)
    assert counted.master == 0
    assert counted.bytes_per_param < most
    assert counted.gradients < (grad_bytes + 0.1) * counted.num_params


def test_what_was_split_is_joined_again():
    model, optimizer, _ = _converted()
    for seed in range(3):
        _step(model, optimizer, seed)
    whole = merged_state_dict(model, optimizer)
    convert_optimizer(optimizer, FP8Config(split_weights=False, emulate=True), model=model)
    assert not any(isinstance(p, SplitWeight) for p in model.parameters())
    assert all(torch.equal(whole[name], p) for name, p in model.state_dict().items())
    _step(model, optimizer)


def test_bf16_weights_have_no_residual_and_low_rates_are_warned_of():
    with pytest.warns(UserWarning, match=r"split_weights=False\) with BF16 weights"):
        model, optimizer, _ = _converted(torch.bfloat16, 1e-6, split_weights=False)
    _step(model, optimizer)
    assert residual_of(model[1].weight) is None
