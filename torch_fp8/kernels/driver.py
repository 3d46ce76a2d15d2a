"""Triton's driver."""

from triton.runtime import driver


def start_driver() -> None:
    """Start Triton's driver: compile its C module, or load it from Triton's cache."""
    driver.active  # noqa: B018
