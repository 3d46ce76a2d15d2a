"""Counts, lists and tables as text for messages."""

from collections.abc import Iterable, Sequence


def counted(count: int, noun: str) -> str:
    """Return "1 weight" or "2 weights" for the noun "weight"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def first_of(items: Sequence[object], most: int = 3, separator: str = ", ") -> str:
    """Join the first `most` items and the number of the others: "a, b, c and 2 more"."""
    more = len(items) - most
    others = f"{separator.strip(', ')} and {more} more" if more > 0 else ""
    return separator.join(map(str, items[:most])) + others


def by_reason(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Group pairs of a name and a reason: return the names of each reason."""
    names: dict[str, list[str]] = {}
    for name, reason in pairs:
        names.setdefault(reason, []).append(name)
    return names


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Align the cells of a table, the first `left` columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    forms = [f"{{:{'<' if i < left else '>'}{width}}}" for i, width in enumerate(widths)]
    return "\n".join("  ".join(forms).format(*row).rstrip() for row in rows)
