"""Recipes: the fields of the originals that can be given, with their defaults."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class _Maxima(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(Enum):
    E4M3 = _Maxima(448, 448)
    E5M2 = _Maxima(57344, 57344)
    HYBRID = _Maxima(448, 57344)


class Recipe:
    @classmethod
    def delayed(cls) -> bool:
        return issubclass(cls, DelayedScaling)


@dataclass
class DelayedScaling(Recipe):
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable = "max"
    scaling_factor_compute_algo: Callable | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None


@dataclass
class Float8CurrentScaling(Recipe):
    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID


@dataclass
class MXFP8BlockScaling(Recipe):
    margin: int = 0
    fp8_format: Format = Format.E4M3


@dataclass
class Float8BlockScaling(Recipe):
    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
