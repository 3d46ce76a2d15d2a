"""Registers that a kernel's machine code reads though nothing before has written them.

What the assembler makes of right PTX can be wrong: ptxas 12.8 and 12.9, which come with Triton 3.6,
lose a conversion to FP8 whose result is used twice (`torch_fp8.kernels.fp8_cast.fp8_bytes`). The
instruction that is left reads a register without a value. An emulator of PTX sees nothing of it.
"""

import re

_LINE = re.compile(
    r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\s*(.*?)\s*;", re.MULTILINE
)
_PREDICATE = re.compile(r"!?U?P[0-9T]+")
_REGISTER = re.compile(r"(?<![A-Z])R([0-9]+)")
_WRITES_NOTHING = ("ST", "BAR", "EXIT", "BRA", "RED", "BSYNC", "BSSY", "WARPSYNC", "NOP", "RET")
_WRITES_PREDICATES = ("ISETP", "FSETP", "R2P", "PLOP", "HSETP2", "DSETP")


def unwritten_registers(sass: str) -> list[str]:
    """Return the instructions that read a register which no earlier line writes.

    A register of which a half or a bit is replaced is read, whatever is in the rest.

    Args:
        sass: of one kernel, as ``nvdisasm -c`` has it.
    """
    written: set[int] = set()
    found = []
    for address, opcode, text in _LINE.findall(sass):
        operands = [operand.strip() for operand in text.split(",")]
        first = next((i for i, x in enumerate(operands) if not _PREDICATE.fullmatch(x)), None)
        sources, results = operands, range(0)
        if first is not None and not opcode.startswith((*_WRITES_NOTHING, *_WRITES_PREDICATES)):
            result = _REGISTER.match(operands[first])
            if result:
                number = int(result[1])
                results = range(number, number + _width(opcode))
            sources = operands[first + 1 :]
        read = {int(number) for x in sources for number in _REGISTER.findall(x)}
        if read - written and not opcode.startswith("PRMT") and not _replaces_a_bit(operands):
            found.append(f"{address}: {opcode} {text}")
        written.update(results)
    return found


def _replaces_a_bit(operands: list[str]) -> bool:
    """Return whether one bit is cleared: a register holds predicates."""
    masks = [int(x, 16) for x in operands if x.startswith("0xff") and len(x) == 10]
    return any((mask ^ 0xFFFFFFFF).bit_count() == 1 for mask in masks)


def _width(opcode: str) -> int:
    """Return how many registers an instruction writes."""
    if opcode.startswith("LDSM"):
        return int(opcode.rpartition(".")[2]) if opcode[-1] in "24" else 1
    if ".128" in opcode:
        return 4
    wide = ".64" in opcode or "WIDE" in opcode or opcode == "CS2R" or opcode.startswith("D")
    return 2 if wide else 1
