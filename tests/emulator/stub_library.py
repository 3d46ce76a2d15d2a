"""A ``libcuda.so.1`` that calls a Python function where the real one launches a kernel."""

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from triton.backends import nvidia

_SOURCE = """
#include "cuda.h"
typedef int (*Handler)(const CUlaunchConfig *, CUfunction, void **);
static Handler handler = 0;
void set_handler(Handler h) { handler = h; }
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **p, void **e) {
  return handler == 0 ? CUDA_ERROR_NOT_INITIALIZED : handler(c, f, p);
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
        self._kept = tempfile.TemporaryDirectory()
        self.folder = Path(self._kept.name)
        source, library = self.folder / "stub.c", self.folder / "libcuda.so.1"
        source.write_text(_SOURCE)
        include = Path(nvidia.__path__[0]) / "include"
        command = ["cc", "-shared", "-fPIC", "-O2", f"-I{include}", "-Wl,-soname,libcuda.so.1"]
        subprocess.run([*command, str(source), "-o", str(library)], check=True)
        self._library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self._handler: object = None

    def handle(self, function: Callable[..., int] | None) -> None:
        """Call a function with (configuration, function's handle, addresses of parameters)."""
        self._handler = HANDLER() if function is None else HANDLER(function)
        self._library.set_handler(self._handler)


@functools.cache
def stub_library() -> StubLibrary:
    """Return the one library of the process."""
    return StubLibrary()
