"""The checks of ``torch-fp8 env --self-test``."""

from collections.abc import Callable, Iterator, Sequence

import torch

from torch_fp8._version import distribution_version
from torch_fp8.environment.check import Check
from torch_fp8.environment.hosts import is_installed
from torch_fp8.quantization.formats import MIN_CAPABILITY
from torch_fp8.quantization.recipe import RECIPES

_HERE = __name__.rpartition(".")[0]
KERNELS = ("casts", "norm", "swiglu", "optimizer", "messages")
"""The checks of `torch_fp8.environment.kernel_checks`, each the function ``check_<name>``."""
HOSTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "Lightning Trainer": (("lightning",), ("pytorch_lightning",)),
    "Lightning Fabric": (("lightning",), ("lightning_fabric",)),
    "Accelerate": (("accelerate",),),
    "transformers Trainer": (("transformers", "accelerate"),),
    "TRL SFT": (("trl", "datasets", "transformers", "accelerate"),),
}
"""Alternative groups of modules for each host's training step, one of which must be installed."""


def self_test(only: Sequence[str] | None = None) -> list[Check]:
    """Return all checks, or those of the named parts."""
    return [check for part, checks in _PARTS.items() if part in (only or _PARTS)
            for check in checks()]  # fmt: skip


def _kernels() -> Iterator[Check]:
    why_not = _no_kernel()
    for name in KERNELS:
        function = f"{_HERE}.kernel_checks:check_{name}"
        yield Check("kernels", name, function, ("cuda",), not_run=why_not)


def _no_kernel() -> str:
    """Return why no kernel can run here; empty if kernels can run."""
    if not torch.cuda.is_available():
        return "no card"
    if torch.cuda.get_device_capability() < MIN_CAPABILITY:
        return "this card is below sm_89: it runs the references"
    return "" if distribution_version("triton") else "Triton is not installed"


def _recipes() -> Iterator[Check]:
    for recipe in RECIPES:
        yield Check("recipes", recipe, f"{_HERE}.recipes:check_recipe", (recipe,), limit_s=300.0)
    yield Check("recipes", "frozen weight", f"{_HERE}.recipes:check_frozen")


def _hosts() -> Iterator[Check]:
    for host, groups in HOSTS.items():
        installed = any(all(map(is_installed, group)) for group in groups)
        yield Check(
            "training steps",
            host,
            f"{_HERE}.host_steps:steps",
            (host,),
            limit_s=300.0,
            not_run="" if installed else "not installed",
        )


def _exchange() -> Iterator[Check]:
    function = f"{_HERE}.exchange:check_exchange"
    yield Check("exchange", "two processes", function, sees_every_card=True)


def _speed() -> Iterator[Check]:
    why_not = "" if torch.cuda.is_available() else "emulation: not timed"
    for recipe in RECIPES:
        function = f"{_HERE}.recipes:time_recipe"
        yield Check("speed", recipe, function, (recipe,), not_run=why_not, is_alone=True)


_PARTS: dict[str, Callable[[], Iterator[Check]]] = {
    "kernels": _kernels,
    "recipes": _recipes,
    "speed": _speed,
    "hosts": _hosts,
    "exchange": _exchange,
}
