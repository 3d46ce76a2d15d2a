"""What each opcode does: memory, threads of a warp or a program together, branches."""

from tests.emulator.opcodes import opcode
from tests.emulator.ptx import Address, Instruction
from tests.emulator.translate import BlockWriter, kind_of

_MEMORY = {"global": "memory", "shared": "shared"}


@opcode(r"ld\.param\.([bsuf])(8|16|32|64)")
def _parameter(w: BlockWriter, ins: Instruction, sign: str, bits: str) -> None:
    d, a = ins.operands
    if not isinstance(a, Address) or a.start not in w.kernel.parameters:
        raise w.fail("a parameter that is none")
    offset, size = w.kernel.parameters[a.start]
    if a.offset or 8 * size != int(bits):
        raise w.fail("a part of a parameter")
    kind = kind_of(f"{'u' if sign == 'f' else sign}{bits}")
    w.define(d, f"m.parameter({offset}, {kind.upper()})", kind)


@opcode(
    r"ld\.(global|shared)(?:\.relaxed\.gpu|\.volatile|\.nc|\.L[12]::\w+)*(?:\.(v2|v4))?\.[bsuf](8|16|32|64)"
)
def _load(w: BlockWriter, ins: Instruction, space: str, vector: str | None, bits: str) -> None:
    d, a = ins.operands[:2]  # and perhaps a cache policy
    names = d if isinstance(d, tuple) else (d,)
    count = int(vector[1]) if vector else 1
    if len(names) != count:
        raise w.fail("another number of registers")
    address = w.address(a, "u64" if space == "global" else "u32")
    loaded = w.assign(
        f"m.{_MEMORY[space]}.load({ins.line}, g, {address}, {bits}, {count}, {w.guard()})"
    )
    for i, name in enumerate(names):
        value = f"{loaded}[{i}]" if count > 1 else loaded
        if ins.predicate and w.is_zero(name):
            w.define_whole(name, value, f"u{bits}")
        else:
            w.define(name, value, f"u{bits}")


@opcode(r"createpolicy\.fractional\.L2::\w+\.b64")
def _policy(w: BlockWriter, ins: Instruction) -> None:
    w.define(ins.operands[0], w.use("0", "u64"), "u64")


@opcode(
    r"st\.(global|shared)(?:\.relaxed\.gpu|\.volatile|\.L1::\w+)*(?:\.(v2|v4))?\.[bsuf](8|16|32|64)"
)
def _store(w: BlockWriter, ins: Instruction, space: str, vector: str | None, bits: str) -> None:
    a, source = ins.operands
    names = source if isinstance(source, tuple) else (source,)
    if len(names) != (int(vector[1]) if vector else 1):
        raise w.fail("another number of registers")
    address = w.address(a, "u64" if space == "global" else "u32")
    values = ", ".join(w.use(name, f"u{bits}") for name in names)
    line = f"m.{_MEMORY[space]}.store({ins.line}, g, {address}, {bits}, ({values},), {w.guard()})"
    w.lines.append(line)


@opcode(
    r"(atom|red)\.global\.(?:gpu|sys)\.(acq_rel|acquire|release|relaxed)\.(add|max|min|exch|cas|and|or|xor)\.([bsuf](?:32|64))"
)
def _atomic(
    w: BlockWriter, ins: Instruction, opcode: str, order: str, name: str, suffix: str
) -> None:
    """``atom`` returns what was there before; ``red``, which Triton 3.9 writes where nobody reads
    it, does not.
    """
    returned, (a, *rest) = ins.operands[: opcode == "atom"], ins.operands[opcode == "atom" :]
    kind = kind_of(suffix)
    values = ", ".join(w.use(x, kind) for x in rest)
    call = f"m.atomic({ins.line}, g, {w.address(a, 'u64')}, {name!r}, {order!r}, {kind!r}"
    before = w.assign(f"{call}, ({values},), {w.guard()})")
    for d in returned:
        w.define(d, before, kind)
    w.atomic = True


@opcode(r"bar\.sync|barrier\.sync")
def _barrier(w: BlockWriter, ins: Instruction) -> None:
    if ins.operands != ("0",) or ins.predicate:
        raise w.fail("a barrier of some threads")
    w.wait = True


@opcode(r"bar\.warp\.sync")
def _barrier_of_warp(w: BlockWriter, ins: Instruction) -> None:
    w.whole_warps = True
    w.lines.append(f"g.whole({ins.line})")


@opcode(r"(?:membar|fence)\..*")
def _fence(w: BlockWriter, ins: Instruction) -> None:
    raise w.fail("a fence")


@opcode(r"bra(?:\.uni)?")
def _branch(w: BlockWriter, ins: Instruction) -> None:
    w.target = w.kernel.labels[str(ins.operands[0])]
    if ins.predicate:
        w.condition = w.assign(w.guard())


@opcode(r"ret|exit")
def _leave(w: BlockWriter, ins: Instruction) -> None:
    if ins.predicate:
        raise w.fail("an end that depends on a predicate")
    w.leave = True


@opcode(r"shfl\.sync\.(bfly|idx|up|down)\.b32")
def _shuffle(w: BlockWriter, ins: Instruction, way: str) -> None:
    d, a, lane, clamp, mask = ins.operands
    if (clamp, mask) != ("0" if way == "up" else "31", "-1") or ins.predicate or "|" in str(d):
        raise w.fail("a shuffle among some threads")
    w.whole_warps = True
    a, lane = w.use(a, "u32"), w.use(lane, "u32")
    w.define(d, f"g.shuffle({ins.line}, {way!r}, {a}, {lane})", "u32")


@opcode(r"redux\.sync\.(add|min|max|and|or|xor)\.([bfsu]32)")
def _reduce(w: BlockWriter, ins: Instruction, name: str, suffix: str) -> None:
    d, a, mask = ins.operands
    kind = kind_of(suffix)
    w.whole_warps = True
    a = w.use(a, kind)
    w.define(d, f"g.reduce({ins.line}, {name!r}, {a}, {w.use(mask, 'u32')})", kind)


@opcode(r"vote\.sync\.(ballot|any|all)\.(b32|pred)")
def _vote(w: BlockWriter, ins: Instruction, name: str, suffix: str) -> None:
    d, a, mask = ins.operands
    if mask != "-1" or ins.predicate:
        raise w.fail("a vote of some threads")
    w.whole_warps = True
    voted = w.use(str(a).lstrip("!"), "pred")
    voted = f"~{voted}" if str(a).startswith("!") else voted
    kind = "u32" if suffix == "b32" else "pred"
    w.define(d, f"g.vote({ins.line}, {name!r}, {voted})", kind)


@opcode(r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16")
def _load_matrix(w: BlockWriter, ins: Instruction, count: str, trans: str | None) -> None:
    d, a = ins.operands
    w.whole_warps = True
    address = w.address(a, "u32")
    call = f"m.shared.load_matrices({ins.line}, g, {address}, {count}, {bool(trans)})"
    loaded = w.assign(call)
    for i, name in enumerate(d if isinstance(d, tuple) else (d,)):
        w.define(name, f"{loaded}[{i}]", "u32")


@opcode(r"stmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16")
def _store_matrix(w: BlockWriter, ins: Instruction, count: str, trans: str | None) -> None:
    a, source = ins.operands
    w.whole_warps = True
    address = w.address(a, "u32")
    values = ", ".join(
        w.use(x, "u32") for x in (source if isinstance(source, tuple) else (source,))
    )
    call = f"m.shared.store_matrices({ins.line}, g, {address}, ({values},), {bool(trans)})"
    w.lines.append(call)
