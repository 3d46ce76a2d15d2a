"""Reads what the assembler recorded of a kernel in its cubin, an ELF file, without a tool."""

import struct
from collections.abc import Iterator
from typing import NamedTuple

_REGISTERS, _FRAME = 0x2F, 0x11  # attributes of .nv.info: REGCOUNT and FRAME_SIZE
_WITH_VALUE = 4  # the format of attributes whose value follows, with its size


class Usage(NamedTuple):
    """Registers of a thread, and its bytes of stack (spills live there) and of local memory."""

    registers: int
    stack: int
    local: int


def usage(cubin: bytes) -> Usage:
    """Return the largest figures of the functions of a cubin.

    ``cuobjdump -res-usage`` prints the same as REG, STACK and LOCAL.

    Raises:
        ValueError: nothing in it says how many registers a function takes.
    """
    found: dict[int, int] = {}
    local = 0
    for name, data, size in _sections(cubin):
        if name == ".nv.info":
            for attribute, value in _attributes(data):
                found[attribute] = max(value, found.get(attribute, 0))
        elif name.startswith(".nv.local."):
            local = max(local, size)
    if _REGISTERS not in found:
        raise ValueError("the cubin has no .nv.info that says how many registers a function takes")
    return Usage(found[_REGISTERS], found.get(_FRAME, 0), local)


def _sections(elf: bytes) -> Iterator[tuple[str, bytes, int]]:
    """Yield name, bytes in the file and size of each section of a 64-bit ELF file."""
    if elf[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", elf, 40)
    entry, count, names_index = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * entry) for i in range(count)]
    names = headers[names_index][4]
    for name, _, _, _, offset, size in headers:
        start = names + name
        text = elf[start : elf.index(b"\0", start)].decode()
        yield text, elf[offset : offset + size], size


def _attributes(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield the attributes that hold a number for each function: (symbol, number) after a head."""
    place = 0
    while place < len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, place)
        place += 4
        if form != _WITH_VALUE:  # the two bytes of the size are the value
            continue
        if size == 8:
            yield attribute, struct.unpack_from("<II", data, place)[1]
        place += size
