"""The code that Inductor generates for a card, without a card.

Dynamo and AOTAutograd trace a program on CPU tensors of its real shapes. The inputs of the
partitioned forward and backward graphs then become fake CUDA tensors, and Inductor lowers them for
a mocked H200, whose properties determine tiles, down to the Python code that launches the
kernels. No kernel is compiled.

Our operators choose between CUDA and CPU by `torch_fp8.ops.registry.on_cuda`, which says CUDA here.
"""

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.utils._triton
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import MultiOutput, UserDefinedTritonKernel
from torch._inductor.scheduler import BaseSchedulerNode, ExternKernelSchedulerNode
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._pytree import tree_leaves
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from tests.compiled_graphs import traced_for_card
from torch_fp8.kernels.arguments import CastOptions

CARD = torch.device("cuda", 0)
H200 = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block_optin=232448,
    warp_size=32,
    total_memory=150_754_820_096,
    L2_cache_size=60 << 20,
)
COMPUTE = ("mm", "addmm", "bmm", "_scaled_mm", "scaled_mm", "_scaled_dot_product_cudnn_attention")
"""Operators whose bytes are not counted: products and attention, in both directions."""


class Code(NamedTuple):
    """The generated code of one graph, and its counts.

    Attributes:
        source: the code, in Python.
        opaque: calls of our operators, which the compiler cannot look into.
        launches: kernels that Inductor launches, and calls of any operator.
        assertions: checks of sizes, strides and alignment.
        moved_bytes: bytes that are read and written, except by `COMPUTE`.
        skip_reason: why Inductor would not record a CUDA graph, or "" if it would.
    """

    source: str
    opaque: int
    launches: int
    assertions: int
    moved_bytes: int
    skip_reason: str


def code_of(program: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Code]:
    """Compile ``program(*inputs)`` and its backward, and return the code of both graphs.

    Args:
        program: a function whose result requires a gradient.
        inputs: CPU tensors.
    """
    graphs: list[tuple[GraphModule, list[Any], bool]] = []

    def keep(module: GraphModule, examples: Sequence[Any], **options: Any) -> Any:
        graphs.append((module, list(examples), options.get("is_backward", False)))
        return _unwritten(module)

    def backend(module: GraphModule, examples: list[Any]) -> Any:
        return compile_fx.compile_fx(module, examples, inner_compile=keep)

    with traced_for_card():
        result = torch.compile(program, backend=backend, fullgraph=True)(*inputs)
        result.backward(torch.empty_like(result))
        with mocked_card():
            return [lowered(*graph) for graph in graphs]


def _unwritten(module: GraphModule) -> Any:
    """Return a function that replaces a compiled graph and returns uninitialized results."""
    output = next(iter(module.graph.find_nodes(op="output")))
    values = [n.meta["val"] if isinstance(n, Node) else n for n in output.args[0]]

    def run(inputs: list[Any]) -> list[Any]:
        inputs.clear()
        return [_like(v, v.device) if isinstance(v, Tensor) else v for v in values]

    run._boxed_call = True
    return run


def _like(x: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


@contextlib.contextmanager
def mocked_card() -> Iterator[None]:
    """Let Inductor and Triton see one H200, and fake tensors on it work without CUDA."""
    properties = staticmethod(lambda device=None: H200)
    target = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: CARD,
    )
    answers = (
        (torch.version, "cuda", "13.0"),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "get_device_properties", properties),
        (torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
        (CudaInterface, "get_device_properties", properties),
        (CudaInterface.Worker, "get_device_properties", properties),
        (CudaInterface, "current_device", staticmethod(lambda: 0)),
        (driver, "_active", target),
        (compile_fx, "get_cuda_device_context", lambda module: contextlib.nullcontext()),
        # Their Python bindings select the device, which is not there.
        (FakeTensor, "copy_", lambda x, y, *rest: torch.ops.aten.copy_.default(x, y)),
        (FakeTensor, "__getitem__", lambda x, i: torch.select(x, 0, i)),
    )
    cached = [f for f in vars(torch.utils._triton).values() if hasattr(f, "cache_clear")]
    with contextlib.ExitStack() as stack:
        for owner, name, answer in answers:
            stack.enter_context(mock.patch.object(owner, name, answer, create=True))
        stack.enter_context(inductor_config.patch(compile_threads=1))  # nothing is compiled
        for function in cached:
            function.cache_clear()
            stack.callback(function.cache_clear)
        yield


def lowered(module: GraphModule, inputs: list[Any], is_backward: bool) -> Code:
    """Generate the code of a graph as if its tensors were on the card; within `mocked_card`."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for node in module.graph.nodes:
        if node.kwargs.get("device") is not None:
            node.kwargs = {**node.kwargs, "device": CARD}
    with mode:
        inputs = [_like(x, CARD) if isinstance(x, Tensor) else x for x in inputs]
    compile_fx.view_to_reshape(module)
    with torch.no_grad():
        FakeTensorProp(module, mode=mode).propagate_dont_convert_inputs(*inputs)
    compile_fx._recursive_record_original_output_strides(module)
    with V.set_debug_handler(DebugContext()), V.set_fake_mode(mode):
        compile_fx._recursive_post_grad_passes(module, is_inference=False)
        graph = GraphLowering(module, example_inputs=inputs, is_backward=is_backward)
        with V.set_graph_handler(graph), V.set_extern_kernel_nodes([]):
            graph.run(*inputs)
            code = graph.codegen()[0].value
            moved = sum(_bytes_of(node) for node in graph.scheduler.nodes)
    calls = code[code.index("def call(") :]
    return Code(
        code,
        opaque=len(re.findall(r"= torch\.ops\.torch_fp8\.", calls)),
        launches=len(re.findall(r"\.run\(|extern_kernels\.\w+\(|= torch\.ops\.", calls)),
        assertions=len(re.findall(r"\bassert_(?:size_stride|alignment)\(", calls)),
        moved_bytes=moved,
        skip_reason=_skip_reason(graph),
    )


def _bytes_of(node: BaseSchedulerNode) -> int:
    """Return how many bytes a kernel of Inductor, or an operator, reads and writes at least."""
    if not isinstance(node, ExternKernelSchedulerNode):
        return int(node.get_read_write_buffers_sizes())
    kernel = node.node
    if isinstance(kernel, UserDefinedTritonKernel):  # Inductor counts what it writes twice
        return sum({x.get_name(): _nbytes(x) for x in kernel.inputs}.values())
    call = next((n for n in getattr(kernel, "origins", ()) if n.target is _operator(kernel)), None)
    if isinstance(kernel, MultiOutput) or _name(_operator(kernel)) in COMPUTE:
        return 0
    if call is None:
        return int(node.get_read_write_buffers_sizes())
    values = [n.meta["val"] for n in (call, *call.all_input_nodes)]
    if _name(call.target) == "quantize_2d" and CastOptions(*call.args[1:]).needs_amax:
        values.append(call.args[0].meta["val"])  # a launch for the amax, one for the cast
    return sum(x.nbytes for x in tree_leaves(values) if isinstance(x, Tensor))


def _nbytes(x: Any) -> int:
    return math.prod(map(int, x.get_size())) * x.get_dtype().itemsize


def _operator(kernel: Any) -> Any:
    return getattr(kernel, "op_overload", None)


def _name(operator: Any) -> str:
    schema = getattr(operator, "_schema", None)
    return "" if schema is None else schema.name.partition("::")[2].removesuffix("_backward")


def _skip_reason(graph: GraphLowering) -> str:
    reason = graph.disable_cudagraphs_reason
    if not reason and graph.device_types != {"cuda"}:
        reason = f"devices: {', '.join(sorted(graph.device_types))}"
    return reason or ""
