"""Instructions that read a register which nothing has written are found, and no others."""

import pytest

from tests.unwritten_registers import unwritten_registers

LOST = """
        /*0690*/                   F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R4, R17, R15, R6 ;
        /*06b0*/                   PRMT R6, R4, 0x7632, R6 ;
"""
"""What ptxas 12.8 makes of two conversions with equal results: R6 was to have the second."""

RIGHT = """
        /*0010*/                   S2R R8, SR_TID.X ;
        /*0020*/                   CS2R R2, SRZ ;
        /*0030*/                   IMAD.WIDE.U32 R4, R8, 0x2, R2 ;
        /*0040*/             @!P0 LDG.E.128 R12, desc[UR4][R4.64] ;
        /*0050*/                   LDSM.16.MT88.4 R20, [R8] ;
        /*0060*/                   ISETP.GE.AND P0, PT, R23, R15, PT ;
        /*0070*/                   PRMT R9, R14, 0x7610, R9 ;
        /*0080*/                   FADD R9, R3, R5 ;
        /*0088*/                   LOP3.LUT R33, R33, 0xffffff7f, RZ, 0xc0, !PT ;
        /*0090*/               @P0 STG.E.128 desc[UR4][R4.64], R20 ;
"""


def test_code_that_reads_what_was_written_passes():
    assert unwritten_registers(RIGHT) == []


def test_a_lost_conversion_is_found():
    before = "\n".join(f"/*{i:04x}*/ MOV R{i}, RZ ;" for i in (15, 17))
    (found,) = unwritten_registers(before + LOST)
    assert found.startswith("0690: F2FP")


@pytest.mark.parametrize("place", [1, 2, 4, 5])
def test_each_line_needs_those_before(place):
    lines = RIGHT.strip().splitlines()
    assert unwritten_registers("\n".join(lines[: place - 1] + lines[place:]))
