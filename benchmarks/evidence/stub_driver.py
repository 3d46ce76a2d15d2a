"""A CUDA driver that does nothing, to time the host's part of launches without a card.

Our operators run their implementations for CUDA on CPU tensors. Triton's own launcher runs, the C
code that it generates for every kernel included, down to a ``libcuda.so.1`` of a few lines
(`tests.emulator.stub_library`) that takes every launch and counts it. Kernels are not compiled.
GEMMs return uninitialized memory. So Python, torch and Triton do everything that they do for a
step on a card; only the real driver's time for a launch is missing, in BF16 as in FP8.

Import this before anything of ``torch_fp8``: the implementations are chosen as they are registered.
"""

import contextlib
import importlib
import pkgutil
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import torch
from triton import compiler, knobs
from triton.backends import nvidia
from triton.runtime import driver

from tests.emulator.stub_library import Driver, StubLibrary, stub_library

CAPABILITY = (9, 0)


def _cuda_implementations_on_cpu() -> None:
    """Import the operators with their CUDA implementations registered for the CPU."""
    assert "torch_fp8" not in sys.modules, "import benchmarks.evidence.stub_driver first"
    register = torch.library.Library.impl

    def registering(self, name, function, dispatch_key="", **options):
        if dispatch_key == "CUDA":
            return register(self, name, function, "CPU", **options)
        return None if dispatch_key == "CPU" else register(self, name, function, dispatch_key)

    with mock.patch.object(torch.library.Library, "impl", registering):
        for module in pkgutil.iter_modules(importlib.import_module("torch_fp8.ops").__path__):
            importlib.import_module(f"torch_fp8.ops.{module.name}")


_cuda_implementations_on_cpu()
GradientParts = importlib.import_module("torch_fp8.ops.adamw").GradientParts


class Counts:
    """The launches since then: of our kernels, and GEMMs in FP8."""

    def __init__(self, library: StubLibrary) -> None:
        self._library, self._before = library, library.launches
        self.gemms = 0

    @property
    def kernels(self) -> int:
        return self._library.launches - self._before


@contextlib.contextmanager
def stub_driver() -> Iterator[Counts]:
    """Send all launches within to the stub."""
    gemm = importlib.import_module("torch_fp8.ops.scaled_mm")
    gemm_operand = importlib.import_module("torch_fp8.ops.gemm_operand")
    operators = importlib.import_module("torch_fp8.ops.registry")
    step = importlib.import_module("torch_fp8.optim.step")
    steps_on = step._step_on
    adam = importlib.import_module("torch.optim.adam")  # small weights: as on a card

    def product(a, b, *rest):
        counts.gemms += 1
        return a.new_empty((a.shape[0], b.shape[1]), dtype=rest[-3])

    def step_on(device, *rest):
        steps_on(torch.device("cuda"), *rest)

    def quantize_gradient(x, keys):
        rows, groups = x.shape[0], -(-x.shape[1] // 32)
        qdata = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
        scale = torch.empty((rows, groups), dtype=torch.uint8, device=x.device)
        multiplier = torch.empty((), dtype=torch.float32, device=x.device)
        gradients.encode_gradient(x, qdata, scale, multiplier, keys, False)
        return GradientParts(qdata, scale, multiplier)

    def emulated(a, b, *rest):
        return gemm.multiply_laid_out(a, gemm.lay_out(b, a.qdata.shape[1]), *rest)

    gradients = importlib.import_module("torch_fp8.kernels.grad_codec")
    tensors = importlib.import_module("torch_fp8.tensor.float8_grad")
    with contextlib.ExitStack() as stack:
        library = stub_library()
        library.accept(True)
        stack.callback(library.accept, False)
        counts = Counts(library)
        stack.enter_context(knobs.nvidia.scope())
        knobs.nvidia.libcuda_path = str(library.folder)
        for owner, name, stub in (
            (driver, "_active", Driver(CAPABILITY)),
            (compiler, "compile", Uncompiled),
            (torch.cuda, "get_device_capability", _capability),
            (torch, "_scaled_mm_v2", product),
            (gemm, "_emulated", emulated),
            (gemm, "_CPU_HAS_OPERATOR", True),
            (gemm_operand, "_pad", lambda x, *rest: x),  # sizes of models need none
            (step, "_step_on", step_on),
            (tensors, "quantize_gradient", quantize_gradient),
            (operators, "on_cuda", lambda x: True),
            (adam, "_default_to_fused_or_foreach", lambda *args, **options: (False, True)),
            (torch.Tensor, "is_shared", torch.Tensor.is_complex),  # in C; CUDA's are not asked
        ):
            stack.enter_context(mock.patch.object(owner, name, stub))
        yield counts


class Uncompiled:
    """A kernel with its real launcher and no code."""

    function = 1
    shared = 0

    def __init__(self, src, target, options) -> None:
        self.src = src
        self.hash = src.hash()  # finds out which globals a kernel uses: each launch compares them
        self.metadata = metadata = SimpleNamespace(
            num_warps=options["num_warps"],
            num_ctas=1,
            cluster_dims=(1, 1, 1),
            global_scratch_size=0,
            global_scratch_align=1,
            profile_scratch_size=0,
            profile_scratch_align=1,
            launch_cooperative_grid=False,
            launch_pdl=False,
        )
        self.run = nvidia.driver.CudaLauncher(src, metadata)
        self.packed_metadata = (options["num_warps"], 1, 0)

    __getitem__ = compiler.CompiledKernel.__getitem__

    def _init_handles(self) -> None:
        pass

    def launch_metadata(self, grid, stream, *args) -> None:
        return None


def _capability(device: object = None) -> tuple[int, int]:
    return CAPABILITY
