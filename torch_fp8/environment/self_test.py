"""The checks of ``torch-fp8 env --self-test``."""

from collections.abc import Callable, Iterator, Sequence

import torch

from torch_fp8.environment import host_steps, kernel_checks
from torch_fp8.environment.check import ALONE, EVERY_CARD, Check
from torch_fp8.quantization.recipe import RECIPES

_HERE = __name__.rpartition(".")[0]
_OF_EACH_RECIPE = {
    "eager": "check_gemms",
    "compiled": "check_compiled",
    "few tokens": "check_few_tokens",
}


def self_test(only: Sequence[str] | None = None) -> list[Check]:
    """Return all checks, or those of the named parts."""
    return [check for part, checks in _PARTS.items() if part in (only or _PARTS)
            for check in checks()]  # fmt: skip


def _kernels() -> Iterator[Check]:
    why_not = kernel_checks.missing()
    for process, checks in kernel_checks.CHECKS.items():
        for name, (function, arguments) in checks.items():
            yield Check(
                "kernels",
                name,
                f"{_HERE}.kernel_checks:{function}",
                ("cuda", *arguments),
                process,
                not_run=why_not,
            )


def _recipes() -> Iterator[Check]:
    # Compiling for a card takes its time, and processes share it; for a CPU it takes none.
    apart = torch.cuda.is_available()
    for recipe in RECIPES:
        process = f"recipe {recipe}" if apart else "recipes"
        for name, function in _OF_EACH_RECIPE.items():
            path = f"{_HERE}.recipes:{function}"
            yield Check("recipes", f"{recipe}, {name}", path, (recipe,), process)
    process = "frozen" if apart else "recipes"
    yield Check("recipes", "frozen weight", f"{_HERE}.recipes:check_frozen", (), process)


def _hosts() -> Iterator[Check]:
    for host in host_steps.STEPS:
        for level in host_steps.LEVELS:
            yield Check(
                "training steps",
                f"{host}, {level}",
                f"{_HERE}.host_steps:step",
                (host, level),
                process=host.partition(" ")[0],  # Lightning's two share one
                limit_s=180.0,
                not_run=host_steps.missing(host),
            )


def _exchange() -> Iterator[Check]:
    function = f"{_HERE}.exchange:check_exchange"
    yield Check("exchange", "two processes", function, (), EVERY_CARD)


def _speed() -> Iterator[Check]:
    for recipe in RECIPES:
        yield Check(
            "speed",
            recipe,
            f"{_HERE}.recipes:time_recipe",
            (recipe,),
            ALONE,
            not_run="" if torch.cuda.is_available() else "emulation: not timed",
        )


_PARTS: dict[str, Callable[[], Iterator[Check]]] = {
    "kernels": _kernels,
    "recipes": _recipes,
    "speed": _speed,
    "hosts": _hosts,
    "exchange": _exchange,
}
