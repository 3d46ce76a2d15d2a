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
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torch_fp8.autograd.current_pass import is_transformed
from torch_fp8.config import FP8Config
from torch_fp8.nn.linear import Float8Linear
from torch_fp8.nn.transformer_engine import (
    NOT_SHARDED,
    DelayedState,
    Engine,
    alignment,
    load,
    make_engine,
    native_recipe,
)
from torch_fp8.quantization.recipe import Recipe
from torch_fp8.tensor.quantizer import output_dtype
from torch_fp8.tensor.split_weight import SplitWeight, stored
from torch_fp8.tensor.weight_half import half

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_region: ContextVar[Any] = ContextVar("_region", default=None)
"""The recipe of the `AutocastRegion` that runs. A layer that entered one of its own within would be
taken for the first of a forward, and have the gradients' histories move with it."""
_OWN = ("fp8_engine", "fp8_pending_scaling")


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

    fp8_engine: Engine | None = None
    fp8_pending_scaling: tuple[Tensor, Tensor] | None = None
    """Delayed scaling of a checkpoint or of the module that this is a copy of, for the engine."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.runs_fp8 or (not torch.compiler.is_compiling() and is_transformed()):
            return self._in_high_precision(input)
        self._check_operands(input)
        rows = input.reshape(-1, self.in_features)
        multiple, num_rows = alignment(self.fp8_recipe), rows.shape[0]
        padding = -num_rows % multiple if num_rows else multiple
        if padding:
            rows = F.pad(rows, (0, 0, 0, padding))
        output = self._multiply(rows)
        if padding:
            output = output[:num_rows]
        return output.reshape(*input.shape[:-1], self.out_features)

    @property
    def scaling_state(self) -> tuple[Tensor, Tensor]:
        """Delayed scaling's amaxes (3, H), the newest first, and last scales (2,)."""
        length = self.fp8_config.amax_history_len
        empty = torch.zeros(3, length, device="cpu"), torch.ones(2, device="cpu")
        return self._recorded() or self.fp8_pending_scaling or empty

    def load_scaling_state(self, history: Tensor, last_scale: Tensor) -> None:
        """Go on from what `scaling_state` was."""
        if self._recorded() is None:
            self.drop_scaling()
            self.fp8_pending_scaling = (history.clone(), last_scale.clone())
        else:
            self._delayed.write(history, last_scale)

    def init_scaling(self) -> None:
        """Do nothing: Transformer Engine makes what it needs in the first forward."""

    def drop_scaling(self) -> None:
        """Forget Transformer Engine's layer and its scaling."""
        for name in _OWN:
            self.__dict__.pop(name, None)

    def _current_engine(self) -> Engine:
        """The engine, with the parameters that this module has now."""
        engine = self.fp8_engine or self._start_engine()
        held = engine.linear._parameters
        for name in ("weight", "bias"):
            mine = getattr(self, name)
            if isinstance(mine, SplitWeight):
                mine = half(mine)
            if mine is not None and held[name] is not mine:
                held[name] = mine
        return engine

    @torch.compiler.disable
    def _start_engine(self) -> Engine:
        engine = self.fp8_engine = make_engine(self, self.fp8_config, self.fp8_recipe)
        if self.fp8_pending_scaling is not None:
            with torch.no_grad():  # its first forward makes what is to be written
                zeros = self.weight.new_zeros(alignment(self.fp8_recipe), self.in_features)
                self._multiply(zeros)
            self._delayed.write(*self.fp8_pending_scaling)
            del self.fp8_pending_scaling
        return engine

    def _multiply(self, rows: Tensor) -> Tensor:
        engine = self._current_engine()
        entered = self.fp8_recipe.delayed and _region.get() is engine.recipe
        region = None if entered else engine.autocast(enabled=True, recipe=engine.recipe)
        with region or contextlib.nullcontext(), self._in_one_dtype(rows):
            output: Tensor = engine.linear(rows)
        return output.to(output_dtype(rows))

    def _in_one_dtype(self, rows: Tensor) -> Any:
        """Transformer Engine takes several dtypes only under torch's autocast."""
        device_type = rows.device.type
        operands = (rows, stored(self.weight), self.bias)
        dtypes = {t.dtype for t in operands if t is not None}
        if len(dtypes) == 1 or torch.is_autocast_enabled(device_type):
            return contextlib.nullcontext()
        dtype = stored(self.weight).dtype if rows.dtype == torch.float32 else rows.dtype
        return torch.autocast(device_type, dtype)

    def _check_operands(self, x: Tensor) -> None:
        if isinstance(x, DTensor) or isinstance(self.weight, DTensor):
            raise ValueError(f"FP8 linear '{self.fp8_name}' got a DTensor: {NOT_SHARDED}")
        if x.dtype not in _DTYPES:
            raise TypeError(
                f"FP8 linear '{self.fp8_name}' takes float32, bfloat16 or float16 input, got "
                f"{x.dtype}; cast it, or name the layer in skip"
            )
        if x.shape[-1] != self.in_features:
            raise ValueError(
                f"FP8 linear '{self.fp8_name}' takes inputs (..., {self.in_features}), got "
                f"{tuple(x.shape)}"
            )

    @property
    def _delayed(self) -> DelayedState:
        assert self.fp8_engine is not None
        return DelayedState(self.fp8_engine, self.fp8_config, self.fp8_recipe)

    def _recorded(self) -> tuple[Tensor, Tensor] | None:
        """`scaling_state` of an engine that has run."""
        if self.fp8_engine is None or not self.fp8_recipe.delayed:
            return None
        return self._delayed.read()

    def _apply(self, fn: Any, recurse: bool = True) -> "TransformerEngineLinear":
        device, recorded = self.weight.device, self._recorded()
        super()._apply(fn, recurse)
        if self.weight.device != device:  # what scales is on the old one
            self.__dict__.pop("fp8_engine", None)
            if recorded is not None:
                self.fp8_pending_scaling = recorded
        return self

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        recorded = self._recorded()
        state.pop("fp8_engine", None)
        if recorded is not None:
            state["fp8_pending_scaling"] = recorded
        return state


class AutocastRegion:
    """``te.autocast`` around the forward of a module above layers with delayed scaling."""

    def __init__(self, module: nn.Module, config: FP8Config, recipe: Recipe) -> None:
        self._config, self._recipe = config, recipe
        self._entered: list[tuple[Any, Any]] = []
        self._handles = (
            module.register_forward_pre_hook(self.enter),
            module.register_forward_hook(self.leave, always_call=True),
        )

    def enter(self, module: nn.Module, args: Any) -> None:
        recipe, outer = native_recipe(self._config, self._recipe), _region.get()
        context: Any = contextlib.nullcontext()
        if outer is not recipe:
            context = load().autocast(enabled=True, recipe=recipe)
        context.__enter__()
        _region.set(recipe)
        self._entered.append((context, outer))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._entered:
            context, outer = self._entered.pop()
            _region.set(outer)
            context.__exit__(None, None, None)

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
        layer = next((m for m in module.modules() if _is_delayed(m)), None)
        if layer is not None and layer is not module:
            AutocastRegion(module, layer.fp8_config, layer.fp8_recipe)


def _is_delayed(module: nn.Module) -> Any:
    return isinstance(module, TransformerEngineLinear) and module.fp8_recipe.delayed
