"""Access to Triton's driver."""

from triton.runtime import driver


def start_driver() -> None:
    """Start Triton's driver, which compiles its C module or loads it from Triton's cache."""
    driver.active  # noqa: B018
