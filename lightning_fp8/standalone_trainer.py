"""The precision plugin and the FSDP2 strategy of ``pytorch_lightning``'s Trainer.

The classes are in a separate module under fixed names, because ``ddp_spawn`` pickles the plugin.
"""

from pytorch_lightning.plugins.precision import MixedPrecision
from pytorch_lightning.strategies import ModelParallelStrategy
from pytorch_lightning.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_fp8.fsdp import TrainerStrategy
from lightning_fp8.trainer import TrainerPrecision


class FP8Precision(TrainerPrecision, MixedPrecision):
    """`lightning_fp8.FP8Precision` for ``pytorch_lightning``."""

    info = staticmethod(rank_zero_info)
    warn = staticmethod(rank_zero_warn)


class FP8FSDPStrategy(TrainerStrategy, ModelParallelStrategy):
    """`lightning_fp8.FP8FSDPStrategy` for ``pytorch_lightning``."""

    warn = staticmethod(rank_zero_warn)
