"""Lossless merging of PEFT adapters into a base that is stored only in FP8.

`accelerate_fp8._register` installs these functions. Each takes the wrapped method as its first
argument, followed by the method's arguments. A merged weight is ``dequant(W8) + delta``, added in
float32 and rounded once to the dtype that the base had before it was frozen; FP8 would lose a small
delta. A merge-aware layer rounds to BF16, as its forward did. Unmerging restores the exact bytes,
however often it is done.
"""

import inspect
from typing import Any

import torch

from accelerate_fp8.trainer import warn_once
from torch_fp8.nn.frozen_storage import FrozenStorage, left_unread, plain_copy
from torch_fp8.nn.merge_aware import MergeAware
from torch_fp8.quantization.wording import counted
from torch_fp8.tensor.producer import own_parameters


def merge_exactly(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Extend a tuner layer's ``merge`` and ``unmerge``.

    Merging adds to the float32 values of the base's bytes, and unmerging restores the bytes.
    """
    base: Any = self.get_base_layer()
    name = getattr(self, "parameter_name", "weight")
    weight = getattr(base, name, None)
    if weight is not None:  # PEFT writes ``weight.data``, which has no version
        own_parameters(written=weight)
    if not (isinstance(base, FrozenStorage) and base.begin_merge(name)):
        original(self, *args, **kwargs)
        return
    try:
        original(self, *args, **kwargs)
    finally:
        values = torch.bfloat16 if isinstance(self, MergeAware) else None
        base.end_merge(bool(self.merged_adapters), name, values=values)


def unload_and_optionally_merge(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Extend ``BaseTuner._unload_and_optionally_merge``: forget the bases' bytes.

    A merge also thaws the layers without adapters, so that the model has the dtype of its base.
    """
    bound = inspect.signature(original).bind(self, *args, **kwargs)
    bound.apply_defaults()
    merges = bound.arguments.get("merge")
    modules: list[Any] = [m for m in self.model.modules() if isinstance(m, FrozenStorage)]
    held = [m for m in modules if m.fp8.frozen is not None]
    rounded = sum(len({*m.frozen_weights, *m.fp8.frozen.unmerged}) for m in held)
    unloaded = original(self, *args, **kwargs)
    for module in modules:
        module.forget_unmerged()
        if merges:
            module.thaw_weights()
    if merges and rounded:
        warn_once(
            f"FP8: {counted(rounded, 'merged weight')} carry the rounding of the FP8 base, a few "
            "percent of each value. To merge exactly, save the adapter (model.save_pretrained) "
            "and merge it into a base that is not prepared for FP8: "
            "PeftModel.from_pretrained(base, folder).merge_and_unload()"
        )
    return unloaded


def get_peft_model_state_dict(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Extend ``get_peft_model_state_dict``, which selects from the whole model's state.

    Frozen weights are dequantized to BF16 only if they are selected.
    """
    with left_unread(model):
        state = original(model, *args, **kwargs)
    return {name: plain_copy(value) for name, value in state.items()}
