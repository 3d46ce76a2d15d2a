"""Faults that are planted in compiled kernels and launches: each is found, and by which check."""

import contextlib
import re

import pytest
import torch
import triton
import triton.language as tl

from tests.emulator import faults
from tests.emulator.driver import FIRST_ARGUMENT, emulated
from tests.emulator.families import BF16, WHOLE, families
from tests.emulator.races import Races
from tests.emulator.schedule import Shuffled
from tests.internals import CastOptions
from tests.kernel_cases import casts
from tests.kernel_cases.comparison import Mismatch

pytestmark = pytest.mark.long
FAMILIES = families()


class Edit:
    """Replaces a part of a kernel's PTX.

    Args:
        kernel: its name.
        pattern: what is replaced, all of it or the one with this number.
        replacement: as for `re.sub`.
        number: which one; None: all.
    """

    def __init__(self, kernel, pattern, replacement, number=None):
        self.kernel, self.number = kernel, number
        self.pattern, self.replacement = re.compile(pattern), replacement
        self.done = 0

    def __call__(self, name, text):
        if name != self.kernel:
            return text
        places = list(self.pattern.finditer(text))
        chosen = places if self.number is None else places[self.number : self.number + 1]
        self.done += len(chosen)
        for place in reversed(chosen):
            text = text[: place.start()] + place.expand(self.replacement) + text[place.end() :]
        return text


def assert_found(family, edit, expected, match, schedule=None):
    """Require that the faulty kernel is found out."""
    options = {} if schedule is None else {"schedule": schedule}
    with (
        emulated(edit=edit, watch=lambda: [Races()], **options),
        pytest.raises(expected, match=match),
    ):
        FAMILIES[family]()
    assert edit.done


BARRIER = r"\tbar\.sync \t0;\n"


@pytest.mark.parametrize(
    ("family", "kernel", "number"),
    [("transpose", "transpose_kernel", 0), ("cast block_1x128", "quantize_blocks_kernel", 0)],
)
@pytest.mark.parametrize("seed", [None, 1], ids=["lockstep", "shuffled"])
def test_a_barrier_taken_out(family, kernel, number, seed):
    edit = Edit(kernel, BARRIER, "", number)
    schedule = None if seed is None else lambda: Shuffled(seed)
    what = "since the last barrier|never written"
    assert_found(family, edit, (faults.Race, faults.Uninitialised), what, schedule)


@pytest.mark.parametrize(
    ("family", "kernel"), [("known scale", "cast_kernel"), ("transpose", "transpose_kernel")]
)
def test_a_mask_off_by_one(family, kernel):
    edit = Edit(kernel, r"setp\.lt\.s(?=64|32\s+%p\d+, %r\d+, %r)", "setp.le.s")
    assert_found(
        family, edit, (faults.OutOfBounds, faults.Race), "behind the end of|nothing orders"
    )


@pytest.mark.parametrize(("family", "distance"), [("cast block_1x128", 8), ("cast block_1x32", 2)])
def test_a_scale_of_another_block(family, distance):
    """The largest of half a block and half of the next one."""
    other = rf"\1 {2 * distance}, 31"
    edit = Edit("quantize_blocks_kernel", rf"(shfl\.sync\.bfly.*,) {distance}, 31", other)
    assert_found(family, edit, Mismatch, "differ")


def test_an_address_that_is_not_aligned():
    """A binary for multiples of 16 bytes gets a tensor that begins two bytes before one."""
    kernel = casts.kernel()
    options = CastOptions(torch.float8_e4m3fn, "tensorwise", False, True, False, torch.ones(()))
    memory = torch.randn(WHOLE[0] * WHOLE[1] + 8).to(BF16)
    x, moved = memory[8:].view(WHOLE), memory[7:-1].view(WHOLE)
    with emulated() as emulation:
        kernel(x, options)
        launcher, arguments = emulation.last
        assert arguments[FIRST_ARGUMENT] is x
        arguments = [moved if a is x else a for a in arguments]
        with pytest.raises(faults.Misaligned, match=r"16 bytes at .* byte 0 of x_ptr"):
            launcher(*arguments)


def test_an_address_that_is_computed_one_byte_off():
    edit = Edit("quantize_blocks_kernel", r"(st\.global\.v4\.b32 \[ %rd\d+ )\+ 0", r"\1+ 1", 0)
    assert_found("cast block_1x128", edit, faults.Misaligned, "16 bytes at")


_RAISE = r"(?:atom|red)\.global\.gpu\.relaxed\.max\.s32 (?:%r\d+, )?(\[.*\]), (%r\d+)"


def test_a_slot_that_is_lowered():
    edit = Edit("cast_kernel", r"relaxed\.max\.s32", "relaxed.min.s32")
    assert_found("known scale", edit, Mismatch, "slot of 0.0: 1 of 1 differ")


def test_a_store_instead_of_an_atomic():
    edit = Edit("cast_kernel", _RAISE, r"st.global.b32 \1, { \2 }")
    assert_found("known scale", edit, faults.Race, "nothing orders them")


@triton.jit
def last_sum_kernel(x_ptr, count_ptr, total_ptr, SEM: tl.constexpr):
    """Write x[p] in each program; the last one that counts itself in adds all up."""
    program = tl.program_id(0)
    tl.store(x_ptr + program, program + 1)
    tl.debug_barrier()
    if tl.atomic_add(count_ptr, 1, sem=SEM) == 3:
        tl.store(total_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, 4)), axis=0))
        tl.store(count_ptr, 0)


@pytest.mark.parametrize("sem", ["acq_rel", "relaxed"])
def test_an_atomic_that_orders_nothing(sem):
    """A count releases what a program has written and acquires what the others have, or not."""
    x, (count, total) = torch.zeros(4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    found = contextlib.nullcontext()
    if sem == "relaxed":
        found = pytest.raises(faults.Race, match="nothing orders them")
    with emulated(watch=lambda: [Races()]), found:
        for _ in range(2):
            last_sum_kernel[(4,)](x, count, total, SEM=sem)
            assert (count.item(), total.item()) == (0, 10)


def test_memory_that_nobody_has_written():
    """A slot without a first value, and an amax that no kernel has made."""
    x = torch.randn(WHOLE).to(BF16)
    cast = CastOptions(torch.float8_e4m3fn, "tensorwise", False, True, False)
    with emulated():
        raising = cast._replace(scale=torch.ones(()), amax=torch.empty(()))
        with pytest.raises(faults.Uninitialised, match=r"byte 0 of .*amax_ptr\b.*, never written"):
            casts.kernel()(x, raising)
        with pytest.raises(faults.Uninitialised, match="never written"):
            casts.kernel()(x, cast._replace(amax=torch.empty(())))
