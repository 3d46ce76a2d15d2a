"""Few launches stand for many: every two compile-time choices that go together are among them."""

import itertools
from dataclasses import replace

from tests.torch_fp8.kernels.conftest import Launch, covering


def launches(kernel, *, without=()):
    """One for each combination of five choices of two or three values, but for `without`."""
    values = itertools.product(range(3), range(3), (False, True), (False, True), (False, True))
    return [
        Launch(kernel, (("x", "*bf16"),), tuple(zip("ABCDE", value, strict=True)), (), (), (1,))
        for value in values
        if value not in without
    ]


def pairs(found):
    return {
        (launch.kernel, *pair)
        for launch in found
        for pair in itertools.combinations(launch.choices, 2)
    }


class Kernel:
    def __init__(self, name):
        self.__name__ = name


def test_every_pair_of_choices_is_kept_in_a_seventh_of_the_launches():
    given = launches(Kernel("cast")) + launches(Kernel("amax"))
    kept = covering(given)
    assert pairs(kept) == pairs(given)
    assert len(given) == 144
    assert len(kept) <= 24
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
