"""PEFT's layers over a base that is stored as FP8 alone: merging loses nothing.

Put in place by `accelerate_fp8._register`. Each function takes the method that it wraps as its
first argument, then the method's own. A merged weight is ``dequant(W8) + delta``, added up in
float32 and rounded to BF16 once; to FP8 a small delta would be lost. Unmerging gives back the very
bytes, however often.
"""

import inspect
from typing import Any

from accelerate_fp8.export import bound_arguments
from accelerate_fp8.trainer import warn_once
from torch_fp8.nn.frozen_storage import FrozenStorage, left_unread, plain_copy
from torch_fp8.quantization.wording import counted


def merge(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Extend a tuner layer's ``merge``: add to the float32 values of the base's bytes."""
    _within(original, self, *args, **kwargs)


def unmerge(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Extend a tuner layer's ``unmerge``: give the base its bytes back."""
    _within(original, self, *args, **kwargs)


def unload(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Extend ``BaseTuner._unload_and_optionally_merge``: nobody will unmerge the bases again."""
    merges = bound_arguments(inspect.signature(original), self, *args, **kwargs).get("merge")
    modules: list[Any] = [m for m in self.model.modules() if isinstance(m, FrozenStorage)]
    held = [m for m in modules if m.fp8.frozen is not None]
    rounded = sum(len({*m.frozen_weights, *m.fp8.frozen.unmerged}) for m in held)
    unloaded = original(self, *args, **kwargs)
    for module in modules:
        module.forget_unmerged()
    if merges and rounded:
        warn_once(
            f"FP8: {counted(rounded, 'merged weight')} carry the rounding of the FP8 base, a few "
            "percent of each value: to merge into the exact base, save the adapter, load the base "
            "without FP8 and merge there"
        )
    return unloaded


def adapter_state(original: Any, model: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Extend ``get_peft_model_state_dict``, which takes the state of the whole model to choose
    from: frozen weights are made BF16 only if they are chosen.
    """
    with left_unread(model):
        state = original(model, *args, **kwargs)
    return {name: plain_copy(value) for name, value in state.items()}


def _within(original: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
    base: Any = layer.get_base_layer()
    name = getattr(layer, "parameter_name", "weight")
    if not (isinstance(base, FrozenStorage) and base.begin_merge(name)):
        original(layer, *args, **kwargs)
        return
    try:
        original(layer, *args, **kwargs)
    finally:
        base.end_merge(bool(layer.merged_adapters), name)
