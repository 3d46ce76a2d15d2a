"""transformers' ``generate`` for models with FP8 layers, under any host and none."""

from typing import Any

from torch_fp8.nn.rollout import rollout


def generate(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Extend ``GenerationMixin.generate``: nobody writes to a weight within."""
    with rollout(self):
        return original(self, *args, **kwargs)
