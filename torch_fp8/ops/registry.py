"""The registry of this package's operators, in ``torch.library`` and for eager code.

An operator is defined by decorating its reference in plain torch with `operator`. The decorated
name becomes the function that calls the operator, and the schema is derived from the annotations.
Tuples of arguments, such as `torch_fp8.kernels.arguments.CastOptions`, are flattened here and
nowhere else.

torch's dispatcher is slow for operators implemented in Python, and a block calls many. If tensors
are plain CUDA tensors, no dispatch mode is active and nothing is compiled, no other code has to see
the call, so it goes directly to the implementation.

In a graph of torch.compile for CUDA an operator is its kernels: while AOTAutograd traces, a call
runs the launcher, whose allocations, views and launches become nodes of the graph. Inductor then
plans their memory and launches the kernels without our Python. A launcher then decides by numbers
of tokens only if `torch_fp8.quantization.payload_shape.is_known`: a decision by a symbolic size
would compile the graph again for other lengths.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from types import NoneType
from typing import Any, Generic, ParamSpec, TypeVar, cast, get_args, get_type_hints

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from torch_fp8.kernels.launch_tape import Replayed
from torch_fp8.quantization.formats import MIN_CAPABILITY

_LIBRARY = torch.library.Library("torch_fp8", "DEF")
_SCHEMA_TYPES = {Tensor: "Tensor", torch.dtype: "ScalarType"}

_module = functools.cache(import_module)

P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class Operator(Generic[P, R]):
    """The type of a decorated reference; at run time a function that torch.compile traces.

    Attributes:
        reference: the decorated function.
    """

    reference: Callable[P, R]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        raise NotImplementedError


def operator(
    fake: Callable[..., Any],
    *,
    results: int | None = None,
    writes: str = "",
    opaque: bool = False,
    fuses: bool = False,
) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Define ``torch.ops.torch_fp8.<name>`` from its reference; return its caller.

    The first argument is a tensor or a tuple that starts with one; all arguments are positional. If
    there are several results, those that do not exist are None; the dispatcher returns empty
    tensors for them.

    On CUDA the function of the same name launches the kernels, in the module of `torch_fp8.kernels`
    that has the name of the reference's module. It runs with the tensors' device as the current
    one, and is imported only if kernels run, because it imports Triton.

    Args:
        fake: a function of the same arguments that returns empty tensors of the results' shapes.
        results: the number of returned tensors, if the annotation does not show it.
        writes: the name of the argument that the operator overwrites; graphs keep such an operator.
        opaque: whether the reference runs on every device, because it only calls other operators,
            in loops whose results must not all live at once, as they would in a recorded call.
        fuses: whether graphs for CUDA have the reference in place of kernels, because Inductor
            joins it with its neighbours.
    """

    def define_operator(reference: Callable[P, R]) -> Operator[P, R]:
        name = reference.__name__
        kernels = reference.__module__.replace(".ops.", ".kernels.")
        on_cpu: Callable[..., Any] = reference

        def launch(*args: Any) -> Any:
            first = _first(args)
            if emulates_casts(first.device):
                return on_cpu(*args)
            with torch.cuda.device_of(first):  # it need not be the current one
                return getattr(_module(kernels), name)(*args)

        parameters, schema = _schema(reference, results, writes)
        # The same in graphs and in eager code.
        replayed = reference if opaque else Replayed(launch)
        of_flat = (_unflattened(f, parameters) for f in (on_cpu, replayed, fake))
        in_graph = reference if fuses else launch
        traced = None if writes or opaque else _unflattened(in_graph, parameters)
        of_tuple = parameters[0] is not None
        call = define(schema, *of_flat, eager=replayed, traced=traced, of_tuple=of_tuple)
        functools.update_wrapper(call, reference)
        call.reference = reference
        return cast("Operator[P, R]", call)

    return define_operator


def define(
    schema: str,
    *implementations: Callable[..., Any],
    eager: Callable[..., Any] | None = None,
    traced: Callable[..., Any] | None = None,
    of_tuple: bool = False,
) -> Any:
    """Define ``torch.ops.torch_fp8.<name>`` and return the function that calls it.

    Args:
        schema: the schema, as for `torch.library.Library.define`; the first argument is a tensor.
        implementations: the functions for the CPU, for CUDA and for tracing, with the schema's
            arguments and results.
        eager: a function that replaces the CUDA one in calls that bypass the dispatcher; it accepts
            tuples of arguments.
        traced: a function that launches the kernels, whose nodes replace the operator in graphs for
            CUDA, or None if graphs keep the operator.
        of_tuple: whether calls begin with a tuple that starts with the first tensor.
    """
    name, (cpu, cuda, fake) = schema.partition("(")[0], implementations
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, cpu, "CPU")
    _LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"torch_fp8::{name}", fake, lib=_LIBRARY)
    overload = getattr(torch.ops.torch_fp8, name).default
    shortcut = eager or cuda
    if traced is not None:
        _decompose(f"torch_fp8::{name}", traced)

    def call(*args: Any) -> Any:
        x = args[0][0] if of_tuple else args[0]
        if torch.compiler.is_dynamo_compiling() or is_watched(x):
            return overload(*_flat(args))
        return shortcut(*args)

    return call


def _decompose(name: str, traced: Callable[..., Any]) -> None:
    """Let `traced` replace an operator while AOTAutograd traces a graph for CUDA."""

    def functional(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_visible(args[0]):
            return mode.__torch_dispatch__(func, types, args, kwargs)
        with mode:
            return traced(*args)

    torch.library.register_torch_dispatch(name, FunctionalTensorMode, functional, lib=_LIBRARY)


def is_visible(x: Tensor) -> bool:
    """Return whether the kernels of an operator on x become nodes of a graph that is traced."""
    exporting = torch.compiler._is_exporting_flag
    return on_cuda(x) and not exporting and not emulates_casts(x.device)


def _first(args: Sequence[Any]) -> Tensor:
    """Return the first tensor of an operator's arguments."""
    return args[0] if isinstance(args[0], Tensor) else args[0][0]


def _flat(args: Sequence[Any]) -> list[Any]:
    """Return the arguments with tuples flattened, as in a schema."""
    return [x for part in args for x in (part if isinstance(part, tuple) else (part,))]


def _unflattened(function: Callable[..., Any], parameters: Sequence[Any]) -> Callable[..., Any]:
    """Return `function` with flat arguments, of which trailing defaults may be missing.

    It returns an empty tensor for each missing result, because schemas do not allow None.
    """

    def of_flat(*args: Any) -> Any:
        grouped, start = [], 0
        for cls in parameters:
            if start == len(args):
                break
            size = 1 if cls is None else len(cls._fields)
            grouped.append(args[start] if cls is None else cls(*args[start : start + size]))
            start += size
        results = function(*grouped)
        if not isinstance(results, tuple):
            return results
        float32 = torch.float32
        return tuple([args[0].new_empty(0, dtype=float32) if t is None else t for t in results])

    return of_flat


def _schema(
    function: Callable[..., Any], results: int | None, writes: str
) -> tuple[list[Any], str]:
    """Return each parameter's tuple class, or None for a single argument, and the flat schema."""
    hints = get_type_hints(function)
    result = hints.pop("return")
    parameters: list[Any] = []
    arguments = []
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints[name]
        if isinstance(hint, type) and issubclass(hint, tuple):
            parameters.append(hint)
            arguments += [_argument(field, of) for field, of in get_type_hints(hint).items()]
            continue
        parameters.append(None)
        has_default = parameter.default is not parameter.empty
        default = f"={parameter.default}" if has_default else ""
        argument = _argument(name, hint) + default
        arguments.append(argument.replace(" ", "(a!) ", 1) if name == writes else argument)
    if results is None and result is not Tensor:
        results = len(get_args(result))
    returned = "Tensor" if results is None else f"({', '.join(['Tensor'] * results)})"
    return parameters, f"{function.__name__}({', '.join(arguments)}) -> {returned}"


def _argument(name: str, hint: Any) -> str:
    """Return a parameter in schema syntax."""
    optional = NoneType in get_args(hint)
    of = get_args(hint)[0] if optional else hint
    text = _SCHEMA_TYPES.get(of) or of.__name__
    return f"{text}{'?' * optional} {name}"


@functools.cache
def emulates_casts(device: torch.device) -> bool:
    """Return whether the reference must run, because a CUDA device is older than FP8."""
    return torch.cuda.get_device_capability(device) < MIN_CAPABILITY


def is_watched(x: Tensor) -> bool:
    """Return whether the dispatcher must see an operator on x.

    It must for a dispatch mode, a transform, a tensor subclass, autograd, or a CPU tensor.
    """
    return (
        not on_cuda(x)
        or _len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__
        or (x.requires_grad and torch.is_grad_enabled())
    )


def on_cuda(x: Tensor) -> bool:
    """Return whether a tensor is on CUDA; benchmarks without a GPU replace it."""
    return x.is_cuda
