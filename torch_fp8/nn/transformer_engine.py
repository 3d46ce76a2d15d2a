"""NVIDIA's Transformer Engine as what runs the GEMMs: ``FP8Config(backend="transformer-engine")``.

It is imported only for that backend. We use its documented interface (``te.Linear``,
``te.autocast``, the recipes, ``te.is_..._available``) and the two methods by which a ``te.Linear``
reads and writes its delayed scaling. ``pytest -m transformer_engine`` runs all of it on the Python
sources of 2.20.2.

Within a `TransformerEngineLinear` is a ``te.Linear`` that owns nothing: its parameters are this
module's, handed over anew in each forward, so that tying, ``requires_grad``, optimizers and
``assign=True`` stay what they are. It stands outside ``named_modules`` and ``state_dict``
(checkpoints hold plain tensors, with no ``_extra_state``), and copies and pickles leave it behind;
the next forward makes another.

Any number of tokens works: they are padded to a multiple of 16 with zeros, which add nothing to a
sum. Each forward enters ``te.autocast`` by itself. Delayed scaling wants more: when the outermost
``te.autocast`` ends, Transformer Engine moves on the amax histories of all layers, also of those
that have not run in it. So the modules above the layers enter it, too (`AutocastRegion`), and the
histories move once for a forward of the model. They move for an activation checkpoint's second
forward again, which takes the scales of the moment; ``te.checkpoint`` is what knows better.
"""

import contextlib
import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torch_fp8.autograd.current_pass import is_transformed
from torch_fp8.config import FP8Config
from torch_fp8.nn.layer_fp8 import LayerFP8, check
from torch_fp8.nn.linear import Float8Linear
from torch_fp8.quantization.formats import E5M2, GEMM_ALIGNMENT
from torch_fp8.quantization.recipe import Recipe
from torch_fp8.tensor.quantizer import autocast_dtype, output_dtype
from torch_fp8.tensor.split_weight import SplitWeight, stored
from torch_fp8.tensor.weight_half import half

_ASKED = "FP8Config(backend='transformer-engine')"
_INSTALL = "pip install --no-build-isolation {}'transformer-engine[pytorch]>=2.20'"
NOT_SHARDED = (
    f"{_ASKED} runs on one device and under DDP; for weights sharded by FSDP or tensor parallelism "
    "Transformer Engine would keep a full FP8 copy from forward to backward. Leave backend out"
)
# Not installed; a library of CUDA is missing; only the empty meta package; versions that differ.
_NOT_LOADED = (ImportError, OSError, RuntimeError, AssertionError)
RECIPES = {
    "tensorwise": ("is_fp8_available", "Float8CurrentScaling"),
    "delayed": ("is_fp8_available", "DelayedScaling"),
    "blockwise": ("is_fp8_block_scaling_available", "Float8BlockScaling"),
    "mxfp8": ("is_mxfp8_available", "MXFP8BlockScaling"),
}
"""Recipes that Transformer Engine has: the question whether a card runs each, and its class."""


def load() -> Any:
    """The package ``transformer_engine.pytorch``.

    Raises:
        ImportError: it is not installed, cannot be loaded, or is older than 2.20.
    """
    try:
        import transformer_engine.pytorch as te
    except _NOT_LOADED as error:
        raise ImportError(
            f"{_ASKED} needs the package transformer-engine, which could not be imported "
            f"({error}): {_INSTALL.format('')} on a machine with CUDA, or leave backend out"
        ) from error
    if not hasattr(te, "autocast"):
        raise ImportError(
            f"{_ASKED} needs transformer-engine 2.20 or newer, this is {version()}: "
            f"{_INSTALL.format('--upgrade ')}"
        )
    return te


def version() -> str:
    """Return the version of the package."""
    import transformer_engine

    return str(transformer_engine.__version__)


def check_transformer_engine(device: torch.device, recipe_name: str) -> None:
    """Check that Transformer Engine is there and runs the recipe on `device`.

    Raises:
        ImportError: see `load`.
        ValueError: a device that is not CUDA's, or a card that cannot run the recipe.
    """
    te = load()
    if not _is_cuda(device):
        missing = ", and torch finds none" if device.type == "cuda" else ""
        raise ValueError(
            f"{_ASKED} runs on CUDA devices only; this one is {device.type!r}{missing}. Leave "
            "backend out to run torch's GEMMs, on the CPU in emulation"
        )
    available, reason = getattr(te, RECIPES[recipe_name][0])(return_reason=True)
    if not available:
        raise ValueError(
            f"recipe {recipe_name!r} does not run in Transformer Engine here: "
            f"{reason.rstrip('.')}. Choose another recipe, or BF16 mixed precision"
        )


def _is_cuda(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_available()


def refuse_sharding(config: FP8Config) -> None:
    """Raise ValueError if Transformer Engine is asked for; weights are sharded."""
    if config.backend == "transformer-engine":
        raise ValueError(NOT_SHARDED)


def alignment(recipe: Recipe) -> int:
    """What tokens, input features and output features have to be multiples of."""
    return 32 if recipe.name == "mxfp8" else GEMM_ALIGNMENT  # whole blocks, or what cuBLAS takes


def unaligned(module: nn.Linear, recipe: Recipe) -> str | None:
    """Why Transformer Engine cannot run this layer; None: it can."""
    multiple = alignment(recipe)
    if not isinstance(module, nn.Linear):
        return f"Transformer Engine does not support transposed weights ({type(module).__name__})"
    for dim in ("in_features", "out_features"):
        if getattr(module, dim) % multiple:
            return f"{dim}={getattr(module, dim)} is no multiple of {multiple} (Transformer Engine)"
    return None


@functools.cache
def native_recipe(config: FP8Config, recipe: Recipe) -> Any:
    """Transformer Engine's recipe object for ours; the same one each time.

    Amaxes of delayed scaling stay with their rank, as with our own GEMMs: another rank's scale
    would come from activations that are not this one's.
    """
    from transformer_engine.common import recipe as recipes

    hybrid = recipe.grad_output.format == E5M2
    options = {"fp8_format": recipes.Format.HYBRID if hybrid else recipes.Format.E4M3}
    if recipe.name == "delayed":
        names = ("margin", "amax_history_len", "amax_compute_algo")
        options |= {name: getattr(config, name) for name in names} | {"reduce_amax": False}
    return getattr(recipes, RECIPES[recipe.name][1])(**options)


def read_scaling(linear: Any) -> tuple[Tensor, Tensor] | None:
    """Amaxes (3, H) of a ``te.Linear``'s input, weight and grad_output, the newest first; last
    scales (2,). None if it has not run with delayed scaling.

    Transformer Engine keeps histories (H, 3) of input, weight and output, and (H, 2) of grad_output
    and grad_input. Between steps row 0 is empty, and the amaxes follow from the oldest to the
    newest: H - 1 of them, for the update drops the oldest. Its scales multiply where ours divide.
    """
    tensors = linear.get_fp8_meta_tensors()
    if tensors is None:
        return None
    (scale, forward), (_, backward) = tensors["scaling_fwd"], tensors["scaling_bwd"]
    past = torch.cat([forward[1:, :2], backward[1:, :1]], dim=1)  # (H - 1, 3)
    return F.pad(past.flip(0).t(), (0, 1)), scale[:2].reciprocal()


def write_scaling(
    linear: Any, config: FP8Config, recipe: Recipe, history: Tensor, last_scale: Tensor
) -> None:
    """Take over what `read_scaling` returned, of this or of our own GEMMs, after a first forward.

    Transformer Engine's scale is of the amaxes before the last update. It is exact again except
    where it hung on the one amax that this update has dropped.
    """
    tensors = linear.get_fp8_meta_tensors()
    (forward_scale, forward), (backward_scale, backward) = tensors.values()
    history, last_scale = history.to(forward.device), last_scale.to(forward.device)
    past = history[:, : len(forward) - 1].flip(1).t()
    forward[1:, :2], backward[1:, :1] = past[:, :2], past[:, 2:]
    recorded = (history > 0) & history.isfinite()
    amax = torch.where(recorded, history, 0).amax(1)
    if config.amax_compute_algo == "most_recent":
        amax = history.gather(1, recorded.int().argmax(1, keepdim=True))[:, 0]
    specs = (recipe.input, recipe.weight, recipe.grad_output)
    maxima = forward.new_tensor([spec.format.max for spec in specs], dtype=torch.float32)
    start = torch.cat([last_scale.reciprocal(), torch.ones_like(last_scale[:1])])
    # Transformer Engine's own rule: an amax of 0 leaves the scale as it was.
    scale = torch.where(recorded.any(1), maxima / amax / 2**config.margin, start)
    forward_scale[:2], backward_scale[:1] = scale[:2], scale[2:]
    linear.reset_fp8_meta_tensors(tensors)


_regions: list[Any] = [None]
"""Recipes of the `AutocastRegion`s that run, the innermost last. A layer that entered one of its
own within would be taken for the first of a forward, and move the gradients' histories."""


class Engine(NamedTuple):
    """A ``te.Linear``, and what its ``te.autocast`` takes; torch.compile traces no import."""

    linear: Any
    autocast: Any
    recipe: Any


class EngineFP8(LayerFP8):
    """`LayerFP8` of a layer whose GEMMs Transformer Engine runs."""

    engine: Engine | None = None
    """Transformer Engine's layer; None: the next forward makes one."""
    pending_scaling: tuple[Tensor, Tensor] | None = None
    """Delayed scaling of a checkpoint, or of the module that this is a copy of, for the engine."""

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
        on_cpu: Any = {"device": "cpu", "dtype": torch.float32}
        return self.fp8.recorded() or (torch.zeros(3, length, **on_cpu), torch.ones(2, **on_cpu))

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
