"""The choice of the FP8 backend: this engine, unless the user chose torchao, Transformer Engine or
MS-AMP.

As in Accelerate, users choose another backend by ``--fp8_backend``, by ``fp8_config.backend`` in a
config file (both arrive as ``ACCELERATE_FP8_BACKEND``), or by a recipe handler.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from accelerate_fp8._register import BACKEND_VARIABLE, ENGINE

_THEIRS = ("AO", "TE", "MSAMP")

PRECISION_KEPT: ContextVar[bool] = ContextVar("precision_kept", default=False)
"""Whether an Accelerator with this engine is being constructed. AcceleratorState then does not
replace FP8 with FP16 on a GPU below sm_89: the engine refuses such a card by name, or emulates FP8
if that was requested.
"""
SAMPLES: ContextVar[bool] = ContextVar("samples", default=False)
"""Whether a trainer that samples rollouts is being constructed: ``auto`` means rowwise for it."""


def requested_precision(mixed_precision: object) -> str:
    """Return the precision that ``Accelerator(mixed_precision=...)`` will have."""
    from accelerate.state import AcceleratorState, is_initialized

    if mixed_precision is None and is_initialized():
        mixed_precision = AcceleratorState().mixed_precision
    return str(mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")).lower()


def repair_backend_variable() -> None:
    """Rewrite ``ACCELERATE_FP8_BACKEND`` to a form that Accelerate can read.

    ``accelerate launch --fp8_backend ao`` exports "ao", and Accelerate 1.15 then fails with "'ao'
    is not a valid FP8BackendType", because its enum has "AO", as config files do.
    """
    backend = os.environ.get(BACKEND_VARIABLE, "")
    if backend.upper() in _THEIRS:
        os.environ[BACKEND_VARIABLE] = backend.upper()


def is_engine_chosen(handlers: Iterable[object], explicit: bool) -> bool:
    """Return whether FP8 means this engine.

    Args:
        handlers: the ``kwargs_handlers`` without `FP8Kwargs`.
        explicit: whether an `FP8Kwargs` was given.
    Raises:
        ValueError: `explicit` is set and another backend was chosen, too.
    """
    from accelerate.utils import AORecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs

    recipes = AORecipeKwargs, TERecipeKwargs, MSAMPRecipeKwargs  # FP8RecipeKwargs is of two
    others = [type(handler).__name__ for handler in handlers if isinstance(handler, recipes)]
    backend = os.environ.get(BACKEND_VARIABLE, "").upper()
    if backend not in ("", "NO", ENGINE):
        others.append(f"--fp8_backend {backend.lower()} ({BACKEND_VARIABLE})")
    if others and explicit:
        raise ValueError(
            f"FP8Kwargs chooses the engine torch_fp8, but {others[0]} was given too; leave one out"
        )
    return not others


@contextlib.contextmanager
def holding(variable: ContextVar[bool], value: bool = True) -> Iterator[None]:
    """Set a context variable in this context."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def refuse_unsupported(arguments: dict[str, Any]) -> None:
    """Raise ValueError for a distribution strategy that this engine does not support.

    Args:
        arguments: the arguments of ``Accelerator.__init__``, by name.
    """
    from accelerate.state import AcceleratorState, is_initialized

    running = str(AcceleratorState().distributed_type) if is_initialized() else ""
    for name, variable, keys in (
        ("DeepSpeed", "ACCELERATE_USE_DEEPSPEED", ("deepspeed_plugin", "deepspeed_plugins")),
        ("Megatron-LM", "ACCELERATE_USE_MEGATRON_LM", ("megatron_lm_plugin",)),
    ):
        asked = os.environ.get(variable, "false").lower() == "true"
        asked = asked or any(arguments.get(key) is not None for key in keys)
        if asked or running.endswith(name.upper().replace("-", "_")):
            raise ValueError(
                f"mixed_precision='fp8' with the engine torch_fp8 does not run under {name}, which "
                "owns the model's GEMMs or parameters; it runs on a single device, under DDP and "
                "under FSDP. Use one of these, or --mixed_precision bf16, or another FP8 backend "
                "(--fp8_backend ao or te)"
            )


def refuse_tensor_parallel(parallelism_config: Any) -> None:
    """Raise ValueError if weights are sharded across a tensor-parallel group."""
    if parallelism_config is not None and parallelism_config.tp_enabled:
        raise ValueError(
            "mixed_precision='fp8' with the engine torch_fp8 does not support tensor parallelism "
            f"yet (tp_size={parallelism_config.tp_size}); set tp_size=1 in ParallelismConfig or in "
            "from_pretrained(distributed_config=...), use --mixed_precision bf16, or write your "
            "own training loop with the parallel styles in torch_fp8.distributed"
        )
