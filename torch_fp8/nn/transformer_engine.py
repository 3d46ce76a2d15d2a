"""NVIDIA's Transformer Engine as what runs the GEMMs: ``FP8Config(backend="transformer-engine")``.

The only module that imports it, and only when it is asked for. What is used is its documented
interface: ``te.Linear``, ``te.autocast``, the recipes of ``transformer_engine.common.recipe`` and
``te.is_..._available``; and the two methods with which a ``te.Linear`` reads and writes its delayed
scaling, ``get_fp8_meta_tensors`` and ``reset_fp8_meta_tensors``. The tests compare each of them
with what they were written against (2.20.2).

`torch_fp8.nn.transformer_engine_linear` has the layer.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_fp8.config import FP8Config
from torch_fp8.quantization.formats import E5M2, GEMM_ALIGNMENT
from torch_fp8.quantization.recipe import Recipe

EXTRA = "torch-fp8[transformer-engine]"
NOT_SHARDED = (
    "FP8Config(backend='transformer-engine') runs on one device and under DDP; of weights sharded "
    "by FSDP or tensor parallelism Transformer Engine would keep a whole FP8 copy from forward to "
    "backward. Leave backend out"
)
# Not installed; a library of CUDA is missing; only the empty meta package; versions that differ.
_NOT_LOADED = (ImportError, OSError, RuntimeError, AssertionError)
# Of tokens, and of the features of a layer: what cuBLAS takes, and with MX scales whole blocks.
_ALIGNMENT_OF_MXFP8 = 32
_AVAILABLE = {
    "tensorwise": "is_fp8_available",
    "delayed": "is_fp8_available",
    "blockwise": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
}


def load() -> Any:
    """The package ``transformer_engine.pytorch``.

    Raises:
        ImportError: it is not installed, cannot be loaded, or is older than 2.20.
    """
    try:
        import transformer_engine.pytorch as te
    except _NOT_LOADED as error:
        raise ImportError(
            "FP8Config(backend='transformer-engine') needs the package transformer-engine, which "
            f"could not be imported ({error}): pip install --no-build-isolation '{EXTRA}' on a "
            "machine with CUDA, or leave backend out"
        ) from error
    if not hasattr(te, "autocast"):
        raise ImportError(
            f"FP8Config(backend='transformer-engine') needs transformer-engine 2.20 or newer, this "
            f"is {version()}: pip install --no-build-isolation --upgrade '{EXTRA}'"
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
        raise ValueError(
            "FP8Config(backend='transformer-engine') runs on CUDA devices alone; this one is "
            f"{device.type!r}{'' if device.type != 'cuda' else ', and torch finds none'}. Leave "
            "backend out to run torch's GEMMs, on the CPU in emulation"
        )
    available, reason = getattr(te, _AVAILABLE[recipe_name])(return_reason=True)
    if not available:
        raise ValueError(
            f"recipe {recipe_name!r} does not run in Transformer Engine here: "
            f"{reason.rstrip('.')}. Choose another recipe, or BF16 mixed precision"
        )


def refuse_sharding(config: FP8Config) -> None:
    """Raise ValueError if Transformer Engine is asked for; weights are sharded."""
    if config.backend == "transformer-engine":
        raise ValueError(NOT_SHARDED)


def _is_cuda(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_available()


def runs_recipe(recipe_name: str) -> bool:
    """Whether Transformer Engine has a recipe of this kind; it has none with a scale per row."""
    return recipe_name in _AVAILABLE


def alignment(recipe: Recipe) -> int:
    """What tokens, input features and output features have to be multiples of."""
    return _ALIGNMENT_OF_MXFP8 if recipe.name == "mxfp8" else GEMM_ALIGNMENT


def unaligned(module: nn.Linear, recipe: Recipe) -> str | None:
    """Why Transformer Engine cannot run this layer; None: it can."""
    multiple = alignment(recipe)
    if not isinstance(module, nn.Linear):
        return f"Transformer Engine takes no transposed weight ({type(module).__name__})"
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
    fp8_format = recipes.Format.HYBRID if hybrid else recipes.Format.E4M3
    if recipe.name == "delayed":
        return recipes.DelayedScaling(
            margin=config.margin,
            fp8_format=fp8_format,
            amax_history_len=config.amax_history_len,
            amax_compute_algo=config.amax_compute_algo,
            reduce_amax=False,
        )
    native = {
        "tensorwise": recipes.Float8CurrentScaling,
        "blockwise": recipes.Float8BlockScaling,
        "mxfp8": recipes.MXFP8BlockScaling,
    }
    return native[recipe.name](fp8_format=fp8_format)


class Engine(NamedTuple):
    """What runs one layer: a ``te.Linear``, and the class and the recipe of its ``te.autocast``.

    At hand as they are: torch.compile traces no import and no making of a recipe.
    """

    linear: Any
    autocast: Any
    recipe: Any


def make_engine(module: nn.Linear, config: FP8Config, recipe: Recipe) -> Engine:
    """An `Engine` like `module`, without storage of its own: its parameters are to be given."""
    te = load()
    linear = te.Linear(
        module.in_features,
        module.out_features,
        bias=module.bias is not None,
        params_dtype=module.weight.dtype,
        device="meta",
    )
    return Engine(linear, te.autocast, native_recipe(config, recipe))


class DelayedState:
    """The delayed scaling of a ``te.Linear``, as `torch_fp8.quantization.scaling` has it.

    Transformer Engine keeps histories (H, 3) of input, weight and output, and (H, 2) of grad_output
    and grad_input. Between steps row 0 is empty, and the amaxes follow from the oldest to the
    newest: H - 1 of them, for the update drops the oldest. Its scales multiply where ours divide.
    """

    def __init__(self, engine: Engine, config: FP8Config, recipe: Recipe) -> None:
        self._linear, self._config = engine.linear, config
        self._maxima = [
            spec.format.max for spec in (recipe.input, recipe.weight, recipe.grad_output)
        ]

    def read(self) -> tuple[Tensor, Tensor] | None:
        """Amaxes (3, H) of input, weight, grad_output, the newest first; last scales (2,).

        None if the layer has not run yet.
        """
        tensors = self._linear.get_fp8_meta_tensors()
        if tensors is None:
            return None
        (forward_scale, forward), (_, backward) = tensors["scaling_fwd"], tensors["scaling_bwd"]
        past = torch.cat([forward[1:, :2], backward[1:, :1]], dim=1).flip(0)
        history = torch.zeros(3, len(forward), device=past.device)
        history[:, :-1] = past.t()
        return history, forward_scale[:2].reciprocal()

    def write(self, history: Tensor, last_scale: Tensor) -> None:
        """Take over what `read` returned, of this or of our own GEMMs; the layer has run before.

        Transformer Engine's scale is of the amaxes before the last update. It is exact again except
        where it hung on the one amax that this update has dropped.
        """
        tensors = self._linear.get_fp8_meta_tensors()
        (forward_scale, forward), (backward_scale, backward) = (
            tensors["scaling_fwd"],
            tensors["scaling_bwd"],
        )
        history, last_scale = history.to(forward.device), last_scale.to(forward.device)
        past = history[:, : len(forward) - 1].flip(1).t()
        forward.zero_()
        backward.zero_()
        forward[1:, :2], backward[1:, :1] = past[:, :2], past[:, 2:]
        unused = torch.ones(1, device=forward.device)
        start = torch.cat([last_scale.reciprocal(), unused])
        each = zip(history, start, self._maxima, strict=True)
        scale = torch.stack([self._scale(*one) for one in each])
        forward_scale[:2], backward_scale[:1] = scale[:2], scale[2:]
        self._linear.reset_fp8_meta_tensors(
            {"scaling_fwd": [forward_scale, forward], "scaling_bwd": [backward_scale, backward]}
        )

    def _scale(self, history: Tensor, start: Tensor, maximum: float) -> Tensor:
        """Compute a tensor's scale by Transformer Engine's rule: an amax of 0 leaves it as it
        was.
        """
        recorded = history[(history > 0) & history.isfinite()]
        if not len(recorded):
            return start
        latest = self._config.amax_compute_algo == "most_recent"
        amax = recorded[0] if latest else recorded.max()
        return (maximum / amax) / 2**self._config.margin
