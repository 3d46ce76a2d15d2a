"""NVIDIA's Transformer Engine as what runs the GEMMs: ``FP8Config(backend="transformer-engine")``.

It is imported only for that backend. We use its documented interface (``te.Linear``,
``te.autocast``, the recipes, ``te.is_..._available``) and the two methods by which a ``te.Linear``
reads and writes its delayed scaling. ``pytest -m transformer_engine`` runs all of it on the Python
sources of 2.20.2. `torch_fp8.nn.transformer_engine_linear` has the layer.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_fp8.config import FP8Config
from torch_fp8.quantization.formats import E5M2, GEMM_ALIGNMENT
from torch_fp8.quantization.recipe import Recipe

_ASKED = "FP8Config(backend='transformer-engine')"
_INSTALL = "pip install --no-build-isolation {}'transformer-engine[pytorch]>=2.20'"
NOT_SHARDED = (
    f"{_ASKED} runs on one device and under DDP; of weights sharded by FSDP or tensor parallelism "
    "Transformer Engine would keep a whole FP8 copy from forward to backward. Leave backend out"
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
            f"{_ASKED} runs on CUDA devices alone; this one is {device.type!r}{missing}. Leave "
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
    maxima = torch.tensor([spec.format.max for spec in specs], device=forward.device)
    start = torch.cat([last_scale.reciprocal(), torch.ones_like(last_scale[:1])])
    # Transformer Engine's own rule: an amax of 0 leaves the scale as it was.
    scale = torch.where(recorded.any(1), maxima / amax / 2**config.margin, start)
    forward_scale[:2], backward_scale[:1] = scale[:2], scale[2:]
    linear.reset_fp8_meta_tensors(tensors)
