"""The self-test's checks of kernels: a right kernel passes, a wrong one does not."""

import functools
import itertools

import pytest
import torch

from torch_fp8.environment import kernel_checks
from torch_fp8.environment.self_test import KERNELS
from torch_fp8.ops import messages, rms_norm, swiglu, swiglu_backward


def wrong(function, index, change):
    """`function`, whose first, third ... call changes one of its results."""
    calls = itertools.count()

    @functools.wraps(function)  # with its reference
    def call(*arguments):
        results = function(*arguments)
        if next(calls) % 2:
            return results
        if isinstance(results, torch.Tensor):
            return change(results)
        return tuple(change(part) if i == index else part for i, part in enumerate(results))

    return call


def one_element(x):
    """Flip the lowest bit of the last element."""
    x = x.clone()
    x.view(torch.uint8).view(-1)[-x.element_size()] ^= 1
    return x


FAULTS = [
    ("casts", (kernel_checks, "quantize_2d"), 0, one_element),
    ("casts", (kernel_checks, "quantize_2d"), 3, lambda scale: scale * 2),
    ("casts", (kernel_checks, "transposed_bytes"), 0, one_element),
    ("norm", (rms_norm, "rms_norm_quantize_once"), 4, lambda rstd: rstd * 1.001),
    ("norm", (rms_norm, "rms_norm_backward"), 1, lambda grad: grad * 1.1),
    ("swiglu", (swiglu, "swiglu_quantize"), 2, lambda qdata: qdata.roll(1)),
    ("swiglu", (swiglu_backward, "swiglu_backward"), 0, lambda grad: grad * 1.1),
    ("optimizer", (kernel_checks, "_trained"), 0, one_element),
    ("messages", (messages, "pack_flat"), 0, one_element),
    ("messages", (messages, "reduce_and_repack"), 0, one_element),
]


@pytest.mark.parametrize("check", KERNELS)
def test_a_right_kernel_passes(check):
    assert getattr(kernel_checks, f"check_{check}")("cpu")


@pytest.mark.parametrize(
    ("check", "place", "index", "change"), FAULTS, ids=[f"{f[1][1]}-{f[2]}" for f in FAULTS]
)
def test_a_wrong_kernel_is_told(check, place, index, change, monkeypatch):
    owner, name = place
    monkeypatch.setattr(owner, name, wrong(getattr(owner, name), index, change))
    with pytest.raises(RuntimeError, match="differ"):
        getattr(kernel_checks, f"check_{check}")("cpu")


def test_a_result_of_another_form_is_told():
    x = torch.ones(4, 4)
    for got in ([None], [x[:2]], [x.half()]):
        with pytest.raises(RuntimeError, match=r"only one|another shape"):
            kernel_checks._compare("it", got, [x])
