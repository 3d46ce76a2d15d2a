"""Integer arithmetic for launches, without the constexpr checks of Triton's functions."""


def cdiv(x: int, y: int) -> int:
    """Return x / y rounded up."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two >= n, for a positive n."""
    return 1 << (n - 1).bit_length()
