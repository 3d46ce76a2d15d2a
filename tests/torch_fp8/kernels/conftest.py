"""Records what the host functions launch, and compiles it for a GPU that is not there."""

import csv
import itertools
import re
import subprocess
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from tests import kernel_code
from tests.cubin import usage
from tests.internals import QuickKernel
from tests.unwritten_registers import unwritten_registers

TARGETS = {"sm_90": GPUTarget("cuda", 90, 32), "sm_100": GPUTarget("cuda", 100, 32)}
FAR_FROM_SPILLING = 0.5
"""What takes a smaller part of a thread's registers on Hopper is not compiled for Blackwell, too.

Such variants take at most 0.66 of them there: test_kernel_resources.py holds this against what
`evidence.kernel_resources` recorded, which compiles every variant for both. Where that record is
of this code and this Triton, the tests compile one variant of a kernel for Blackwell.
"""

_POINTER = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}
_OPTIONS = ("num_warps", "enable_fp_fusion", "maxnreg")


@dataclass(frozen=True)
class Launch:
    """One kernel launch: what the compiler is told of its arguments, and the grid."""

    kernel: JITFunction
    signature: tuple[tuple[str, str], ...]  # argument -> Triton type, "constexpr" if specialised
    constants: tuple[tuple[str, object], ...]
    divisible: tuple[str, ...]  # pointers and integers that are multiples of 16
    options: tuple[tuple[str, object], ...]  # of the compiler
    grid: tuple[int, ...]

    @property
    def num_warps(self) -> int:
        return dict(self.options)["num_warps"]

    @property
    def name(self) -> str:
        """Short and unique among the launches of one file."""
        flags = [f"{k}={v}" for k, v in self.constants if k.isupper()]
        types = [t for _, t in self.signature if t.startswith("*")]
        return " ".join([self.kernel.__name__.strip("_"), types[0], *flags])

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for launches that run the same binary."""
        return (self.kernel.__name__, self.signature, self.constants, self.divisible, self.options)

    @property
    def choices(self) -> list[tuple[str, object]]:
        """What the compiler is told, in parts: a type and whether it is divisible, a value, ..."""
        arguments = [(name, (kind, name in self.divisible)) for name, kind in self.signature]
        return [*arguments, *self.constants, *self.options]


def covering(launches: Sequence[Launch]) -> list[Launch]:
    """Few of these launches, in order, that have of each kernel every choice that one of them has.

    Greedy: always the launch with the most choices that are still missing. What fails only where
    several choices meet is found by `evidence.kernel_resources`, which compiles every launch.
    """
    choices = {launch.key: {(launch.kernel, c) for c in launch.choices} for launch in launches}
    missing = set().union(*choices.values())
    chosen = set()
    while missing:
        most = max(choices, key=lambda key: len(choices[key] & missing))
        missing -= choices[most]
        chosen.add(most)
    return [launch for launch in launches if launch.key in chosen]


class _Recorder:
    def __init__(self, kernel: JITFunction, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]):
        def launch(*args: object, **constants: object) -> None:
            names = self.kernel.arg_names
            signature, divisible = {}, []
            options = {name: constants.pop(name) for name in _OPTIONS if name in constants}
            if type(self.kernel) is QuickKernel:
                options.setdefault("enable_fp_fusion", True)
            assert "enable_fp_fusion" in options, "Triton 3.10 has another default than 3.9"
            for name, value in zip(names, args, strict=False):
                if isinstance(value, torch.Tensor):
                    signature[name] = _POINTER[value.dtype]
                    # Every allocation starts at a multiple of 256 bytes.
                    if not self.kernel.params[names.index(name)].do_not_specialize_on_alignment:
                        divisible.append(name)
                elif isinstance(value, float):
                    signature[name] = "fp32"
                elif self.kernel.params[names.index(name)].do_not_specialize:
                    signature[name] = "i32"
                elif value == 1:
                    constants[name] = 1
                    signature[name] = "constexpr"
                else:
                    signature[name] = "i32" if abs(value) < 2**31 else "i64"
                    if value % 16 == 0:
                        divisible.append(name)
            signature |= {name: "constexpr" for name in names if name not in signature}
            self.launches.append(
                Launch(
                    self.kernel,
                    tuple((name, signature[name]) for name in names),
                    tuple((name, constants[name]) for name in names if name in constants),
                    tuple(divisible),
                    tuple(({"num_warps": 4} | options).items()),
                    grid,
                )
            )

        return launch


@contextmanager
def recorded(module):
    """Replace the kernels of `module` by recorders; nothing runs, outputs stay uninitialised."""
    kernels = {k: v for k, v in vars(module).items() if isinstance(v, JITFunction)}
    launches: list[Launch] = []
    for name, kernel in kernels.items():
        setattr(module, name, _Recorder(kernel, launches))
    try:
        yield launches
    finally:
        for name, kernel in kernels.items():
            setattr(module, name, kernel)


@dataclass(frozen=True)
class Resources:
    """Per-thread registers, bytes of stack (spills live there) and of shared memory, and warps."""

    registers: int
    stack: int
    local: int
    shared: int
    warps: int


def compile_launch(launch: Launch, target: GPUTarget):
    """The compiled kernel, without a GPU."""
    names = launch.kernel.arg_names
    source = ASTSource(
        launch.kernel,
        dict(launch.signature),
        constexprs={(names.index(k),): v for k, v in launch.constants},
        attrs={(names.index(k),): [["tt.divisibility", 16]] for k in launch.divisible},
    )
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = True  # a fourteenth of the time
        return triton.compile(source, target=target, options=dict(launch.options))


def resources(compiled) -> Resources:
    """What the assembler made of it, as its cubin tells."""
    metadata = compiled.metadata
    return Resources(*usage(compiled.asm["cubin"]), metadata.shared, metadata.num_warps)


def machine_code(compiled, directory: Path) -> str:
    """The kernel's instructions, as the nvdisasm that comes with Triton lists them."""
    cubin = directory / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    command = [str(tool), "-c", str(cubin)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def instructions(compiled, directory: Path) -> int:
    """How many the kernel has."""
    text = machine_code(compiled, directory)
    return len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", text, re.MULTILINE))


def pytest_addoption(parser):
    text = "compile every variant of every kernel, for Hopper and Blackwell, not a covering part"
    parser.addoption("--every-variant", action="store_true", help=text)
    text = "compile only what `benchmarks.evidence.kernel_resources` has not recorded of this code"
    parser.addoption("--unrecorded", action="store_true", help=text)


@pytest.hookimpl(tryfirst=True)  # before markers select
def pytest_collection_modifyitems(items):
    """Of each long test that compiles, ``--fast`` runs one variant: the last, a small one."""
    compiled = [item for item in items if "compile_for" in getattr(item, "fixturenames", ())]
    variants = {item.function: item for item in compiled if item.get_closest_marker("long")}
    for item in variants.values():
        item.add_marker("smoke")


@pytest.fixture
def record_launches():
    """`with record_launches(module) as launches: ...` runs host code and no kernel."""
    return recorded


@pytest.fixture
def compile_for(tmp_path, pytestconfig):
    """`compile_for(launch, "sm_90")` -> (PTX, Resources), without a GPU.

    Where every variant is compiled, none for Hopper reads registers that nothing has written.
    """
    every = pytestconfig.getoption("every_variant", default=False)

    def compile_and_measure(launch: Launch, target: str) -> tuple[str, Resources]:
        compiled = compile_launch(launch, TARGETS[target])
        if every and target == "sm_90":  # Blackwell has instructions that write pairs
            unwritten = unwritten_registers(machine_code(compiled, tmp_path))
            assert not unwritten, f"{target} {launch.name}: {unwritten[:3]}"
        return compiled.asm["ptx"], resources(compiled)

    return compile_and_measure


@pytest.fixture(scope="session")
def recorded_resources():
    """Registers and shared memory of every variant, as `evidence.kernel_resources` recorded them.

    Without those of another release of Triton, whose figures are others, and of other code.
    """
    code = kernel_code.digests()
    with kernel_code.RESOURCES.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        (f"{row['target']} {row['kernel']} {row['variant']}".strip(), int(row["warps"])): row
        for row in rows
        if (row["triton"], row["digest"]) == (triton.__version__, code.get(row["kernel"]))
    }


@pytest.fixture
def compile_all(compile_for, record_property, pytestconfig, recorded_resources):
    """`compile_all(launches, registers, shared)` -> the PTX for Hopper of launches that cover them.

    None spills, none takes more registers or bytes of shared memory than these, nor more than is
    recorded; for Blackwell neither, of each kernel the variant that takes the most registers. Where
    nothing is recorded with this release of Triton, all that are not FAR_FROM_SPILLING.
    """
    every = pytestconfig.getoption("every_variant", default=False)
    unrecorded = pytestconfig.getoption("unrecorded", default=False)

    def compile_and_check(launch: Launch, target: str, most: int, shared: int) -> tuple[str, int]:
        name = f"{target} {launch.name}"
        row = recorded_resources.get((name, launch.num_warps))
        if unrecorded and row:
            kept = (int(row[c]) for c in ("registers", "spilled_bytes", "shared_bytes"))
            registers, spilled, bytes_shared = kept
            used = Resources(registers, spilled, 0, bytes_shared, launch.num_warps)
            record_property(name, str(used))
            return "", registers
        ptx, used = compile_for(launch, target)
        record_property(name, str(used))
        assert used.stack == used.local == 0, f"{name} spills: {used}"
        assert used.registers <= most, f"{name}: {used}"
        assert used.shared <= shared, f"{name}: {used}"
        if recorded_resources and not every:
            assert row
            assert used.registers <= int(row["registers"]), f"{name}: {used}, recorded: {row}"
            assert used.shared <= int(row["shared_bytes"]), f"{name}: {used}, recorded: {row}"
        return ptx, used.registers

    def compile_launches(launches, registers: int = 255, shared: int = 100 * 1024) -> list[str]:
        made, taken = [], []
        distinct = list({launch.key: launch for launch in launches}.values())
        for launch, target in itertools.product(distinct, TARGETS):
            known = (f"{target} {launch.name}", launch.num_warps) in recorded_resources
            assert known or every or not recorded_resources, (
                f"{target} {launch.name} is not recorded: run "
                "`python -m benchmarks.evidence.kernel_resources --changed` and commit the CSV"
            )
        for launch in distinct if every else covering(distinct):
            # One program fits the register file.
            most = min(registers, 65536 // (32 * launch.num_warps))
            ptx, used = compile_and_check(launch, "sm_90", most, shared)
            made.append(ptx)
            taken.append((used / most, launch, most))
        largest = {}
        for part, launch, _ in taken:
            largest[launch.kernel] = max(part, largest.get(launch.kernel, 0.0))
        for part, launch, most in taken:
            near = part >= FAR_FROM_SPILLING and not recorded_resources
            if every or near or part == largest[launch.kernel]:
                compile_and_check(launch, "sm_100", most, shared)
        return made

    return compile_launches


@pytest.fixture
def atomics_in():
    """`atomics_in(ptx)`: its atomic operations; Triton 3.9 writes ``red`` if nobody reads one."""
    return lambda ptx: re.findall(r"\b(?:atom|red)\.global\S*", ptx)


@pytest.fixture
def count_instructions(tmp_path):
    """`count_instructions(launch, "sm_90")`, without a GPU."""
    return lambda launch, target: instructions(compile_launch(launch, TARGETS[target]), tmp_path)
