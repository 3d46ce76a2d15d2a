"""The precision plugin of ``lightning.pytorch``'s Trainer.

The class stands in a module of its own, with a fixed name, because ``ddp_spawn`` pickles it.
"""

from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_fp8.trainer import TrainerPrecision


class FP8Precision(TrainerPrecision, MixedPrecision):
    """`lightning_fp8.FP8Precision` for ``lightning.pytorch``."""

    info = staticmethod(rank_zero_info)
    warn = staticmethod(rank_zero_warn)
