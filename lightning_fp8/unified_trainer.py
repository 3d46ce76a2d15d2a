"""The precision plugin and the FSDP2 strategy of ``lightning.pytorch``'s Trainer.

The classes are in a separate module under fixed names, because ``ddp_spawn`` pickles the plugin.
"""

from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_fp8.fsdp import TrainerStrategy
from lightning_fp8.trainer import TrainerPrecision


class FP8Precision(TrainerPrecision, MixedPrecision):
    """`lightning_fp8.FP8Precision` for ``lightning.pytorch``."""

    info = staticmethod(rank_zero_info)
    warn = staticmethod(rank_zero_warn)


class FP8FSDPStrategy(TrainerStrategy, ModelParallelStrategy):
    """`lightning_fp8.FP8FSDPStrategy` for ``lightning.pytorch``."""

    warn = staticmethod(rank_zero_warn)
