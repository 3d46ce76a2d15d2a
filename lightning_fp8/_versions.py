"""The tested releases of Lightning; docs/versions.md lists the tests.

Older releases are refused if FP8 is requested. Newer ones are not, because they may well work.
"""

import re
from importlib.metadata import PackageNotFoundError, version

LOWEST, HIGHEST = "2.4", "2.6"

# Top-level package -> the distributions that contain it.
_DISTRIBUTIONS = {
    "lightning": ("lightning",),
    "pytorch_lightning": ("pytorch-lightning",),
    "lightning_fabric": ("lightning-fabric", "pytorch-lightning"),
}


def refusal(package: str) -> str | None:
    """Return one line on a package that is too old; None if it is supported or unknown."""
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
