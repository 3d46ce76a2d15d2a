"""Turns each basic block of a kernel into a Python function of arrays.

A register is an array with a value for each thread that runs, or a scalar for all. It has 8, 16, 32
or 64 bits; views of it as other types are made where an instruction needs them and kept until the
register is written again. A block takes the registers that it reads, and returns those that a
later block may read.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.emulator import arithmetic, conversions
from tests.emulator.ptx import Address, Block, Instruction, Kernel, Operand, PtxError, parse

DTYPES = {
    **{
        f"{sign}{bits}": np.dtype(f"{sign}{bits // 8}") for sign in "iu" for bits in (8, 16, 32, 64)
    },
    "f16": np.dtype("f2"),
    "f32": np.dtype("f4"),
    "f64": np.dtype("f8"),
    "pred": np.dtype("?"),
}
_FLOAT = re.compile(r"0[fF]([0-9A-Fa-f]{8})$|0[dD]([0-9A-Fa-f]{16})$")
_INTEGER = re.compile(r"-?(?:0x[0-9A-Fa-f]+|\d+)U?$")
SYMBOLS = {"global_smem": 0}
"""Addresses of names in the shared memory."""


def kind_of(suffix: str) -> str:
    return {"b": "u", "s": "i"}.get(suffix[0], suffix[0]) + suffix[1:]


def size_of(kind: str) -> int:
    return 1 if kind == "pred" else 8 * DTYPES[kind].itemsize


@dataclass(frozen=True)
class Translated:
    """A block that runs.

    Attributes:
        run: called with (machine, threads, *inputs); it returns the outputs, and the condition of
            a branch behind them.
        inputs: names of registers.
        outputs: names of registers.
        branch: whether the block ends with one.
        target: number of the block that it branches to; -1: none.
        conditional: whether the branch depends on a condition.
        wait: whether it ends with a barrier of the program.
        leave: whether it ends with the threads' end.
        whole_warps: whether an instruction needs all threads of a warp.
        atomic: whether it is one atomic operation.
        size: number of its instructions.
        line: line of the first instruction.
    """

    run: Callable[..., tuple[Any, ...]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    target: int
    conditional: bool
    wait: bool
    leave: bool
    whole_warps: bool
    atomic: bool
    size: int
    line: int


@functools.lru_cache(maxsize=512)
def translated(text: str) -> tuple[Kernel, tuple[Translated, ...]]:
    """Return the kernel that `text` holds, and its blocks as functions."""
    kernel = parse(text)
    live = _live_out(kernel)
    return kernel, tuple(
        BlockWriter(kernel, block, live[block.number]).write() for block in kernel.blocks
    )


class BlockWriter:
    """Writes the function of a block.

    Args:
        kernel: it belongs to.
        block: what is translated.
        live: registers that later blocks may read.
    """

    def __init__(self, kernel: Kernel, block: Block, live: set[str]) -> None:
        self.kernel, self._block, self._live = kernel, block, live
        self.lines: list[str] = []
        self.names: dict[str, Any] = {
            "np": np,
            **{name.upper(): dtype.type for name, dtype in DTYPES.items()},
            **{name: getattr(arithmetic, name) for name in _public(arithmetic)},
            **{name: getattr(conversions, name) for name in _public(conversions)},
        }
        self._forms: dict[str, dict[str, str]] = {}
        self._computed: set[str] = set()
        """Registers with float results, whose NaNs are not PTX's until their bits are asked for."""
        self.zero: set[str] = set()
        """Registers that are known to be zero."""
        self._inputs: dict[str, str] = {}
        self._written: list[str] = []
        self._count = 0
        self.instruction: Instruction | None = None
        self.target, self.condition = -1, ""
        self.wait = self.leave = self.whole_warps = self.atomic = False

    def write(self) -> Translated:
        from tests.emulator.opcodes import emit

        for instruction in self._block.code:
            self.instruction = instruction
            emit(self, instruction)
        outputs = [name for name in dict.fromkeys(self._written) if name in self._live]
        results = [self.use(name, self._bits(name)) for name in outputs]
        results += [self.condition] * bool(self.condition)
        inputs = list(self._inputs)
        head = ", ".join(["m", "g", *self._inputs.values()])
        body = "\n    ".join([*self.lines, f"return ({''.join(f'{r}, ' for r in results)})"])
        source = f"def run({head}):\n    {body}\n"
        exec(
            compile(source, f"<{self.kernel.name}, block {self._block.number}>", "exec"), self.names
        )
        code = self._block.code
        return Translated(
            self.names["run"],
            tuple(inputs),
            tuple(outputs),
            self.target,
            bool(self.condition),
            self.wait,
            self.leave,
            self.whole_warps,
            self.atomic,
            len(code),
            code[0].line if code else 0,
        )

    def _bits(self, register: str) -> str:
        width = self.kernel.width(register)
        return "pred" if width == 1 else f"u{width}"

    def fail(self, what: str) -> PtxError:
        assert self.instruction is not None
        return PtxError(f"line {self.instruction.line}: {what} in `{self.instruction.text}`")

    def fresh(self) -> str:
        self._count += 1
        return f"v{self._count}"

    def assign(self, expression: str) -> str:
        name = self.fresh()
        self.lines.append(f"{name} = {expression}")
        return name

    def constant(self, value: Any) -> str:
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def use(self, operand: Operand, kind: str) -> str:
        """Return a variable with an operand's values.

        Args:
            operand: a register, or a number.
            kind: type of the values, such as "u32", "i16", "f32" and "pred".
        """
        if not isinstance(operand, str):
            raise self.fail("operands of another form")
        if not operand.startswith("%"):
            return self._immediate(operand, kind)
        if operand.split(".")[0] in ("%tid", "%ctaid", "%ntid", "%nctaid", "%laneid"):
            return f"g.{operand[1:].replace('.', '_')}"
        forms = self._forms.get(operand)
        if forms is None:
            name = f"r{len(self._inputs)}_{operand[1:]}"
            self._inputs[operand] = name
            forms = self._forms[operand] = {self._bits(operand): name}
        if kind not in forms:
            forms[kind] = self._viewed(operand, forms, kind)
        return forms[kind]

    def _viewed(self, register: str, forms: dict[str, str], kind: str) -> str:
        bits = self._bits(register)
        if bits == "pred" or kind == "pred":
            raise self.fail(f"a predicate where {kind} is read, or the reverse")
        if bits not in forms:
            ((source, name),) = list(forms.items())[:1]
            convert = source == "f32" and register in self._computed
            view = f"bits_of({name})" if convert else f"{name}.view({bits.upper()})"
            forms[bits] = self.assign(view)
        if size_of(kind) < size_of(bits):
            narrow = f"{forms[bits]}.astype(U{size_of(kind)})"
            return self.assign(narrow if kind[0] == "u" else f"{narrow}.view({kind.upper()})")
        if size_of(kind) > size_of(bits):
            raise self.fail(f"{register} has less bits than {kind}")
        return forms[bits] if kind == bits else self.assign(f"{forms[bits]}.view({kind.upper()})")

    def _immediate(self, text: str, kind: str) -> str:
        dtype = DTYPES[kind]
        if match := _FLOAT.match(text):
            bits = int(match[1] or match[2], 16)
            value = np.array(bits, f"u{4 if match[1] else 8}").view(f"f{4 if match[1] else 8}")
            if dtype.kind != "f":
                return self.constant(np.array(bits, f"u{dtype.itemsize}").astype(dtype)[()])
            return self.constant(value.astype(dtype)[()])
        if text in SYMBOLS:
            return self.constant(dtype.type(SYMBOLS[text]))
        if not _INTEGER.match(text):
            raise self.fail(f"operand {text}")
        number = int(text.rstrip("U"), 0)
        if kind == "pred":
            return self.constant(np.bool_(number))
        bits = np.array(number & (1 << size_of(kind)) - 1, f"u{dtype.itemsize}")
        return self.constant(bits.view(dtype)[()])

    def is_zero(self, operand: Operand) -> bool:
        return operand in self.zero or operand in ("0", "0x0", "0f00000000")

    def define(self, operand: Operand, expression: str, kind: str, computed: bool = False) -> None:
        """Write a register.

        Args:
            operand: the register; "_": nothing is written.
            expression: its new values.
            kind: type of the values.
            computed: whether they are float results, whose NaNs may have any bits.
        """
        assert self.instruction is not None
        if operand == "_":
            return
        if not isinstance(operand, str) or not operand.startswith("%"):
            raise self.fail("results of another form")
        bits = self._bits(operand)
        if (bits == "pred") != (kind == "pred") or size_of(kind) > size_of(bits):
            raise self.fail(f"{kind} does not fit {operand}")
        if size_of(kind) < size_of(bits):  # extended by zeros or signs
            wide = f"{kind[0]}{size_of(bits)}"
            expression, kind = f"({expression}).astype({wide.upper()})", wide
        if self.instruction.predicate is not None:
            expression = f"np.where({self.guard()}, {expression}, {self.use(operand, kind)})"
            computed = computed or operand in self._computed
        self._forms[operand] = {kind: self.assign(expression)}
        (self._computed.add if computed else self._computed.discard)(operand)
        self.zero.discard(operand)
        self._written.append(operand)

    def define_whole(self, operand: str, expression: str, kind: str) -> None:
        """Write a register whose new values are zero where a predicate is false, as the old are."""
        bits = self._bits(operand)
        if kind != bits:
            expression, kind = f"({expression}).astype({bits.upper()})", bits
        self._forms[operand] = {kind: self.assign(expression)}
        self._computed.discard(operand)
        self.zero.discard(operand)
        self._written.append(operand)

    def copy(self, target: Operand, source: Operand) -> None:
        assert self.instruction is not None
        if not isinstance(target, str) or self.instruction.predicate is not None:
            raise self.fail("a copy that depends on a predicate")
        bits = self._bits(target)
        if isinstance(source, str) and source.startswith("%") and source in self._forms:
            if self._bits(source) != bits:
                raise self.fail("registers of different sizes")
            self._forms[target] = dict(self._forms[source])
            computed = source in self._computed
        else:
            self._forms[target] = {bits: self.use(source, bits)}
            computed = False
        (self._computed.add if computed else self._computed.discard)(target)
        (self.zero.add if self.is_zero(source) else self.zero.discard)(target)
        self._written.append(target)

    def select(self, target: Operand, a: Operand, b: Operand, condition: str, bits: int) -> None:
        floats = bits == 32 and any("f32" in self._forms.get(str(x), ()) for x in (a, b))
        kind = "f32" if floats else f"u{bits}"
        computed = floats and any(x in self._computed for x in (a, b))
        values = f"{self.use(a, kind)}, {self.use(b, kind)}"
        self.define(target, f"np.where({condition}, {values})", kind, computed)

    def guard(self) -> str:
        """Return the condition under which the instruction runs, "None": it always does."""
        assert self.instruction is not None
        if self.instruction.predicate is None:
            return "None"
        value = self.use(self.instruction.predicate, "pred")
        return f"~{value}" if self.instruction.negated else value

    def address(self, operand: Operand, kind: str) -> str:
        """Return the values of an address, int64."""
        if not isinstance(operand, Address):
            raise self.fail("no address")
        start = self.use(operand.start, kind)
        wide = start if kind == "u64" else self.assign(f"{start}.astype(U64)")
        if not operand.offset:
            return wide
        return self.assign(f"{wide} + {self.constant(np.array(operand.offset).astype('u8')[()])}")


def _public(module: Any) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if callable(value) and name[0] in "abcdefghijklmnopqrstuvwxyz"
    ]


def _registers(operand: Operand) -> list[str]:
    parts = operand if isinstance(operand, tuple) else (str(operand),)
    if isinstance(operand, Address):
        parts = (operand.start,)
    return [
        name for part in parts for name in part.split("|") if re.match(r"%(p|r|rs|rd|f|fd)\d", name)
    ]


def _live_out(kernel: Kernel) -> list[set[str]]:
    """Return, for each block, the registers that a later one may read."""
    size = len(kernel.blocks)
    reads, writes, after = [], [], []
    for block in kernel.blocks:
        read: set[str] = set()
        written: set[str] = set()
        following = {block.number + 1} if block.number + 1 < size else set()
        for instruction in block.code:
            named = [name for operand in instruction.operands for name in _registers(operand)]
            if instruction.predicate:
                named.append(instruction.predicate)
            stores = instruction.opcode.startswith(("st", "red", "bra", "bar"))
            first = (
                [] if stores or not instruction.operands else _registers(instruction.operands[0])
            )
            source = named if stores or instruction.predicate else named[len(first) :]
            read |= {name for name in source if name not in written}
            written |= set(first)
            if instruction.opcode.startswith("bra"):
                label = str(instruction.operands[0])
                if instruction.predicate is None:
                    following = set()
                following.add(kernel.labels[label])
            elif instruction.opcode in ("ret", "exit") and instruction.predicate is None:
                following = set()
        reads.append(read)
        writes.append(written)
        after.append(following)
    live_in = [set(read) for read in reads]
    live_out: list[set[str]] = [set() for _ in kernel.blocks]
    changed = True
    while changed:
        changed = False
        for i in reversed(range(size)):
            live_out[i] = set().union(*(live_in[j] for j in after[i]))
            new = reads[i] | (live_out[i] - writes[i])
            changed |= new != live_in[i]
            live_in[i] = new
    return live_out
