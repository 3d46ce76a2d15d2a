"""What the emulator refuses, and what it finds in small kernels that were written by hand."""

import numpy as np
import pytest

from tests.emulator import faults
from tests.emulator.global_memory import GlobalMemory, Region
from tests.emulator.machine import Launch
from tests.emulator.ptx import PtxError
from tests.emulator.schedule import Lockstep, Shuffled

_TEXT = """
.version 8.7
.target {target}
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry small(
	.param .u64 .ptr .global .align 1 small_param_0,
	.param .u32 small_param_1
)
.reqntid 64
{{
	.reg .pred 	%p<8>;
	.reg .b16 	%rs<8>;
	.reg .b32 	%r<32>;
	.reg .b64 	%rd<8>;
	ld.param.b64 	%rd1, [small_param_0];
	ld.param.b32 	%r1, [small_param_1];
	mov.u32 	%r2, %tid.x;
	mul.wide.u32 	%rd2, %r2, 4;
	add.s64 	%rd3, %rd1, %rd2;
{body}
	ret;
}}
"""


def text_of(body, target="sm_90a"):
    return _TEXT.format(target=target, body=body)


def run(body, values, number=0, programs=1, schedule=None, shared=256, **options):
    """Run a kernel of 64 threads, with the address of values and a number as its arguments."""
    start = values.ctypes.data
    memory = GlobalMemory([Region(start, start + values.nbytes, "values")], **options)
    parameters = np.uint64(start).tobytes() + np.uint32(number).tobytes()
    grid = (programs, 1, 1)
    Launch(text_of(body), parameters, grid, shared, memory, schedule, most_blocks=2000).run()
    return values


SCHEDULES = {"lockstep": Lockstep, "shuffled": lambda: Shuffled(0)}


@pytest.fixture(params=SCHEDULES.values(), ids=SCHEDULES)
def schedule(request):
    return request.param()


def test_threads_diverge_and_meet_again(schedule):
    body = """
	setp.lt.u32 	%p1, %r2, 10;
	mov.b32 	%r4, 0;
	@%p1 bra 	$L__BB0_2;
	mov.b32 	%r4, 5;
	bra.uni 	$L__BB0_3;
$L__BB0_2:
	add.s32 	%r4, %r4, 1;
	setp.lt.u32 	%p2, %r4, %r2;
	@%p2 bra 	$L__BB0_2;
$L__BB0_3:
	shfl.sync.bfly.b32 	%r5, %r4, 1, 31, -1;
	st.global.b32 [ %rd3 + 0 ], { %r5 };
"""
    results = run(body, np.zeros(64, np.uint32), schedule=schedule)
    want = [max(i, 1) if i < 10 else 5 for i in range(64)]
    assert results.tolist() == [want[i ^ 1] for i in range(64)]


def test_an_access_outside_is_named():
    body = "\tld.global.b32 { %r5 }, [ %rd3 + 4 ];"
    with pytest.raises(faults.OutOfBounds, match=r"line 21 .*0 bytes behind the end of values"):
        run(body, np.zeros(64, np.uint32))


def test_a_misaligned_access_is_named():
    body = "\tld.global.v2.b32 { %r5, %r6 }, [ %rd3 + 0 ];"
    with pytest.raises(faults.Misaligned, match=r"8 bytes at .*byte 4 of values"):
        run(body, np.zeros(68, np.uint64)[:64].view(np.uint32))


def test_shared_memory_that_nobody_has_written_is_named():
    body = "\tshl.b32 %r3, %r2, 2;\n\tld.shared.b32 %r4, [%r3];"
    with pytest.raises(faults.Uninitialised, match="byte 0 of shared memory"):
        run(body, np.zeros(64, np.uint32))


def test_shared_memory_ends():
    body = "\tshl.b32 %r3, %r2, 2;\n\tst.shared.b32 [%r3], %r2;"
    with pytest.raises(faults.OutOfBounds, match="252 of 255 of shared memory"):
        run(body, np.zeros(64, np.uint32), shared=255)


@pytest.mark.parametrize("barrier", ["", "\tbar.sync 	0;"])
def test_a_barrier_orders_warps(barrier, schedule):
    body = f"""
	shl.b32 	%r3, %r2, 2;
	st.shared.b32 	[%r3], %r2;
{barrier}
	xor.b32 	%r4, %r3, 128;
	ld.shared.b32 	%r5, [%r4];
	st.global.b32 [ %rd3 + 0 ], {{ %r5 }};
"""
    values = np.zeros(64, np.uint32)
    if barrier:
        assert run(body, values, schedule=schedule).tolist() == [i ^ 32 for i in range(64)]
    else:
        with pytest.raises((faults.Race, faults.Uninitialised)):
            run(body, values, schedule=schedule)


def test_a_barrier_that_some_threads_never_reach(schedule):
    body = """
	setp.lt.u32 	%p1, %r2, 32;
	@%p1 bra 	$L__BB0_2;
	bar.sync 	0;
$L__BB0_2:
"""
    with pytest.raises(faults.Divergence, match="32 of 64 threads of program 0 wait"):
        run(body, np.zeros(64, np.uint32), schedule=schedule)


def test_a_shuffle_without_all_threads_of_the_warp():
    body = """
	setp.lt.u32 	%p1, %r2, 10;
	@%p1 bra 	$L__BB0_2;
	shfl.sync.bfly.b32 	%r5, %r2, 1, 31, -1;
$L__BB0_2:
"""
    with pytest.raises(faults.Divergence, match="all of a warp"):
        run(body, np.zeros(64, np.uint32))


def test_a_program_that_waits_for_another_never_ends(schedule):
    body = """
$L__BB0_1:
	ld.global.b32 { %r5 }, [ %rd1 + 0 ];
	setp.eq.b32 	%p1, %r5, 0;
	@%p1 bra 	$L__BB0_1;
"""
    with pytest.raises(faults.NeverEnds, match=r"programs \[0\] go on"):
        run(body, np.zeros(64, np.uint32), schedule=schedule)


@pytest.mark.parametrize(
    ("body", "match"),
    [
        ("\twgmma.fence.sync.aligned;", r"line 21: opcode wgmma.fence.sync.aligned is unknown"),
        ("\tadd.rz.f32 %r3, %r2, %r2;", "opcode add.rz.f32"),
        ("\tcp.async.commit_group;", "opcode cp.async.commit_group"),
        ("\tbar.sync 1, 32;", "a barrier of some threads"),
        ("\tmov.b32 %r3, nowhere;", "operand nowhere"),
    ],
)
def test_what_is_unknown_is_refused_with_its_line(body, match):
    with pytest.raises(PtxError, match=match):
        run(body, np.zeros(64, np.uint32))
