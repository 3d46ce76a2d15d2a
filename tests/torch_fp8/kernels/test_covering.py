"""Few launches stand for many: of each kernel, every compile-time choice is among them."""

import itertools
from dataclasses import replace

import pytest
import torch

from tests.internals import kernels_quantize as quantize
from tests.internals import kernels_smooth as smooth
from tests.torch_fp8.kernels.conftest import Launch, covering


def launches(kernel, *, without=()):
    """One for each combination of five choices of two or three values, but for `without`."""
    values = itertools.product(range(3), range(3), (False, True), (False, True), (False, True))
    return [
        Launch(kernel, (("x", "*bf16"),), tuple(zip("ABCDE", value, strict=True)), (), (), (1,))
        for value in values
        if value not in without
    ]


def choices(found):
    return {(launch.kernel, choice) for launch in found for choice in launch.choices}


class Kernel:
    def __init__(self, name):
        self.__name__ = name


def test_every_choice_is_kept_in_a_few_launches():
    given = launches(Kernel("cast")) + launches(Kernel("amax"))
    kept = covering(given)
    assert choices(kept) == choices(given)
    assert len(given) == 144
    assert len(kept) <= 2 * 3
    assert kept == [launch for launch in given if launch in kept]


def test_what_differs_in_one_choice_is_kept():
    one = Launch(Kernel("a"), (("x", "*bf16"),), (("A", 1),), ("x",), (("num_warps", 4),), (1,))
    others = [
        replace(one, signature=(("x", "*fp32"),)),
        replace(one, constants=(("A", 2),)),
        replace(one, divisible=()),
        replace(one, options=(("num_warps", 8),)),
    ]
    assert covering([one, *others]) == [one, *others]
    assert covering([one, replace(one, grid=(2,))]) == [one, replace(one, grid=(2,))]
    assert covering([]) == []


def test_what_is_compiled_is_held_against_the_record(request, record_launches, monkeypatch):
    """A variant that nobody recorded, or that takes more than was recorded, fails."""
    x = torch.empty(2048, 512, dtype=torch.bfloat16)
    with record_launches(quantize) as launches:
        smooth.column_amax(x)
    rows = request.getfixturevalue("recorded_resources")
    if not rows:
        pytest.skip("recorded with another release of Triton")
    compile_all = request.getfixturevalue("compile_all")
    assert compile_all(launches)
    (key,) = (key for key in rows if key[0] == f"sm_90 {launches[0].name}")
    monkeypatch.setitem(rows, key, rows[key] | {"registers": 8})
    with pytest.raises(AssertionError, match="recorded: "):
        compile_all(launches)
    monkeypatch.delitem(rows, key)
    with pytest.raises(AssertionError, match=r"is not recorded: run `python -m benchmarks"):
        compile_all(launches)
