"""transformers' ``generate`` for models with FP8 layers, with or without a host."""

from typing import Any

from torch_fp8.nn.rollout import rollout


def generate(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Extend ``GenerationMixin.generate``: run it in a `torch_fp8.rollout` context."""
    with rollout(self):
        return original(self, *args, **kwargs)
