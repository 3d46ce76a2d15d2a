"""Floors of BF16 are the least that a machine takes that does just what is counted.

Its clock is not that of this machine: an operator takes the longer of its arithmetic, as torch's
`FlopCounterMode` counts it, and of the bytes of its tensors.
"""

import argparse

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks import bench_block, bench_gemm, bench_linear, measurement
from benchmarks.card import measured_rates
from benchmarks.measurement import Budget
from benchmarks.roofline import Rates

CPU = torch.device("cpu")
BYTES_COUNT = Rates(bandwidth=1e9, bf16=2e10, fp8=4e10)
"""A machine on which the bytes take longer than the arithmetic in all but the largest GEMMs."""
FLOPS_COUNT = Rates(bandwidth=1e9, bf16=1e9, fp8=2e9)


class CountedTime(TorchDispatchMode):
    """The seconds that operators take at `rates`; those that only look at a tensor take none."""

    def __init__(self, rates):
        super().__init__()
        self.rates, self.seconds = rates, 0.0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if not (function.is_view or function._schema.name.startswith("aten::empty")):
            tensors = [
                x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)
            ]
            num_bytes = sum({x.data_ptr(): x.nbytes for x in tensors}.values())
            count = flop_registry.get(function._overloadpacket)
            flops = count(*args, **kwargs, out_val=result) if count else 0
            self.seconds += max(flops / self.rates.bf16, num_bytes / self.rates.bandwidth)
        return result


@pytest.fixture(params=[BYTES_COUNT, FLOPS_COUNT], ids=["bytes", "flops"])
def rates(request, monkeypatch):
    """Rates of the machine whose clock the benchmarks read."""

    def clock(run):
        with CountedTime(request.param) as counted:
            run()
        return counted.seconds * 1e3, 0.0

    monkeypatch.setattr(measurement, "_time_on_cpu", clock)
    return request.param


def test_measured_rates_are_those_of_the_machine(rates):
    measured = measured_rates(CPU, toy=True)
    assert measured.bandwidth == pytest.approx(rates.bandwidth)
    assert (measured.bf16, measured.fp8) == pytest.approx((rates.bf16, rates.fp8))


@pytest.mark.parametrize("gemm", bench_gemm.GEMMS)
@pytest.mark.parametrize("m", [16, 512])
def test_a_gemm_takes_its_floor(rates, gemm, m):
    rows = bench_gemm.gemm_rows(gemm, m, 256, 192, rates, CPU)
    assert [row["floor_share"] for row in rows if row["variant"] == "bf16"] == [1.0]


def test_linears_take_their_floors_and_a_chain_with_norms_more(rates):
    block, tokens = bench_linear.TOY_BLOCK, bench_linear.TOY_TOKENS[0]
    rows = bench_linear.measure(block, tokens, ("bf16",), "eager", rates, CPU, Budget(900))
    *alone, together, chain = (row["floor_share"] for row in rows)
    assert alone == [1.0] * 8  # and their sum
    assert 0.9 < together < 1  # gradients of shared inputs are added
    assert (0.3 if rates is BYTES_COUNT else 0.7) < chain < 1


def test_a_block_takes_more_than_its_floor(rates):
    """What is between the linears is read and written more than once in eager mode; and torch
    counts the arithmetic of attention as if it were not causal, in products alone.
    """
    arguments = argparse.Namespace(toy=True, variants=["bf16"], modes=["eager"])
    with sdpa_kernel(SDPBackend.MATH):
        ((rows, _),) = bench_block.measure(1, arguments, CPU, Budget(900))
    assert (0.3 if rates is BYTES_COUNT else 0.7) < rows[0]["floor_share"] < 1
