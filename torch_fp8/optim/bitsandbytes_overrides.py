"""Keep bitsandbytes' per-weight options when its optimizer steps float32 copies of the weights.

``GlobalOptimManager`` finds these options by ``id(weight)``, or by the weight's position in its
group once the optimizer has looked it up. A copy has another id, so embeddings for which
transformers requests 32-bit states would get 8-bit states.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer


@contextlib.contextmanager
def placed_overrides(optimizer: Optimizer) -> Iterator[None]:
    """Register bitsandbytes' per-weight options by position; no-op for other optimizers."""
    manager: Any = getattr(optimizer, "mng", None)
    if not hasattr(manager, "pid2config") or not hasattr(optimizer, "check_overrides"):
        yield
        return
    if not getattr(optimizer, "initialized", True):
        optimizer.check_overrides()  # overrides of modules, which the first step looks up by weight
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
