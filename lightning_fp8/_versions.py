"""The releases of Lightning that the tests ran with; docs/versions.md says which tests.

Older ones are refused where FP8 is asked for. Newer ones are not: they may well work.
"""

import re
from importlib.metadata import PackageNotFoundError, version

LOWEST, HIGHEST = "2.4", "2.6"

# Top-level package -> the distributions that bring it.
_DISTRIBUTIONS = {
    "lightning": ("lightning",),
    "pytorch_lightning": ("pytorch-lightning",),
    "lightning_fabric": ("lightning-fabric", "pytorch-lightning"),
}


def refusal(package: str) -> str | None:
    """Return one line about a top-level package that is too old; None if it is not, or not
    known.
    """
    for distribution in _DISTRIBUTIONS.get(package, ()):
        try:
            installed = version(distribution)
        except PackageNotFoundError:
            continue
        if _minor(installed) >= _minor(LOWEST):
            return None
        return (
            f"torch-fp8 supports {distribution} {LOWEST} to {HIGHEST}, found {installed}: "
            f"pip install '{distribution}>={LOWEST}', or train without FP8 "
            "(precision='bf16-mixed')"
        )
    return None


def _minor(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:2]))
