"""Reads PTX as Triton's compiler writes it: one kernel, its parameters and its basic blocks."""

import re
from dataclasses import dataclass, field
from typing import NamedTuple

TARGETS = ("sm_90", "sm_90a", "sm_100", "sm_100a")
WIDTHS = {"pred": 1, "b8": 8, "b16": 16, "b32": 32, "b64": 64, "f32": 32, "f64": 64}
_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
_PARAMETER = re.compile(r"\.param \.(?:align \d+ \.)?[usbf](8|16|32|64)(?: [^,]*?)? ?(\w+),?$")
_REGISTERS = re.compile(r"\.reg \.(\w+)\s+(%\w+)<(\d+)>;")
_CODE = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*?)\s*;$", re.DOTALL)
_ADDRESS = re.compile(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\d+))?\s*\]$")


class PtxError(Exception):
    """Text that the emulator does not run, with its line."""


class Address(NamedTuple):
    """A place in memory: a register or a name, and the bytes from there on."""

    start: str
    offset: int


Operand = str | Address | tuple[str, ...]


@dataclass(frozen=True)
class Instruction:
    """One instruction; `negated` is whether it runs where `predicate` is false."""

    line: int
    text: str
    opcode: str
    operands: tuple[Operand, ...]
    predicate: str | None = None
    negated: bool = False


@dataclass
class Block:
    """Instructions that run one after another; only the last one may branch or wait."""

    number: int
    code: list[Instruction] = field(default_factory=list)


@dataclass
class Kernel:
    """A kernel.

    Attributes:
        name: its name.
        target: the architecture that it was compiled for.
        parameters: name -> (offset in bytes, size in bytes) of the parameters, in their order.
        threads: number of threads of a program.
        registers: prefix of a register's name -> its width in bits.
        blocks: in the order of the text.
        labels: label -> number of the block that it begins.
    """

    name: str
    target: str
    parameters: dict[str, tuple[int, int]]
    threads: int
    registers: dict[str, int]
    blocks: list[Block]
    labels: dict[str, int]

    def width(self, register: str) -> int:
        return self.registers[register.rstrip("0123456789")]


def parse(text: str) -> Kernel:
    """Read a kernel.

    Args:
        text: PTX with one entry, as `CompiledKernel.asm["ptx"]` has it.
    Raises:
        PtxError: what the emulator does not know, with its line.
    """
    target = re.search(r"^\.target\s+([\w]+)", text, re.MULTILINE)
    if target is None or target[1] not in TARGETS:
        raise PtxError(f"target {target and target[1]}: the emulator runs {', '.join(TARGETS)}")
    entries = re.findall(r"^\.visible \.entry (\w+)\(", text, re.MULTILINE)
    if len(entries) != 1:
        raise PtxError(f"{len(entries)} entries, not one")
    threads = re.search(r"^\.reqntid (\d+)", text, re.MULTILINE)
    if threads is None:
        raise PtxError("no .reqntid: the number of threads is unknown")
    kernel = Kernel(entries[0], target[1], {}, int(threads[1]), {}, [Block(0)], {})
    offset = depth = 0
    for number, statement in _statements(text):
        if statement == "{":
            depth += 1
        elif not depth:
            offset = _read_parameter(kernel, statement, offset, number)
        elif statement == "}":
            depth -= 1
            if not depth:
                break
        else:
            _read_statement(kernel, statement, number)
    return kernel


def _statements(text: str) -> list[tuple[int, str]]:
    """Return the statements with their lines, without comments and debug information."""
    statements, pending, start = [], "", 0
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split("//")[0].strip()
        if not line or line.startswith((".loc", ".file", ".section", ".pragma")):
            continue
        start = start if pending else number
        pending = f"{pending} {line}".strip()
        whole = pending.endswith((";", ":", ",")) or pending in "{})" or pending.startswith(".")
        if whole and pending.count("{") <= max(pending.count("}"), pending == "{"):
            statements.append((start, pending))
            pending = ""
    return statements


def _read_parameter(kernel: Kernel, statement: str, offset: int, number: int) -> int:
    if not statement.startswith(".param"):
        return offset
    match = _PARAMETER.match(statement)
    if match is None:
        raise PtxError(f"line {number}: parameter `{statement}` is unknown (host-side TMA?)")
    size = _SIZES[match[1]]
    offset = -(-offset // size) * size
    kernel.parameters[match[2]] = offset, size
    return offset + size


def _read_statement(kernel: Kernel, statement: str, number: int) -> None:
    if statement.startswith(".reg"):
        match = _REGISTERS.match(statement)
        if match is None or match[1] not in WIDTHS:
            raise PtxError(f"line {number}: registers `{statement}` are unknown")
        width = WIDTHS[match[1]]
        if kernel.registers.setdefault(match[2], width) != width:  # of other braces
            raise PtxError(f"line {number}: `{statement}`: {match[2]} has another width before")
    elif statement.endswith(":"):
        _begin_block(kernel)
        kernel.labels[statement[:-1]] = kernel.blocks[-1].number
    else:
        instruction = _instruction(statement, number)
        alone = instruction.opcode.startswith(("atom.", "red."))
        if alone:  # a schedule chooses who comes first
            _begin_block(kernel)
        kernel.blocks[-1].code.append(instruction)
        if alone or instruction.opcode.startswith(("bra", "ret", "bar.sync", "exit")):
            _begin_block(kernel)


def _begin_block(kernel: Kernel) -> None:
    if kernel.blocks[-1].code:
        kernel.blocks.append(Block(len(kernel.blocks)))


def _instruction(statement: str, number: int) -> Instruction:
    match = _CODE.match(statement)
    if match is None:
        raise PtxError(f"line {number}: `{statement}` is unknown")
    negated, predicate, opcode, rest = match.groups()
    operands = tuple(_operand(part) for part in _split(rest))
    return Instruction(number, statement, opcode, operands, predicate, bool(negated))


def _split(text: str) -> list[str]:
    """Split operands at the commas outside of braces and brackets."""
    if "{" not in text and "[" not in text:
        return [part.strip() for part in text.split(",") if part.strip()]
    parts, depth = [""], 0
    for character in text:
        depth += (character in "{[") - (character in "}]")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def _operand(text: str) -> Operand:
    if text.startswith("{"):
        return tuple(part.strip() for part in text.strip("{} ").split(","))
    match = _ADDRESS.match(text)
    return Address(match[1], int(match[2] or 0)) if match else text
