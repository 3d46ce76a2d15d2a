"""NVIDIA's Transformer Engine as the backend of GEMMs: ``FP8Config(backend="transformer-engine")``.

The package is imported for that backend only. We use its documented interface (``te.Linear``,
``te.autocast``, the recipes, ``te.is_..._available``) and the two methods by which a ``te.Linear``
reads and writes its delayed scaling, as of release 2.20.2.

A `TransformerEngineLinear` contains a ``te.Linear`` that owns nothing. Each forward passes it this
module's parameters, so that tying, ``requires_grad``, optimizers and ``assign=True`` work as
before. It is not in ``named_modules`` or ``state_dict`` (checkpoints have plain tensors without
``_extra_state``). Copies and pickles do not include it; their next forward makes another one.

Any number of tokens works: they are padded to a multiple of 16 with zeros, which add nothing to a
sum. Each forward enters ``te.autocast`` by itself. With delayed scaling, Transformer Engine
advances the amax histories of all layers when the outermost ``te.autocast`` ends, even of layers
that did not run in it. So the modules above the layers enter it, too (`AutocastRegion`), and the
histories advance once per forward of the model. They also advance in the second forward of an
activation checkpoint, which uses the current scales; use ``te.checkpoint`` to avoid that.
"""

import contextlib
import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torch_fp8.autograd.current_pass import autocast_dtype, is_transformed, output_dtype
from torch_fp8.config import FP8Config
from torch_fp8.nn.layer_fp8 import LayerFP8, check_input
from torch_fp8.nn.linear import Float8Linear
from torch_fp8.quantization.formats import E5M2, GEMM_ALIGNMENT
from torch_fp8.quantization.recipe import Recipe
from torch_fp8.tensor.split_weight import SplitWeight, stored
from torch_fp8.tensor.weight_half import half

_ASKED = "FP8Config(backend='transformer-engine')"
_INSTALL = "pip install --no-build-isolation {}'transformer-engine[pytorch]>=2.20'"
NOT_SHARDED = (
    f"{_ASKED} runs on one device and under DDP; for weights sharded by FSDP or tensor parallelism "
    "Transformer Engine would keep a full FP8 copy from forward to backward. Leave backend out"
)
_NOT_LOADED = (ImportError, OSError, RuntimeError, AssertionError)  # missing, without CUDA, empty
RECIPES = {
    "tensorwise": ("is_fp8_available", "Float8CurrentScaling"),
    "delayed": ("is_fp8_available", "DelayedScaling"),
    "blockwise": ("is_fp8_block_scaling_available", "Float8BlockScaling"),
    "mxfp8": ("is_mxfp8_available", "MXFP8BlockScaling"),
}
"""Transformer Engine's recipes: the function that checks a card for it, and the recipe's class."""


def load() -> Any:
    """Import and return ``transformer_engine.pytorch``.

    Raises:
        ImportError: the package is not installed, cannot be loaded, or is older than 2.20.
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
    """Return the version of Transformer Engine."""
    import transformer_engine

    return str(transformer_engine.__version__)


def check_transformer_engine(device: torch.device, recipe_name: str) -> None:
    """Check that Transformer Engine is installed and can run the recipe on `device`.

    Raises:
        ImportError: see `load`.
        ValueError: `device` is not a CUDA device, or the card cannot run the recipe.
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
    """Raise ValueError if the backend is Transformer Engine; the caller has sharded weights."""
    if config.backend == "transformer-engine":
        raise ValueError(NOT_SHARDED)


def alignment(recipe: Recipe) -> int:
    """Return the multiple that token and feature counts must have."""
    return 32 if recipe.name == "mxfp8" else GEMM_ALIGNMENT  # whole blocks, or cuBLAS's alignment


def unaligned(module: nn.Linear, recipe: Recipe) -> str | None:
    """Return why Transformer Engine cannot run this layer, or None if it can."""
    multiple = alignment(recipe)
    if not isinstance(module, nn.Linear):
        return f"Transformer Engine does not support transposed weights ({type(module).__name__})"
    for dim in ("in_features", "out_features"):
        if getattr(module, dim) % multiple:
            return f"{dim}={getattr(module, dim)} is no multiple of {multiple} (Transformer Engine)"
    return None


@functools.cache
def native_recipe(config: FP8Config, recipe: Recipe) -> Any:
    """Return Transformer Engine's recipe object for one of ours; the result is cached.

    Each rank keeps its own amaxes of delayed scaling, as with our GEMMs, because its scales must
    come from its own activations.
    """
    from transformer_engine.common import recipe as recipes

    hybrid = recipe.grad_output.format == E5M2
    options = {"fp8_format": recipes.Format.HYBRID if hybrid else recipes.Format.E4M3}
    if recipe.name == "delayed":
        names = ("margin", "amax_history_len", "amax_compute_algo")
        options |= {name: getattr(config, name) for name in names} | {"reduce_amax": False}
    return getattr(recipes, RECIPES[recipe.name][1])(**options)


def read_scaling(linear: Any) -> tuple[Tensor, Tensor] | None:
    """Return amaxes (3, H) of input, weight and grad_output, newest first, and last scales (2,).

    Transformer Engine keeps histories (H, 3) of input, weight and output, and (H, 2) of grad_output
    and grad_input. Between steps row 0 is empty, and H - 1 amaxes follow from the oldest to the
    newest, because the update drops the oldest. Its scales are the reciprocals of ours. The result
    is None if the ``te.Linear`` has not run with delayed scaling.
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
    """Write a state of `read_scaling`, or of our own delayed scaling, after a first forward.

    Transformer Engine's scale comes from the amaxes before the last update. It is restored exactly,
    unless it depended on the one amax that this update dropped.
    """
    tensors = linear.get_fp8_meta_tensors()
    (forward_scale, forward), (backward_scale, backward) = tensors.values()
    history, last_scale = history.to(forward.device), last_scale.to(forward.device)
    past = history[:, : len(forward) - 1].flip(1).t()  # (3, H) -> (H - 1, 3), oldest first
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
"""Recipes of the active `AutocastRegion`s, the innermost last. If a layer entered its own one
inside, Transformer Engine would take it for a forward's first layer, and advance the gradients'
histories."""


class Engine(NamedTuple):
    """A ``te.Linear``, ``te.autocast`` and a recipe, because torch.compile traces no import."""

    linear: Any
    autocast: Any
    recipe: Any


class EngineFP8(LayerFP8):
    """The `LayerFP8` of a layer whose GEMMs run in Transformer Engine."""

    engine: Engine | None = None
    """Transformer Engine's layer, or None until the next forward makes one."""
    pending_scaling: tuple[Tensor, Tensor] | None = None
    """Delayed scaling's state from a checkpoint or a copied module, for the next engine."""

    def recorded(self) -> tuple[Tensor, Tensor] | None:
        """Return the state of delayed scaling: the engine's if it has run, else the pending one."""
        if self.engine is None or not self.recipe.delayed:
            return self.pending_scaling
        return read_scaling(self.engine.linear) or self.pending_scaling

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "engine": None, "pending_scaling": self.recorded()}


class TransformerEngineLinear(Float8Linear, nn.Linear):
    """An ``nn.Linear`` whose fprop, dgrad and wgrad GEMMs run in Transformer Engine's FP8.

    `torch_fp8.convert_to_float8` makes one for ``FP8Config(backend="transformer-engine")``.

    Shapes: input (..., K), weight (N, K), output (..., N); K and N multiples of 16 (of 32 with
    ``mxfp8``), any number of tokens. The dtype of the output is as in `Float8Linear`. Without
    autocast, if dtypes differ, the GEMM runs in the input's dtype if that has 16 bits, else in the
    weight's.

    Raises:
        TypeError: the input is not float32, bfloat16 or float16.
        ValueError: the last dimension of the input is not K, or input or weight is sharded.
    """

    fp8: EngineFP8
    _fp8_class = EngineFP8

    def forward(self, input: Tensor) -> Tensor:
        if not self.runs_fp8 or (not torch.compiler.is_compiling() and is_transformed()):
            return self._in_high_precision(input)
        if isinstance(input, DTensor) or isinstance(self.weight, DTensor):
            raise ValueError(f"FP8 linear '{self.fp8.name}' got a DTensor: {NOT_SHARDED}")
        check_input(self.fp8, input, self.weight)
        rows = input.reshape(-1, self.in_features)  # (M, K)
        multiple, num_rows = alignment(self.fp8.recipe), rows.shape[0]
        padding = -num_rows % multiple if num_rows else multiple
        output = self._multiply(F.pad(rows, (0, 0, 0, padding)) if padding else rows)
        if padding:
            output = output[:num_rows]
        return output.reshape(*input.shape[:-1], self.out_features)  # (M, N) -> (..., N)

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
            output = engine.linear(rows)
        return output.to(output_dtype(rows))

    @torch.compiler.disable
    def _start_engine(self) -> Engine:
        te, dtype = load(), self.weight.dtype
        options = {"bias": self.bias is not None, "params_dtype": dtype, "device": "meta"}
        linear = te.Linear(self.in_features, self.out_features, **options)
        recipe = native_recipe(self.fp8.config, self.fp8.recipe)
        self.fp8.engine = Engine(linear, te.autocast, recipe)
        if self.fp8.pending_scaling is not None:
            with torch.no_grad():  # the first forward allocates the state that is written below
                self._multiply(self.weight.new_zeros(alignment(self.fp8.recipe), self.in_features))
            write_scaling(linear, self.fp8.config, self.fp8.recipe, *self.fp8.pending_scaling)
            self.fp8.pending_scaling = None
        return self.fp8.engine

    @property
    def scaling_state(self) -> tuple[Tensor, Tensor]:
        """Amax history (3, H) of delayed scaling, newest first, and last scales (2,)."""
        length = self.fp8.config.amax_history_len
        on_cpu: Any = {"device": "cpu", "dtype": torch.float32}
        return self.fp8.recorded() or (torch.zeros(3, length, **on_cpu), torch.ones(2, **on_cpu))

    def load_scaling_state(self, history: Tensor, last_scale: Tensor) -> None:
        """Restore a `scaling_state` in the next engine."""
        self.fp8.engine = None
        self.fp8.pending_scaling = (history.clone(), last_scale.clone())

    def _apply(self, fn: Any, recurse: bool = True) -> "TransformerEngineLinear":
        device, recorded = self.weight.device, self.fp8.recorded()
        super()._apply(fn, recurse)
        if self.weight.device != device:  # the engine's scaling state is on the old device
            self.fp8.engine, self.fp8.pending_scaling = None, recorded
        return self


class AutocastRegion:
    """Hooks that enter ``te.autocast`` around the forward of a module above such layers."""

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
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def place_regions(model: nn.Module) -> None:
    """Put an `AutocastRegion` around each module above layers with delayed scaling, and no other.

    A loop may call any of them. A nested region has no effect.
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
