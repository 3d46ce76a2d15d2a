"""The precision plugin and the FSDP2 strategy of ``lightning_fabric``'s Fabric.

The classes are in a separate module under fixed names, because ``ddp_spawn`` pickles the plugin.
"""

from lightning_fabric.plugins.precision import MixedPrecision
from lightning_fabric.strategies import ModelParallelStrategy
from lightning_fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_fp8.fabric import FabricPrecision
from lightning_fp8.fsdp import FabricStrategy


class FP8Precision(FabricPrecision, MixedPrecision):
    """`lightning_fp8.FP8Precision` for ``lightning_fabric``."""

    info = staticmethod(rank_zero_info)
    warn = staticmethod(rank_zero_warn)


class FP8FSDPStrategy(FabricStrategy, ModelParallelStrategy):
    """`lightning_fp8.FP8FSDPStrategy` for ``lightning_fabric``."""

    warn = staticmethod(rank_zero_warn)
