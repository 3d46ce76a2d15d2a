"""Styles for ``parallelize_module`` in which ranks exchange activations in FP8.

They have the arguments of torch's styles and replace them::

    parallelize_module(block, mesh["tensor_parallel"], {
        "norm": SequenceParallel(use_local_output=True),
        "attention": PrepareFloat8ModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate()
        ),
        "attention.q": Float8ColwiseParallel(),  # k and v likewise: one cast, one gather for all
        "attention.o": Float8RowwiseParallel(output_layouts=Shard(1)),
        "up": Float8ColwiseParallel(input_layouts=Shard(1)),
        "down": Float8RowwiseParallel(output_layouts=Shard(1)),
    })

Gathered tokens travel in FP8: those of a column-wise layer's input in forward, and those of the
gradient of a row-wise layer's output in backward, as in FP8-LM (arXiv 2310.18313). Sums (the
row-wise output, the gradient of the column-wise input) stay in 16 bits, and so does a column-wise
output that a style gathers. Without sequence parallelism nothing is gathered, and only the GEMMs
run in FP8.

You can convert the model before or after. A layer that is not converted, or has
``communication="off"``, is parallelized as by torch's style. `torch_fp8.nn.dtensor_layout`
describes what each rank multiplies.
"""

from typing import Any, TypeGuard

from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from torch.distributed.tensor.placement_types import Placement

from torch_fp8.distributed.tensor_parallel.redistribute import reduce, refuse_gather, replicate
from torch_fp8.nn.linear import Float8Linear
from torch_fp8.nn.transformer_engine import NOT_SHARDED, TransformerEngineLinear
from torch_fp8.quantization.argument_types import check_arguments


class Float8ColwiseParallel(ColwiseParallel):
    """torch's ColwiseParallel, with an input that is gathered in FP8.

    Args:
        options: the arguments of torch's style: ``input_layouts``, ``output_layouts`` and
            ``use_local_output``.
        gather_in_backward: whether backward gathers the input again, so that only the rank's own
            part is kept: 1 / N of the memory for one more gather. By default the gathered input is
            kept in FP8, half of what torch's style keeps.
    Raises:
        ValueError: the recipe does not support an input gathered in FP8. The error comes from
            ``parallelize_module`` or ``convert_to_float8``, whichever you call later.
    """

    def __init__(self, *, gather_in_backward: bool = False, **options: Any) -> None:
        check_arguments(Float8ColwiseParallel.__init__, locals(), type(self).__name__)
        super().__init__(**options)
        self.gather_in_backward = gather_in_backward

    def _prepare_input_fn(
        self,
        input_layouts: Any,
        desired_input_layouts: Any,
        mod: nn.Module,
        inputs: Any,
        device_mesh: DeviceMesh,
    ) -> Any:
        if not _gathers(mod):
            prepare = ColwiseParallel._prepare_input_fn
            return prepare(input_layouts, desired_input_layouts, mod, inputs, device_mesh)
        layout, again = input_layouts[0], self.gather_in_backward
        return replicate(inputs[0], device_mesh, layout, mod, gather_again=again)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_style(module, self.input_layouts[0])
        return super()._apply(module, device_mesh)


class Float8RowwiseParallel(RowwiseParallel):
    """torch's RowwiseParallel; the gradient of a scattered output is gathered in FP8.

    It has the arguments of torch's style.
    """

    def _prepare_output_fn(
        self,
        output_layouts: Any,
        use_local_output: bool,
        mod: nn.Module,
        outputs: Any,
        device_mesh: DeviceMesh,
    ) -> Any:
        if isinstance(mod, Float8Linear) and mod.runs_fp8:
            if outputs.placements != output_layouts:
                if _gathers(mod):
                    outputs = reduce(outputs, output_layouts[0], mod)
                else:
                    outputs = outputs.redistribute(placements=output_layouts, async_op=True)
            if mod.bias is not None:
                outputs = outputs + mod.bias.to(outputs.dtype)
            output_layouts = outputs.placements
        finish = RowwiseParallel._prepare_output_fn
        return finish(output_layouts, use_local_output, mod, outputs, device_mesh)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_style(module, self.output_layouts[0])
        if isinstance(module, nn.Linear):
            module.fp8_adds_bias = False
        return super()._apply(module, device_mesh)


class PrepareFloat8ModuleInput(PrepareModuleInput):
    """torch's PrepareModuleInput; a sharded input that becomes replicated is gathered once, in FP8.

    Use it for a module whose column-wise layers share their input (q, k and v; gate and up); these
    layers then get a replicated input. The first of these layers determines the cast; other code
    that reads the input gets it rounded to FP8.

    Args:
        options: the arguments of torch's style: ``input_layouts``, ``desired_input_layouts``,
            ``input_kwarg_layouts``, ``desired_input_kwarg_layouts`` and ``use_local_output``.
        gather_in_backward: see `Float8ColwiseParallel`.
    """

    def __init__(self, *, gather_in_backward: bool = False, **options: Any) -> None:
        check_arguments(PrepareFloat8ModuleInput.__init__, locals(), type(self).__name__)
        super().__init__(**options)
        self.gather_in_backward = gather_in_backward
        self._module: Any = None

    def _prepare_input_arg(self, input: Any, mesh: Any, input_layout: Any, desired: Any) -> Any:
        consumer = _consumer(self._module) if isinstance(desired, Replicate) else None
        if input_layout is None or consumer is None:
            return super()._prepare_input_arg(input, mesh, input_layout, desired)
        again = self.gather_in_backward
        x = replicate(input, mesh, input_layout, consumer, gather_again=again)
        return x.to_local() if self.use_local_output else x

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def note(module: nn.Module, args: Any) -> None:
            self._module = module  # one style object may be used for many modules

        module.register_forward_pre_hook(note)
        return super()._apply(module, device_mesh)


def check_style(module: nn.Module, gathered: Placement | None = None) -> None:
    """Raise ValueError if a layer's style does not fit its recipe or backend.

    Args:
        module: the layer, converted or not; it remembers `gathered` for its conversion.
        gathered: the placement of the tensor that the style gathers, or None for that of an earlier
            call.
    """
    if gathered is not None:
        if isinstance(module, TransformerEngineLinear):
            raise ValueError(NOT_SHARDED)
        module.fp8_gathered = gathered
    layout = module.__dict__.get("fp8_gathered")
    if not isinstance(layout, Shard) or not isinstance(module, Float8Linear):
        return
    if module.fp8.config.communication != "off":
        refuse_gather(module.fp8.name, module.fp8.recipe, layout)


def gathers_features(module: nn.Module) -> bool:
    """Return whether a layer's style gathers features, which excludes scales that run along them.

    The style shows this only in part: dimension 1 is the features of a matrix, but the tokens of a
    batch.
    """
    layout = module.__dict__.get("fp8_gathered")
    return isinstance(layout, Shard) and layout.dim not in (0, 1)


def _gathers(module: nn.Module) -> TypeGuard[Float8Linear]:
    """Return whether a layer exchanges its activations in FP8."""
    if not isinstance(module, Float8Linear) or not module.runs_fp8:
        return False
    if module.fp8.recipe.bf16_forward:
        return False
    return module.fp8.config.communication != "off"


def _consumer(module: nn.Module) -> Float8Linear | None:
    """Return the first column-wise FP8 layer in `module`, or None if there is none."""
    consumers = [
        layer
        for layer in module.modules()
        if _gathers(layer) and isinstance(layer.weight, DTensor)
        if layer.weight.placements[-1].is_shard(0)
    ]
    casts = {str(layer.fp8.recipe.input): layer.fp8.name for layer in consumers}
    if len(casts) > 1:
        raise ValueError(
            f"FP8 layers {sorted(casts.values())} share an input that PrepareFloat8ModuleInput "
            f"casts once, but their recipes cast it differently ({', '.join(sorted(casts))}); "
            "convert them with one recipe, or use torch's PrepareModuleInput"
        )
    return consumers[0] if consumers else None
