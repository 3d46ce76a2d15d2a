"""Generated code for a card, called on CPU tensors, with launches that go to the stub driver.

torch.compile compiles a program as usual: guards, autograd functions and their runtime wrappers are
its own. Only Inductor's result for each graph is replaced by the code that Inductor generates for a
mocked H200 (`evidence.generated_code`). It runs line by line:

* Kernels, those of Inductor and those in Triton that a graph contains, launch through Inductor's
  `CachingAutotuner` and Triton's launcher, down to the stub driver (`evidence.stub_driver`). They
  are not compiled, and the first configuration is used instead of the fastest.
* Our operators go through torch's dispatcher.
* Products become a product of single elements. Other operators of torch that write their results
  themselves, such as attention, return uninitialized memory. Sums over the rows of a
  workspace read one row.
* CUDA's allocations are the CPU's. `reuse_memory` lets it keep blocks of any size, as CUDA's
  allocator does.

Import `evidence.stub_driver` before this.
"""

import contextlib
import ctypes
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from torch._inductor import compile_fx
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime import triton_helpers
from torch.fx import GraphModule

from benchmarks.evidence.generated_code import lowered, mocked_card
from benchmarks.evidence.stub_driver import Uncompiled

_REPLACED = (
    ("AsyncCompile()", "Kernels()"),
    ("from torch._inductor.select_algorithm import extern_kernels", "extern_kernels = Products()"),
)
_OF_TORCH = re.compile(r"= torch\.ops\.aten\.(\w+)\.(\w+)\(")
_guards = torch._C._dynamo.guards
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's malloc.h


def compiled(program: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compile a program, whose first call and backward generate the code.

    Call it within `generated_calls` and the stub driver.
    """

    def backend(module: GraphModule, examples: list[Any]) -> Any:
        return compile_fx.compile_fx(module, examples, inner_compile=_generated)

    run: Callable[..., Tensor] = torch.compile(
        program, backend=backend, fullgraph=True, dynamic=False
    )
    return run


def _generated(module: GraphModule, examples: Sequence[Any], **options: Any) -> Any:
    inputs, is_backward = list(examples), options.get("is_backward", False)
    call: Any = None

    def run(arguments: list[Any]) -> Any:
        nonlocal call
        if call is None:  # no compilation surrounds the first call
            with mocked_card():
                source = lowered(module, inputs, is_backward).source
            call = loaded(source)
        return call(arguments)

    run._boxed_call = True
    return run


def loaded(source: str) -> Callable[[list[Any]], Any]:
    """Load generated code, and return its function ``call(arguments)``."""
    definitions, separator, calls = source.partition("def call(")
    calls = _OF_TORCH.sub(r"= unwritten(torch.ops.aten.\1.\2, ", calls)
    calls = calls.replace(".sum(dim=0)", "[:1].sum(dim=0)")
    for code, replacement in _REPLACED:
        assert code in definitions, code
        definitions = definitions.replace(code, replacement)
    names = {"Kernels": _Kernels, "Products": _Products, "unwritten": _Unwritten()}
    exec(compile(definitions + separator + calls, "generated", "exec"), names)
    call: Callable[[list[Any]], Any] = names["call"]  # type: ignore[assignment]
    return call


@contextlib.contextmanager
def generated_calls() -> Iterator[None]:
    """Let generated code load and run without CUDA."""
    answers = (
        *((torch._C, name, _in_c()) for name in ("_cuda_getCurrentRawStream", "_cuda_setDevice")),
        *((torch.cuda, name, _in_c()) for name in ("_exchange_device", "_maybe_exchange_device")),
        (_guards, "_empty_strided_cuda", _guards._empty_strided_cpu),
        (triton, "compile", Uncompiled),
        (triton_helpers, "set_driver_to_gpu", lambda: None),
    )
    with contextlib.ExitStack() as stack:
        for owner, name, answer in answers:
            stack.enter_context(mock.patch.object(owner, name, answer, create=True))
        yield


def _in_c() -> Callable[[int], int]:
    """Return a function in C that takes a number, each time another object: Dynamo has a table."""
    return functools.partial(int)


def reuse_memory() -> None:
    """Let malloc keep blocks of any size: the pages of a large tensor are reserved once."""
    library = ctypes.CDLL(None)
    assert library.mallopt(_M_MMAP_MAX, 0)
    assert library.mallopt(_M_TRIM_THRESHOLD, -1)  # never


class _Kernels:
    """A replacement for Inductor's `AsyncCompile`, with which generated code builds its kernels."""

    def triton(self, name: str, source: str, **options: Any) -> Any:
        kernel = getattr(PyCodeCache.load(source), name)
        del kernel.configs[1:]
        kernel.launchers = [kernel._precompile_config(kernel.configs[0]).make_launcher()]
        return kernel

    def wait(self, names: dict[str, Any]) -> None:
        pass


class _Products:
    """Products that write into ``out``: torch's own function runs, on single elements."""

    def __init__(self) -> None:
        self._single = torch.ones(1, 1, dtype=torch.bfloat16)

    def __getattr__(self, name: str) -> Callable[..., Tensor]:
        mm, single = torch.mm, self._single

        def product(*factors: Any, out: Tensor, **options: Any) -> Tensor:
            mm(single, single, out=single)
            return out

        return product


class _Unwritten:
    """Results of torch's operators, whose sizes the first call determines."""

    def __init__(self) -> None:
        self._sizes: dict[Any, list[Any]] = {}

    def __call__(self, operator: Any, *args: Any, **options: Any) -> Any:
        key = operator, tuple(x.shape for x in args if isinstance(x, Tensor))
        if key not in self._sizes:
            self._sizes[key] = _sizes_of(operator, args, options)
        new = _guards._empty_strided_cpu
        results = [new(*size) if isinstance(size, tuple) else size for size in self._sizes[key]]
        return results if len(results) > 1 else results[0]


def _sizes_of(operator: Any, args: tuple[Any, ...], options: dict[str, Any]) -> list[Any]:
    """Return (shape, strides, dtype) of each tensor, and other results unchanged."""
    results = operator(*map(_on_meta, args), **{name: _on_meta(x) for name, x in options.items()})
    results = results if isinstance(results, tuple | list) else [results]
    return [(tuple(x.shape), x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in results]


def _on_meta(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return torch.device("meta") if isinstance(x, torch.device) else x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
