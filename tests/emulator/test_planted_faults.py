"""Faults that are planted in compiled kernels and launches: each is found, and by which check."""

import re

import pytest
import torch

from tests.emulator import faults
from tests.emulator.driver import FIRST_ARGUMENT, emulated
from tests.emulator.families import BF16, WHOLE, families
from tests.emulator.races import Races
from tests.emulator.schedule import Shuffled
from tests.kernel_cases import casts
from tests.kernel_cases.comparison import Mismatch
from torch_fp8.kernels.arguments import CastOptions, DelayedCastOptions

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
    ("family", "kernel"),
    [("delayed cast", "cast_delayed_kernel"), ("transpose", "transpose_kernel")],
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


_COUNT = r"(acq_rel\.add\.u32 %r\d+, \[ (%rd\d+) (?:.|\n)*?)\t@%p\d+ st\.global\.b32 \[ \2 .*\n"


@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [(_COUNT, r"\1"), (r"relaxed\.exch\.b32", "relaxed.or.b32")],
    ids=["count", "amax"],
)
def test_a_counter_left_over(pattern, replacement):
    edit = Edit("cast_delayed_kernel", pattern, replacement)
    assert_found("delayed cast", edit, Mismatch, "progress is left over")


@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        (r"gpu\.acq_rel\.add", "gpu.relaxed.add"),
        (
            r"atom\.global\.gpu\.relaxed\.max\.s32 %r\d+, (\[.*\]), (%r\d+)",
            r"st.global.b32 \1, { \2 }",
        ),
    ],
    ids=["an atomic that orders nothing", "a store instead of an atomic"],
)
def test_two_programs_that_race(pattern, replacement):
    edit = Edit("cast_delayed_kernel", pattern, replacement)
    assert_found("delayed cast", edit, faults.Race, "nothing orders them")


def test_memory_that_nobody_has_written():
    """A history without its first values, and an amax that no kernel has made."""
    x = torch.randn(WHOLE).to(BF16)
    options = DelayedCastOptions(
        torch.empty(16), torch.zeros(2), torch.float8_e4m3fn, "max", 0, True, True
    )
    with emulated():
        history = torch.empty(16)
        with pytest.raises(faults.Uninitialised, match=r"byte 0 of history_ptr, never written"):
            casts.delayed_kernel()(x, options._replace(amaxes=history), None)
        amax = torch.empty(())
        cast = CastOptions(torch.float8_e4m3fn, "tensorwise", False, True, False, amax=amax)
        with pytest.raises(faults.Uninitialised, match="never written"):
            casts.kernel()(x, cast)
