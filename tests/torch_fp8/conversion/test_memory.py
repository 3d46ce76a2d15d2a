import pytest
import torch
from torch import nn

from tests.internals import expected_bytes_per_param
from tests.steps import adamw
from torch_fp8 import FP8Config, convert_to_float8, memory_report


def _step(model, optimizer):
    model(torch.randn(4, 32)).sum().backward()
    optimizer.step()


def test_tied_and_shared_storages_count_once():
    a, b = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
    b.weight = a.weight
    report = memory_report(nn.Sequential(a, b))
    assert report.num_params == 1024
    assert report.weights == 4096


def test_gradients_in_one_bucket_count_once():
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(2)))
    bucket = torch.zeros(2, 32, 32)
    for layer, view in zip(model, bucket, strict=True):
        layer.weight.grad = view
    assert memory_report(model).gradients == bucket.nbytes


def test_histories_count_as_scales():
    model = nn.Sequential(nn.Linear(32, 32))
    convert_to_float8(model, FP8Config(recipe="delayed", amax_history_len=16))
    # Amaxes, a scale in 16 bytes and a slot of each operand.
    assert memory_report(model).scales == 4 * 3 * (16 + 4 + 1)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda p: torch.optim.AdamW(p), 16),
        (lambda p: torch.optim.Adam(p, amsgrad=True), 20),
        (lambda p: torch.optim.SGD(p, 0.1), 8),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), 12),
    ],
    ids=["adamw", "amsgrad", "sgd", "momentum"],
)
def test_expectation_is_what_a_step_then_holds(make, expected):
    model = nn.Linear(32, 32, bias=False)
    optimizer = make(model.parameters())
    text = expected_bytes_per_param(model, [optimizer])
    assert text.startswith(f"{expected:.2f} bytes per parameter")
    _step(model, optimizer)
    assert memory_report(model, optimizer).bytes_per_param == expected


@pytest.mark.parametrize(("level", "more"), [("O1", 0), ("O2", 2), ("O3", 0)])
def test_the_expectation_names_the_bytes_of_summed_gradients(level, more):
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    optimizer, _ = adamw(model, FP8Config(opt_level=level, recipe="tensorwise"))
    one, _, summed = expected_bytes_per_param(model, [optimizer]).partition(" bytes per parameter")
    words = f"; {float(one) + more:.2f} while micro-batches are summed"
    assert summed.count(words) == bool(more)
    assert ("summed" in summed) == bool(more)


def test_a_sharded_parameter_counts_with_this_ranks_part():
    model = nn.Linear(32, 32, bias=False)
    model.weight._local_tensor = model.weight.detach()[:16].clone()  # as a DTensor holds its shard
    text = expected_bytes_per_param(model, [torch.optim.AdamW(model.parameters())])
    assert "16.00 bytes per parameter" in text
    assert "weights 4.00, gradients 4.00, moments 8.00" in text
    report = memory_report(model)
    assert (report.num_params, report.weights) == (512, 2048)


def test_expectation_does_not_guess_other_optimizers():
    model = nn.Linear(32, 32)
    text = expected_bytes_per_param(model, [torch.optim.Rprop(model.parameters())])
    assert "the states of Rprop are not counted" in text
