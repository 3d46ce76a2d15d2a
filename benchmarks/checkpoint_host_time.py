"""Host time of a Llama block in checkpoints of each kind; see `benchmarks.checkpoint_policies`.

    python -m benchmarks.checkpoint_host_time REPETITIONS

A process of its own, for the operators' implementations for CUDA run in it, on a driver that does
nothing. The last line of its output is JSON.
"""

import json
import sys
from collections.abc import Callable

from benchmarks.host_time import GROUPS, HEADS, HIDDEN, INNER, TOKENS, measure
from benchmarks.stub_driver import references, stub_driver

# isort: split
import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.activation_bytes import forward_of
from benchmarks.checkpoint_policies import CONTEXTS, RECIPES
from torch_fp8 import FP8Config

SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
}


def host_times(config: FP8Config, repetitions: int) -> dict[str, float]:
    """CPU microseconds of forward and backward, the least of all; without what raises."""
    runs: dict[str, Callable[[], None]] = {}
    for kind in ("none", *CONTEXTS):
        with references():
            _, _, run, x = forward_of(SIZES, config, TOKENS)
        options = {} if kind == "none" else {"use_reentrant": False}
        if CONTEXTS.get(kind) is not None:
            options["context_fn"] = CONTEXTS[kind]

        def step(run=run, x=x, options=options) -> None:
            y = checkpoint(run, x, **options) if options else run(x)
            y.backward(torch.ones_like(y))

        try:
            for _ in range(3):
                step()
        except RuntimeError:
            continue
        runs[kind] = step
    return {kind: min(times) for kind, times in measure(runs, repetitions).items()}


def main() -> None:
    torch.set_num_threads(1)
    with stub_driver():
        times = {r: host_times(FP8Config(recipe=r), int(sys.argv[1])) for r in RECIPES}
    print(json.dumps(times))


if __name__ == "__main__":
    main()
