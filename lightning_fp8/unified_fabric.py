"""The precision plugin of ``lightning.fabric``'s Fabric.

The class stands in a module of its own, with a fixed name, because ``ddp_spawn`` pickles it.
"""

from lightning.fabric.plugins.precision import MixedPrecision
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_fp8.fabric import FabricPrecision


class FP8Precision(FabricPrecision, MixedPrecision):
    """`lightning_fp8.FP8Precision` for ``lightning.fabric``."""

    info = staticmethod(rank_zero_info)
    warn = staticmethod(rank_zero_warn)
