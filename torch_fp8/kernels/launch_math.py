"""Integers of launches, as Triton's functions of these names, which take 2.5 us for a call."""


def cdiv(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """The smallest power of two >= n, of a positive n."""
    return 1 << (n - 1).bit_length()
