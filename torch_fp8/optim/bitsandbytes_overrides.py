"""Options that bitsandbytes' optimizers have for single weights, where copies step in their place.

``GlobalOptimManager`` finds them by the id of a weight's object, and by its place in a group if
somebody has looked for it there. A copy has another id, and so embeddings for which transformers
asks 32-bit states would get 8-bit ones.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer


@contextlib.contextmanager
def placed_overrides(optimizer: Optimizer) -> Iterator[None]:
    """Let bitsandbytes find by their places what it has for weights; nothing for any other."""
    manager: Any = getattr(optimizer, "mng", None)
    if not hasattr(manager, "pid2config") or not hasattr(optimizer, "check_overrides"):
        yield
        return
    if not getattr(optimizer, "initialized", True):
        optimizer.check_overrides()  # of modules, which its first step looks up by the weight
    by_place = manager.index2config
    manager.index2config = dict(by_place)
    for i, group in enumerate(optimizer.param_groups):
        for j, parameter in enumerate(group["params"]):
            if id(parameter) in manager.pid2config:
                options = manager.pid2config[id(parameter)]
                manager.index2config[i, j] = {**by_place.get((i, j), {}), **options}
    try:
        yield
    finally:
        manager.index2config = by_place
