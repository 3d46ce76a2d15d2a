"""What a launch does that a card would not forgive."""


class Fault(Exception):
    """A fault of a kernel, named with the line of its PTX.

    Args:
        what: happened.
        line: line of the PTX; None: no line is at fault.
    """

    def __init__(self, what: str, line: int | None = None) -> None:
        super().__init__(what if line is None else f"line {line} of the PTX: {what}")
        self.line = line


class OutOfBounds(Fault):
    """An access outside of the tensors that the launch was given, or of the shared memory."""


class Misaligned(Fault):
    """An access at an address that is no multiple of its width."""


class Uninitialised(Fault):
    """A read of memory that nobody has written."""


class Race(Fault):
    """Two accesses, one of them a write, that nothing orders."""


class Divergence(Fault):
    """Threads that are missing where all of a warp or of a program must take part."""


class NeverEnds(Fault):
    """A launch that has run for longer than its bound."""
