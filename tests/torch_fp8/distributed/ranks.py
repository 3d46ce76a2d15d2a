"""Tests whose bodies run on several gloo ranks, and what they ask of the other ranks."""

import math
import os

import pytest
import torch
import torch.distributed as dist

RANK, RANKS = map(int, os.environ.get("TEST_RANK", "0 1").split())
"""This process's rank, and their number; the first rank of one in the process that runs pytest."""


def on_ranks(*counts):
    """Run a test's body on each of this many ranks; it fails if it fails on one of them."""

    def decorate(body):
        def test(ranks):
            for rank, error in enumerate(ranks[body.__name__]):
                assert not error, f"on rank {rank}: {error}"

        test.__name__, test.__doc__, test.body = body.__name__, body.__doc__, body
        return pytest.mark.parametrize("ranks", counts, indirect=True)(test)

    return decorate


def of_ranks(value):
    """Return a value of every rank."""
    dist.all_gather_object(values := [None] * RANKS, value)
    return values


def same_on_ranks(value):
    """Return a value after a comparison with that of the other ranks."""
    assert all(other == value for other in of_ranks(value))
    return value


def gathered(tensor):
    """Return every rank's tensor, in float32."""
    tensor = tensor.detach().to_dense().float().contiguous()
    every = [torch.empty_like(tensor) for _ in range(RANKS)]
    dist.all_gather(every, tensor)
    return every


def equal_on_ranks(tensors):
    """Return whether each tensor is the same on all ranks, NaN included."""
    every = [gathered(tensor) for tensor in tensors]
    return all(t.nan_to_num(12345.0).equal(of[0].nan_to_num(12345.0)) for of in every for t in of)


def worst_sum(pairs):
    """Return the lowest and highest projection of sums on the exact ones, and the lowest dB."""
    pairs = [(made.double(), exact.double()) for made, exact in pairs if exact.numel()]
    projections = [float((made * exact).sum() / exact.square().sum()) for made, exact in pairs]
    noise = max(float((made - exact).norm() / exact.norm()) for made, exact in pairs)
    return [min(projections), max(projections), -20 * math.log10(max(noise, 1e-9))]
