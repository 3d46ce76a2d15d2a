"""Held-out losses that a program computes by its host's own evaluation, for the record."""

from typing import Any

from torch_fp8_tools.compare.child import recorder, wrap


def extend_lightning(module: Any) -> None:
    """Record what Lightning's evaluation loop returns: a dictionary for each loader."""
    wrap(module._EvaluationLoop, "run", _run)


def _run(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    results = original(self, *args, **kwargs)
    if not self.trainer.sanity_checking:
        for values in results or ():
            recorder().evaluation(values)
    return results


def extend_trainer(module: Any) -> None:
    """Record what transformers' ``Trainer.evaluate`` returns."""
    wrap(module.Trainer, "evaluate", _evaluate)


def _evaluate(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    values = original(self, *args, **kwargs)
    recorder().evaluation(values)
    return values
