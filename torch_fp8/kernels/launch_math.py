"""Integer arithmetic of launches; Triton's functions of the same names ask for constants first."""


def cdiv(x: int, y: int) -> int:
    """Return x / y rounded up."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two >= n, for a positive n."""
    return 1 << (n - 1).bit_length()
