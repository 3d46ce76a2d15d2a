"""What each opcode does: arithmetic, comparisons, conversions and moves between registers."""

import re
from collections.abc import Callable
from typing import Any

from tests.emulator import conversions
from tests.emulator.ptx import Instruction, Operand
from tests.emulator.translate import BlockWriter, kind_of, size_of

Emitter = Callable[..., None]
_EMITTERS: list[tuple[re.Pattern[str], Emitter]] = []
_KNOWN: dict[str, tuple[Emitter, tuple[str, ...]]] = {}
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_COMPARISONS |= {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}


def opcode(pattern: str) -> Callable[[Emitter], Emitter]:
    """Register what writes the code of the opcodes that match; it is called with their groups."""

    def register(emitter: Emitter) -> Emitter:
        _EMITTERS.append((re.compile(pattern), emitter))
        return emitter

    return register


def emit(w: BlockWriter, instruction: Instruction) -> None:
    """Write the code of an instruction.

    Raises:
        PtxError: the opcode is unknown.
    """
    name = instruction.opcode
    if name not in _KNOWN:
        for pattern, emitter in _EMITTERS:
            if match := pattern.fullmatch(name):
                _KNOWN[name] = emitter, match.groups()
                break
        else:
            raise w.fail(f"opcode {name} is unknown")
    emitter, groups = _KNOWN[name]
    emitter(w, instruction, *groups)


@opcode(r"(add|sub)\.([su](?:16|32|64))")
def _add(w: BlockWriter, ins: Instruction, name: str, suffix: str) -> None:
    d, a, b = ins.operands
    kind = f"u{suffix[1:]}"
    sign = "+" if name == "add" else "-"
    w.define(d, f"{w.use(a, kind)} {sign} {w.use(b, kind)}", kind)


@opcode(r"mul\.lo\.[su](16|32|64)")
def _multiply(w: BlockWriter, ins: Instruction, bits: str) -> None:
    d, a, b = ins.operands
    w.define(d, f"{w.use(a, f'u{bits}')} * {w.use(b, f'u{bits}')}", f"u{bits}")


@opcode(r"mad\.lo\.[su](16|32|64)")
def _multiply_add(w: BlockWriter, ins: Instruction, bits: str) -> None:
    d, a, b, c = (*ins.operands[:1], *(w.use(x, f"u{bits}") for x in ins.operands[1:]))
    w.define(d, f"{a} * {b} + {c}", f"u{bits}")


@opcode(r"(mul|mad)\.wide\.([su])(16|32)")
def _wide(w: BlockWriter, ins: Instruction, name: str, sign: str, bits: str) -> None:
    narrow, wide = kind_of(sign + bits), kind_of(f"{sign}{2 * int(bits)}")
    a, b = (w.use(x, narrow) for x in ins.operands[1:3])
    product = f"({a}.astype({wide.upper()}) * {b}.astype({wide.upper()}))"
    added = f" + {w.use(ins.operands[3], wide)}" if name == "mad" else ""
    w.define(ins.operands[0], product + added, wide)


@opcode(r"mul\.hi\.([su])32")
def _high(w: BlockWriter, ins: Instruction, sign: str) -> None:
    d, a, b = ins.operands
    wide = kind_of(f"{sign}64").upper()
    a, b = (w.use(x, kind_of(f"{sign}32")) for x in (a, b))
    product = f"({a}.astype({wide}) * {b}.astype({wide}))"
    w.define(d, f"({product} >> {wide}(32)).astype(U32)", "u32")


@opcode(r"(div|rem)\.([su](?:16|32|64))")
def _divide(w: BlockWriter, ins: Instruction, name: str, suffix: str) -> None:
    d, *rest = ins.operands
    kind = kind_of(suffix)
    a, b = (w.use(x, kind) for x in rest)
    quotient = f"divide{'_64' * (suffix[1:] == '64')}({a}, {b})"
    w.define(d, quotient if name == "div" else f"{a} - {b} * {quotient}", kind)


@opcode(r"(min|max)(\.relu)?\.([su](?:16|32|64))")
def _extreme(w: BlockWriter, ins: Instruction, name: str, relu: str, suffix: str) -> None:
    d, *rest = ins.operands
    kind = kind_of(suffix)
    a, b = (w.use(x, kind) for x in rest)
    value = f"np.{name}imum({a}, {b})"
    w.define(d, f"np.maximum({value}, {kind.upper()}(0))" if relu else value, kind)


@opcode(r"(neg|abs)\.s(16|32|64)")
def _negate(w: BlockWriter, ins: Instruction, name: str, bits: str) -> None:
    d, a = ins.operands
    function = "np.negative" if name == "neg" else "np.abs"
    w.define(d, f"{function}({w.use(a, f'i{bits}')})", f"i{bits}")


@opcode(r"(and|or|xor)\.(pred|b16|b32|b64)")
def _bitwise(w: BlockWriter, ins: Instruction, name: str, suffix: str) -> None:
    d, a, b = ins.operands
    kind = kind_of(suffix) if suffix != "pred" else "pred"
    sign = {"and": "&", "or": "|", "xor": "^"}[name]
    w.define(d, f"{w.use(a, kind)} {sign} {w.use(b, kind)}", kind)


@opcode(r"not\.(pred|b16|b32|b64)")
def _not(w: BlockWriter, ins: Instruction, suffix: str) -> None:
    d, a = ins.operands
    kind = kind_of(suffix) if suffix != "pred" else "pred"
    w.define(d, f"~{w.use(a, kind)}", kind)


@opcode(r"sh([lr])\.([bsu])(16|32|64)")
def _shift(w: BlockWriter, ins: Instruction, way: str, sign: str, bits: str) -> None:
    d, a, amount = ins.operands
    kind = kind_of(sign + bits)
    x = w.use(a, kind)
    if isinstance(amount, str) and not amount.startswith("%") and int(amount, 0) < int(bits):
        operator = "<<" if way == "l" else ">>"
        w.define(d, f"{x} {operator} {w.use(amount, kind)}", kind)
    else:
        function = "shift_left" if way == "l" else "shift_right"
        w.define(d, f"{function}({x}, {w.use(amount, 'u32')})", kind)


@opcode(r"shf\.([lr])\.wrap\.b32")
def _funnel(w: BlockWriter, ins: Instruction, way: str) -> None:
    d, low, high, amount = ins.operands
    low, high, count = (w.use(x, "u32") for x in (low, high, amount))
    both = f"({low}.astype(U64) | ({high}.astype(U64) << U64(32)))"
    count = f"({count} & U32(31)).astype(U64)"
    shifted = f"({both} << {count}) >> U64(32)" if way == "l" else f"{both} >> {count}"
    w.define(d, f"({shifted}).astype(U32)", "u32")


@opcode(r"bfe\.([su])32")
def _extract(w: BlockWriter, ins: Instruction, sign: str) -> None:
    d, a, position, length = ins.operands
    kind = kind_of(f"{sign}32")
    w.define(d, f"extract({w.use(a, kind)}, {int(str(position))}, {int(str(length))})", kind)


@opcode(r"bfi\.b32")
def _insert(w: BlockWriter, ins: Instruction) -> None:
    d, a, b, position, length = ins.operands
    mask = ((1 << int(str(length))) - 1) << int(str(position)) & 0xFFFFFFFF
    a, b = w.use(a, "u32"), w.use(b, "u32")
    shifted = f"({a} << U32({position}))"
    w.define(d, f"({shifted} & U32({mask})) | ({b} & U32({mask ^ 0xFFFFFFFF}))", "u32")


@opcode(r"(prmt|lop3|popc|clz)\.b32")
def _bytes(w: BlockWriter, ins: Instruction, name: str) -> None:
    functions = {"prmt": "permute", "lop3": "look_up", "popc": "popcount", "clz": "leading_zeros"}
    d, *rest = ins.operands
    last = [str(int(str(rest.pop()), 0))] if name == "lop3" else []
    values = [w.use(x, "u32") for x in rest]
    w.define(d, f"{functions[name]}({', '.join(values + last)})", "u32")


@opcode(r"(add|sub|mul)(?:\.rn)?(\.ftz)?\.f32")
def _float(w: BlockWriter, ins: Instruction, name: str, ftz: str) -> None:
    d, *rest = ins.operands
    a, b = _floats(w, rest, ftz)
    sign = {"add": "+", "sub": "-", "mul": "*"}[name]
    w.define(d, _flushed(f"{a} {sign} {b}", ftz), "f32", computed=True)


@opcode(r"(add|sub)\.rn\.f32\.(bf16|f16)")
def _add_half(w: BlockWriter, ins: Instruction, name: str, half: str) -> None:
    """Add a half, made float32, and a float32; Blackwell's, as Triton 3.7 writes it."""
    d, a, b = ins.operands
    sign = "+" if name == "add" else "-"
    wide = f"f32_of_{half}({w.use(a, 'u16')})"
    w.define(d, f"{wide} {sign} {w.use(b, 'f32')}", "f32", computed=True)


@opcode(r"add(?:\.rn)?\.(bf16|f16)(x2)?")
def _add_halves(w: BlockWriter, ins: Instruction, kind: str, two: str) -> None:
    """A float32 sum that is rounded again is the same: it has more than twice the bits."""
    d, *rest = ins.operands
    a, b = (w.assign(w.use(x, "u32" if two else "u16")) for x in rest)
    sums = []
    for part in ("({} >> U32(16)).astype(U16)", "{}.astype(U16)")[not two :]:
        halves = [f"f32_of_{kind}({part.format(x)})" for x in (a, b)]
        sums.append(f"{kind}_of({' + '.join(halves)})")
    w.define(d, f"packed({', '.join(sums)})" if two else sums[0], "u32" if two else "u16")


@opcode(r"fma\.rn(\.ftz)?\.f32")
def _fma(w: BlockWriter, ins: Instruction, ftz: str) -> None:
    d, *rest = ins.operands
    expression = _flushed(f"fma({', '.join(_floats(w, rest, ftz))})", ftz)
    w.define(d, expression, "f32", computed=True)


@opcode(r"(add|sub|mul|fma)(?:\.rn)?\.f32x2")
def _two_floats(w: BlockWriter, ins: Instruction, name: str) -> None:
    d, *rest = ins.operands
    values = [f"pairs({w.use(x, 'u64')}, g.count)" for x in rest]
    sign = {"add": " + ", "sub": " - ", "mul": " * "}
    results = f"fma({', '.join(values)})" if name == "fma" else sign[name].join(values)
    w.define(d, f"bits_of({results}).view(U64)", "u64")


@opcode(r"div\.full(\.ftz)?\.f32")
def _divide_floats(w: BlockWriter, ins: Instruction, ftz: str) -> None:
    d, *rest = ins.operands
    a, b = (w.use(x, "f32") for x in rest)
    w.define(d, f"m.approximate.divide({a}, {b}, {bool(ftz)})", "f32", computed=True)


@opcode(r"(div|sqrt|rcp)\.rn\.f32")
def _exact(w: BlockWriter, ins: Instruction, name: str) -> None:
    d, *rest = ins.operands
    values = [w.use(x, "f32") for x in rest]
    forms = {"div": "{0} / {1}", "sqrt": "np.sqrt({0})", "rcp": "F32(1) / {0}"}
    w.define(d, forms[name].format(*values, *values), "f32", computed=True)


@opcode(r"(ex2|lg2|rcp|rsqrt|sqrt)\.approx(\.ftz)?\.f32")
def _approximate(w: BlockWriter, ins: Instruction, name: str, ftz: str) -> None:
    d, a = ins.operands
    x = w.use(a, "f32")
    w.define(d, f"m.approximate.{name}({x}, {bool(ftz)})", "f32", computed=True)


@opcode(r"(abs|neg)(\.ftz)?\.f32")
def _sign(w: BlockWriter, ins: Instruction, name: str, ftz: str) -> None:
    d, a = ins.operands
    function = "np.abs" if name == "abs" else "np.negative"
    expression = _flushed(f"{function}({w.use(a, 'f32')})", ftz)
    w.define(d, expression, "f32", computed=True)


@opcode(r"abs\.b?f16(x2)?")
def _sign_of_halves(w: BlockWriter, ins: Instruction, two: str) -> None:
    d, a = ins.operands
    kind, mask = ("u32", "0x7FFF7FFF") if two else ("u16", "0x7FFF")
    w.define(d, f"{w.use(a, kind)} & {kind.upper()}({mask})", kind)


@opcode(r"neg\.b?f16(x2)?")
def _negate_halves(w: BlockWriter, ins: Instruction, two: str) -> None:
    d, a = ins.operands
    kind, mask = ("u32", "0x80008000") if two else ("u16", "0x8000")
    w.define(d, f"{w.use(a, kind)} ^ {kind.upper()}({mask})", kind)


@opcode(r"(min|max)\.f32")
def _float_extreme(w: BlockWriter, ins: Instruction, name: str) -> None:
    d, *rest = ins.operands
    a, b = (w.use(x, "f32") for x in rest)
    zeros = f"np.where(np.signbit({a}), {a if name == 'min' else b}, {b if name == 'min' else a})"
    w.define(d, f"np.where({a} == {b}, {zeros}, np.f{name}({a}, {b}))", "f32", computed=True)


@opcode(r"setp\.(eq|ne|lt|le|gt|ge|lo|ls|hi|hs)\.([bsu](?:16|32|64))")
def _compare(w: BlockWriter, ins: Instruction, name: str, suffix: str) -> None:
    d, a, b = ins.operands
    kind = kind_of(suffix)
    w.define(d, f"{w.use(a, kind)} {_COMPARISONS[name]} {w.use(b, kind)}", "pred")


@opcode(r"setp\.(eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan)\.(f32|bf16|f16)")
def _compare_floats(w: BlockWriter, ins: Instruction, name: str, suffix: str) -> None:
    d, *rest = ins.operands
    if suffix == "f32":
        a, b = (w.use(x, "f32") for x in rest)
    else:
        a, b = (w.assign(f"f32_of_{suffix}({w.use(x, 'u16')})") for x in rest)
    ordered = f"({a} == {a}) & ({b} == {b})"
    if name in ("num", "nan"):
        w.define(d, ordered if name == "num" else f"~({ordered})", "pred")
    elif name == "ne":  # false where one of the two is NaN
        w.define(d, f"({a} != {b}) & {ordered}", "pred")
    elif name in _COMPARISONS:
        w.define(d, f"{a} {_COMPARISONS[name]} {b}", "pred")
    else:
        w.define(d, f"({a} {_COMPARISONS[name[:2]]} {b}) | ~({ordered})", "pred")


@opcode(r"selp\.[bfsu](16|32|64)")
def _select(w: BlockWriter, ins: Instruction, bits: str) -> None:
    d, a, b, condition = ins.operands
    w.select(d, a, b, w.use(condition, "pred"), int(bits))


@opcode(r"cvta\..*|mov\.(?:[bufs](?:16|32|64)|pred)")
def _move(w: BlockWriter, ins: Instruction) -> None:
    d, a = ins.operands
    if isinstance(d, tuple):
        _unpack(w, d, a)
    elif isinstance(a, tuple):
        _pack(w, d, a)
    elif ins.predicate is None and not str(a).startswith(("%tid", "%ctaid", "%n", "%lane")):
        w.copy(d, a)
    else:
        bits = w.kernel.width(str(d))
        kind = "pred" if bits == 1 else f"u{bits}"
        w.define(d, w.use(a, kind), kind)


def _unpack(w: BlockWriter, parts: tuple[str, ...], source: Operand) -> None:
    bits = w.kernel.width(str(source))
    part = bits // len(parts)
    value = w.use(source, f"u{bits}")
    for i, name in enumerate(parts):
        shifted = f"({value} >> U{bits}({i * part}))" if i else value
        w.define(name, f"{shifted}.astype(U{part})", f"u{part}")


def _pack(w: BlockWriter, target: Operand, parts: tuple[str, ...]) -> None:
    bits = w.kernel.width(str(target))
    part = bits // len(parts)
    values = [f"{w.use(name, f'u{part}')}.astype(U{bits})" for name in parts]
    terms = [f"({x} << U{bits}({i * part}))" if i else x for i, x in enumerate(values)]
    w.define(target, " | ".join(terms), f"u{bits}")


@opcode(r"cvt\.([su](?:8|16|32|64))\.([su](?:8|16|32|64))")
def _convert_integer(w: BlockWriter, ins: Instruction, to: str, source: str) -> None:
    d, a = ins.operands
    value, target = w.use(a, kind_of(source)), kind_of(to)
    if size_of(target) < 16:
        raise w.fail("a conversion to 8 bits")
    w.define(d, f"{value}.astype({target.upper()})", target)


@opcode(r"cvt\.rn\.f32\.([su](?:16|32|64))")
def _convert_to_float(w: BlockWriter, ins: Instruction, source: str) -> None:
    d, a = ins.operands
    w.define(d, f"{w.use(a, kind_of(source))}.astype(F32)", "f32")


@opcode(r"cvt\.rzi\.s32\.f32")
def _convert_to_integer(w: BlockWriter, ins: Instruction) -> None:
    d, a = ins.operands
    w.define(d, f"i32_of({w.use(a, 'f32')})", "i32")


@opcode(r"cvt\.f32\.(bf16|f16)")
def _convert_up(w: BlockWriter, ins: Instruction, source: str) -> None:
    d, a = ins.operands
    w.define(d, f"f32_of_{source}({w.use(a, 'u16')})", "f32", computed=True)


@opcode(r"cvt\.rn\.(bf16|f16)\.f32")
def _convert_down(w: BlockWriter, ins: Instruction, to: str) -> None:
    d, a = ins.operands
    w.define(d, f"{to}_of({w.use(a, 'f32')})", "u16")


@opcode(r"cvt\.rn\.(bf16|f16)x2\.f32")
def _convert_two_down(w: BlockWriter, ins: Instruction, to: str) -> None:
    d, *rest = ins.operands
    high, low = (f"{to}_of({w.use(x, 'f32')})" for x in rest)
    w.define(d, f"packed({high}, {low})", "u32")


@opcode(r"cvt\.rn\.satfinite\.(e4m3|e5m2)x2\.f32")
def _convert_to_fp8(w: BlockWriter, ins: Instruction, to: str) -> None:
    d, *rest = ins.operands
    high, low = (f"{to}_of({w.use(x, 'f32')})" for x in rest)
    w.define(d, f"({high} << U16(8)) | {low}", "u16")


@opcode(r"cvt\.rn\.f16x2\.(e4m3|e5m2)x2")
def _convert_from_fp8(w: BlockWriter, ins: Instruction, source: str) -> None:
    d, a = ins.operands
    w.names["halves_of"] = conversions.halves_of
    w.define(d, f"halves_of({source!r}, {w.use(a, 'u16')})", "u32")


def _floats(w: BlockWriter, operands: Any, ftz: str) -> list[str]:
    return [_flushed(w.use(x, "f32"), ftz) for x in operands]


def _flushed(expression: str, ftz: str) -> str:
    return f"flush({expression})" if ftz else expression


from tests.emulator import memory_opcodes  # noqa: E402, F401  # registers the others
