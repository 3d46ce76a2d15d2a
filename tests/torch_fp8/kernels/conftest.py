"""Records what the host functions launch, and compiles it for a GPU that is not there."""

import re
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TARGETS = {"sm_90": GPUTarget("cuda", 90, 32), "sm_100": GPUTarget("cuda", 100, 32)}

_POINTER = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}


@dataclass(frozen=True)
class Launch:
    """One kernel launch: what the compiler is told of its arguments, and the grid."""

    kernel: JITFunction
    signature: tuple[tuple[str, str], ...]  # argument -> Triton type, "constexpr" if specialised
    constants: tuple[tuple[str, object], ...]
    divisible: tuple[str, ...]  # pointers and integers that are multiples of 16
    num_warps: int
    grid: tuple[int, ...]

    @property
    def name(self) -> str:
        """Short and unique among the launches of one file."""
        flags = [f"{k}={v}" for k, v in self.constants if k.isupper()]
        types = [t for _, t in self.signature if t.startswith("*")]
        return " ".join([self.kernel.__name__.strip("_"), types[0], *flags])

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for launches that run the same binary."""
        return (
            self.kernel.__name__,
            self.signature,
            self.constants,
            self.divisible,
            self.num_warps,
        )


class _Recorder:
    def __init__(self, kernel: JITFunction, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]):
        def launch(*args: object, num_warps: int = 4, **constants: object) -> None:
            names = self.kernel.arg_names
            signature, divisible = {}, []
            constants = dict(constants)
            for name, value in zip(names, args, strict=False):
                if isinstance(value, torch.Tensor):
                    signature[name] = _POINTER[value.dtype]
                    divisible.append(name)  # every allocation starts at a multiple of 256 bytes
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
                    num_warps,
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
    """Per-thread registers, bytes of stack (spills live there) and bytes of shared memory."""

    registers: int
    stack: int
    local: int
    shared: int


def compile_launch(launch: Launch, target: GPUTarget):
    """The compiled kernel, without a GPU."""
    names = launch.kernel.arg_names
    source = ASTSource(
        launch.kernel,
        dict(launch.signature),
        constexprs={(names.index(k),): v for k, v in launch.constants},
        attrs={(names.index(k),): [["tt.divisibility", 16]] for k in launch.divisible},
    )
    return triton.compile(source, target=target, options={"num_warps": launch.num_warps})


def resources(compiled, directory: Path) -> Resources:
    """What the assembler made of it, as the cuobjdump that comes with Triton tells."""
    cubin = directory / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    text = subprocess.run(
        [str(tool), "-res-usage", str(cubin)], check=True, capture_output=True, text=True
    ).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    shared = compiled.metadata.shared
    return Resources(found["REG"], found["STACK"], found["LOCAL"], shared)


@pytest.fixture
def record_launches():
    """`with record_launches(module) as launches: ...` runs host code and no kernel."""
    return recorded


@pytest.fixture
def compile_for(tmp_path):
    """`compile_for(launch, "sm_90")` -> (PTX, Resources), without a GPU."""

    def compile_and_measure(launch: Launch, target: str) -> tuple[str, Resources]:
        compiled = compile_launch(launch, TARGETS[target])
        return compiled.asm["ptx"], resources(compiled, tmp_path)

    return compile_and_measure
