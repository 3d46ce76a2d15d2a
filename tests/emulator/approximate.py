"""PTX's approximate functions: exact and rounded, or off by as much as the ISA allows."""

from typing import Any

import numpy as np

from tests.emulator.arithmetic import flush

Values = Any
_F32, _F64 = np.float32, np.float64
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class Approximate:
    """The functions.

    Args:
        seed: seed of random errors within the bounds of the PTX ISA; None: rounded once.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._seed = seed

    def _round(self, exact: Values, bound: float) -> Values:
        """Round to float32, with an error that is the same whenever the result is.

        Args:
            exact: float64 results.
            bound: largest relative error, half a unit of the last place included.
        """
        if self._seed is not None:
            bits = (exact.view(np.uint64) ^ np.uint64(self._seed)) * _MULTIPLIER
            bits = (bits ^ (bits >> np.uint64(29))) * _MULTIPLIER
            part = (bits >> np.uint64(11)).astype(_F64) * 2.0**-52 - 1
            exact = exact * (1 + part * (bound - 2.0**-24))
        return exact.astype(_F32)

    def ex2(self, x: Values, ftz: bool) -> Values:
        y = self._round(np.exp2(flush(x).astype(_F64)), 2.0**-22.5)
        return flush(y) if ftz else y

    def lg2(self, x: Values, ftz: bool) -> Values:
        return self._round(np.log2((flush(x) if ftz else x).astype(_F64)), 2.0**-22)

    def rcp(self, x: Values, ftz: bool) -> Values:
        y = self._round(1 / (flush(x) if ftz else x).astype(_F64), 2.0**-23)
        return flush(y) if ftz else y

    def rsqrt(self, x: Values, ftz: bool) -> Values:
        return self._round(1 / np.sqrt((flush(x) if ftz else x).astype(_F64)), 2.0**-22.9)

    def sqrt(self, x: Values, ftz: bool) -> Values:
        return self._round(np.sqrt((flush(x) if ftz else x).astype(_F64)), 2.0**-23)

    def divide(self, a: Values, b: Values, ftz: bool) -> Values:
        if ftz:
            a, b = flush(a), flush(b)
        y = self._round(a.astype(_F64) / b.astype(_F64), 2.0**-22)
        return flush(y) if ftz else y
