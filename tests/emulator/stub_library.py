"""A ``libcuda.so.1`` that counts launches, or calls a Python function for each, and runs nothing.

With it stands what Triton asks of its driver when it launches.
"""

import ctypes
import functools
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from triton.backends import nvidia
from triton.backends.compiler import GPUTarget

_SOURCE = """
#include "cuda.h"
typedef int (*Handler)(const CUlaunchConfig *, CUfunction, void **);
static Handler handler = 0;
static int accepts = 0;
long launches = 0;
void set_handler(Handler h) { handler = h; }
void set_accepts(int a) { accepts = a; }
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **p, void **e) {
  launches++;
  if (handler != 0) return handler(c, f, p);
  return accepts ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute a, CUdeviceptr p) {
  *(CUdeviceptr *)data = p;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *c) { *c = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext c) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *d, int i) { *d = 0; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) { return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult r, const char **s) { *s = "a fault"; return CUDA_SUCCESS; }
"""
_DEFINED = re.compile(r"^CUresult (\w+)\(", re.MULTILINE)
_CALLED = re.compile(r"\b(cu[A-Z]\w+)\(")
_ABSENT = "int {name}(void) {{ return 801; }}"
"""A function that Triton's module is linked with, and launches do not call: it returns
CUDA_ERROR_NOT_SUPPORTED.
"""


class LaunchConfig(ctypes.Structure):
    """The beginning of ``CUlaunchConfig``."""

    _fields_ = [
        *((f"grid_{axis}", ctypes.c_uint) for axis in "xyz"),
        *((f"block_{axis}", ctypes.c_uint) for axis in "xyz"),
        ("shared", ctypes.c_uint),
    ]


HANDLER = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(LaunchConfig), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
)


class StubLibrary:
    """The library, built and loaded under the name with which launchers are linked.

    Attributes:
        folder: where it lies.
    """

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self.folder = Path(self._directory.name)
        source, library = self.folder / "stub.c", self.folder / "libcuda.so.1"
        source.write_text(_SOURCE)
        absent = self.folder / "absent.c"
        called = _CALLED.findall(Path(nvidia.__path__[0], "driver.c").read_text())
        names = sorted(set(called) - set(_DEFINED.findall(_SOURCE)))
        absent.write_text("\n".join(_ABSENT.format(name=name) for name in names))
        include = Path(nvidia.__path__[0]) / "include"
        command = ["cc", "-shared", "-fPIC", "-O2", f"-I{include}", "-Wl,-soname,libcuda.so.1"]
        subprocess.run([*command, str(source), str(absent), "-o", str(library)], check=True)
        self._library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self._handler: object = None
        self._launches = ctypes.c_long.in_dll(self._library, "launches")

    @property
    def launches(self) -> int:
        return self._launches.value

    def accept(self, accepts: bool) -> None:
        self._library.set_accepts(int(accepts))

    def handle(self, function: Callable[..., int] | None) -> None:
        self._handler = HANDLER() if function is None else HANDLER(function)
        self._library.set_handler(self._handler)


class Driver:
    """The answers that Triton asks of its driver for a launch.

    Args:
        capability: compute capability, such as (9, 0).
    """

    def __init__(self, capability: tuple[int, int]) -> None:
        self._capability = 10 * capability[0] + capability[1]

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@functools.cache
def stub_library() -> StubLibrary:
    """Return the one library of the process."""
    return StubLibrary()
