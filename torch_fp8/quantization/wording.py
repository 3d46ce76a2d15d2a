"""Numbers of things in messages."""


def counted(count: int, noun: str) -> str:
    """Return "1 weight" or "2 weights" for the noun "weight"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
