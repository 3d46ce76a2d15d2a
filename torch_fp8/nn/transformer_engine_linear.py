"""`TransformerEngineLinear`: a `Float8Linear` whose GEMMs Transformer Engine runs.

Within it is a ``te.Linear`` that owns nothing: its parameters are this module's, handed over anew
in each forward, so that tying, ``requires_grad``, optimizers and ``assign=True`` stay what they
are. It stands outside ``named_modules`` and ``state_dict`` (checkpoints hold plain tensors, with no
``_extra_state``), and copies and pickles leave it behind; the next forward makes another.

Any number of tokens works: they are padded to a multiple of 16 with zeros, which add nothing to a
sum. Each forward enters ``te.autocast`` by itself. Delayed scaling wants more: when the outermost
``te.autocast`` ends, Transformer Engine moves on the amax histories of all layers, also of those
that have not run in it. So the modules above the layers enter it, too (`AutocastRegion`), and the
histories move once for a forward of the model. They move for an activation checkpoint's second
forward again, which takes the scales of the moment; ``te.checkpoint`` is what knows better.
"""

import contextlib
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torch_fp8.autograd.current_pass import is_transformed
from torch_fp8.nn.layer_fp8 import LayerFP8, check
from torch_fp8.nn.linear import Float8Linear
from torch_fp8.nn.transformer_engine import (
    NOT_SHARDED,
    alignment,
    load,
    native_recipe,
    read_scaling,
    write_scaling,
)
from torch_fp8.tensor.quantizer import autocast_dtype, output_dtype
from torch_fp8.tensor.split_weight import SplitWeight, stored
from torch_fp8.tensor.weight_half import half

_regions: list[Any] = [None]
"""Recipes of the `AutocastRegion`s that run, the innermost last. A layer that entered one of its
own within would be taken for the first of a forward, and move the gradients' histories."""


class Engine(NamedTuple):
    """A ``te.Linear``, and what its ``te.autocast`` takes; torch.compile traces no import."""

    linear: Any
    autocast: Any
    recipe: Any


class EngineFP8(LayerFP8):
    """`LayerFP8` of a layer whose GEMMs Transformer Engine runs.

    Attributes:
        engine: Transformer Engine's layer; None: the next forward makes one.
        pending_scaling: delayed scaling of a checkpoint, or of the module that this is a copy of,
            for the engine.
    """

    engine: Engine | None = None
    pending_scaling: tuple[Tensor, Tensor] | None = None

    def recorded(self) -> tuple[Tensor, Tensor] | None:
        """Return `scaling_state` of an engine that has run, or what waits for one."""
        if self.engine is None or not self.recipe.delayed:
            return self.pending_scaling
        return read_scaling(self.engine.linear) or self.pending_scaling

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {**state, "engine": None, "pending_scaling": self.recorded()}


class TransformerEngineLinear(Float8Linear, nn.Linear):
    """An ``nn.Linear`` whose fprop, dgrad and wgrad GEMMs run in Transformer Engine's FP8.

    Made by `torch_fp8.convert_to_float8` with ``FP8Config(backend="transformer-engine")``.

    Shapes: input (..., K), weight (N, K), output (..., N); K and N multiples of 16 (of 32 with
    ``mxfp8``), any number of tokens. The output has the dtype that `Float8Linear`'s has. Input,
    weight and bias of several dtypes, outside autocast, are multiplied in the input's if it has 16
    bits, else in the weight's.

    Raises:
        TypeError: an input that is not float32, bfloat16 or float16.
        ValueError: an input of another width, or a sharded one or a sharded weight.
    """

    fp8: EngineFP8
    _fp8_class = EngineFP8

    def forward(self, input: Tensor) -> Tensor:
        if not self.runs_fp8 or (not torch.compiler.is_compiling() and is_transformed()):
            return self._in_high_precision(input)
        if isinstance(input, DTensor) or isinstance(self.weight, DTensor):
            raise ValueError(f"FP8 linear '{self.fp8.name}' got a DTensor: {NOT_SHARDED}")
        check(self.fp8, input.shape, input.dtype, self.weight)
        rows = input.reshape(-1, self.in_features)  # (M, K)
        multiple, num_rows = alignment(self.fp8.recipe), rows.shape[0]
        padding = -num_rows % multiple if num_rows else multiple
        output = self._multiply(F.pad(rows, (0, 0, 0, padding)) if padding else rows)
        if padding:
            output = output[:num_rows]
        return output.reshape(*input.shape[:-1], self.out_features)

    def _multiply(self, rows: Tensor) -> Tensor:
        engine = self.fp8.engine or self._start_engine()
        parameters = engine.linear._parameters
        for name, mine in (("weight", self.weight), ("bias", self.bias)):
            if mine is not None:
                parameters[name] = half(mine) if isinstance(mine, SplitWeight) else mine
        entered = self.fp8.recipe.delayed and _regions[-1] is engine.recipe
        region = None if entered else engine.autocast(enabled=True, recipe=engine.recipe)
        # Transformer Engine takes several dtypes only under torch's autocast.
        device, widest = rows.device.type, torch.float32
        dtype = stored(self.weight).dtype if rows.dtype == widest else rows.dtype
        dtype = autocast_dtype(device) or dtype
        cast = torch.autocast(device, dtype, enabled=dtype != widest)
        with region or contextlib.nullcontext(), cast:
            output: Tensor = engine.linear(rows)
        return output.to(output_dtype(rows))

    @torch.compiler.disable
    def _start_engine(self) -> Engine:
        te, dtype = load(), self.weight.dtype
        options = {"bias": self.bias is not None, "params_dtype": dtype, "device": "meta"}
        linear = te.Linear(self.in_features, self.out_features, **options)
        recipe = native_recipe(self.fp8.config, self.fp8.recipe)
        self.fp8.engine = Engine(linear, te.autocast, recipe)
        if self.fp8.pending_scaling is not None:
            with torch.no_grad():  # its first forward makes what is to be written
                self._multiply(self.weight.new_zeros(alignment(self.fp8.recipe), self.in_features))
            write_scaling(linear, self.fp8.config, self.fp8.recipe, *self.fp8.pending_scaling)
            self.fp8.pending_scaling = None
        return self.fp8.engine

    @property
    def scaling_state(self) -> tuple[Tensor, Tensor]:
        """Delayed scaling's amaxes (3, H), the newest first, and last scales (2,)."""
        length = self.fp8.config.amax_history_len
        empty = torch.zeros(3, length, device="cpu"), torch.ones(2, device="cpu")
        return self.fp8.recorded() or empty

    def load_scaling_state(self, history: Tensor, last_scale: Tensor) -> None:
        """Go on from what `scaling_state` was."""
        self.fp8.engine = None
        self.fp8.pending_scaling = (history.clone(), last_scale.clone())

    def _apply(self, fn: Any, recurse: bool = True) -> "TransformerEngineLinear":
        device, recorded = self.weight.device, self.fp8.recorded()
        super()._apply(fn, recurse)
        if self.weight.device != device:  # what scales is on the old one
            self.fp8.engine, self.fp8.pending_scaling = None, recorded
        return self


class AutocastRegion:
    """``te.autocast`` around the forward of a module above layers with delayed scaling."""

    def __init__(self, module: nn.Module, layer: TransformerEngineLinear) -> None:
        self._recipe = layer.fp8.config, layer.fp8.recipe
        self._entered: list[contextlib.ExitStack] = []
        self._handles = (
            module.register_forward_pre_hook(self.enter),
            module.register_forward_hook(self.leave, always_call=True),
        )

    def enter(self, module: nn.Module, args: Any) -> None:
        recipe, stack = native_recipe(*self._recipe), contextlib.ExitStack()
        if _regions[-1] is not recipe:
            stack.enter_context(load().autocast(enabled=True, recipe=recipe))
        _regions.append(recipe)
        stack.callback(_regions.pop)
        self._entered.append(stack)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._entered:
            self._entered.pop().close()

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()


def place_regions(model: nn.Module) -> None:
    """Put an `AutocastRegion` around all modules above layers with delayed scaling, and only them.

    All, for a loop may call any of them; what is within another one changes nothing.
    """
    for module in model.modules():
        for hook in list(module._forward_pre_hooks.values()):
            region = getattr(hook, "__self__", None)
            if isinstance(region, AutocastRegion):
                region.remove()
        layers = (m for m in module.modules() if isinstance(m, TransformerEngineLinear))
        layer = next((m for m in layers if m.fp8.recipe.delayed), None)
        if layer is not None and layer is not module:
            AutocastRegion(module, layer)
