"""The tested releases of the hosts; docs/versions.md lists the tests.

Older releases are refused if FP8 is requested. Newer ones are not, because they may well work.
"""

import re
import sys
from importlib.metadata import PackageNotFoundError, version

TRIED = {
    "accelerate": ("1.10", "1.15"),
    "transformers": ("4.57", "5.23"),
    "trl": ("0.24", "1.16"),
    "peft": ("0.18", "0.21"),
}
"""The lowest and highest tested minor version of each host."""


def refusal(host: str) -> str | None:
    """Return one line on a host that is too old; None if it is supported or unknown."""
    lowest, highest = TRIED[host]
    try:
        installed = version(host)
    except PackageNotFoundError:
        return None
    if _minor(installed) >= _minor(lowest):
        return None
    return (
        f"torch-fp8 supports {host} {lowest} to {highest}, found {installed}: "
        f"pip install '{host}>={lowest}', or train without FP8 (--mixed_precision bf16)"
    )


def refuse_old_hosts() -> None:
    """Raise ImportError if an imported host is too old."""
    for host in TRIED:
        line = refusal(host) if host in sys.modules else None
        if line is not None:
            raise ImportError(line)


def _minor(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:2]))
