"""What runs again and what is kept, of traces made by hand."""

import torch

from torch_fp8.autograd.recompute_plan import Kind, Operation, Result, Trace, make_plan


def _operation(reads, returns, kind=Kind.PLAIN, writes=(), sizes=None):
    sizes = sizes or [(8, 8)] * len(returns)
    results = [
        Result(s, n, (1,) * len(n), torch.bfloat16, torch.device("cpu"))
        for s, n in zip(returns, sizes, strict=True)
    ]
    return Operation("", (), frozenset(reads), frozenset(writes), results, tuple, kind)


def _plan(operations, saved=(), opaque=0):
    """``saved``: pairs of a storage and how many operations had run."""
    trace = Trace(list(operations), opaque=opaque)
    for storage, count in saved:
        trace.saved[count].add(storage)
    plan = make_plan(trace)
    return [i for i, runs in enumerate(plan.runs) if runs], plan.keeps


# 0 comes from outside; 1 is a product, 2 and 3 its payload in two layouts, 4 what a GEMM makes.
CHAIN = (_operation([0], [1]), _operation([1], [2, 3], Kind.KEPT), _operation([2], [4]))


def test_nothing_runs_that_nobody_needs():
    assert _plan(CHAIN) == ([], set())
    assert _plan(CHAIN, saved=[(0, 0), (0, 3)]) == ([], set())


def test_a_kept_result_needs_nothing():
    assert _plan(CHAIN, saved=[(3, 2)]) == ([], {(1, 1)})


def test_what_runs_again_reads_what_was_kept():
    assert _plan(CHAIN, saved=[(3, 2), (4, 3)]) == ([2], {(1, 0), (1, 1)})


def test_what_leads_to_a_saved_tensor_runs():
    assert _plan(CHAIN, saved=[(1, 1)]) == ([0], set())


def test_what_writes_a_needed_storage_runs():
    writes = _operation([1, 5], [1], writes=[1])
    chain = (_operation([0], [1]), _operation([0], [5]), writes, _operation([1], [6]))
    assert _plan(chain, saved=[(6, 4)]) == ([0, 1, 2, 3], set())
    assert _plan(chain, saved=[(5, 2)]) == ([1], set())
    # saved before it is written to: the write need not be repeated
    assert _plan(chain, saved=[(1, 2)]) == ([0], set())


def test_a_write_to_a_part_needs_the_rest():
    chain = (_operation([0], [1]), _operation([2], [], writes=[1]), _operation([1], [3]))
    assert _plan(chain, saved=[(3, 3)]) == ([0, 1, 2], set())
    forced = _operation([2], [], Kind.FORCED, writes=[1])
    assert _plan((chain[0], forced)) == ([0, 1], set())


def test_views_carry_the_storage_they_show():
    chain = (_operation([0], [1]), _operation([1], [1], Kind.VIEW), _operation([1], [2]))
    assert _plan(chain, saved=[(2, 3)]) == ([0, 2], set())


def test_random_operators_run_with_what_they_read():
    chain = (*CHAIN, _operation([4], [5], Kind.FORCED))
    assert _plan(chain) == ([2, 3], {(1, 0)})


def test_cheap_casts_run_again_and_their_scalars_are_kept():
    cheap = _operation([0], [1, 2], Kind.CHEAP, sizes=[(8, 8), ()])
    gemm = _operation([1], [3])
    assert _plan((cheap, gemm), saved=[(2, 2)]) == ([], {(0, 1)})
    assert _plan((cheap, gemm), saved=[(2, 2), (3, 2)]) == ([0, 1], {(0, 1)})


def test_a_history_that_moved_leaves_its_scale():
    cast = _operation([0], [1, 2], Kind.HISTORY, sizes=[(8, 8), ()])
    assert _plan((cast, _operation([1], [3])), saved=[(3, 2)]) == ([0, 1], {(0, 1)})
    assert _plan((cast,)) == ([], set())


def test_before_something_opaque_everything_is_there():
    assert _plan(CHAIN, opaque=3) == ([0, 2], {(1, 0), (1, 1)})
    assert _plan(CHAIN, opaque=2) == ([0], {(1, 0), (1, 1)})
