"""The precision plugin of ``pytorch_lightning``'s Trainer.

The class stands in a module of its own, with a fixed name, because ``ddp_spawn`` pickles it.
"""

from pytorch_lightning.plugins.precision import MixedPrecision
from pytorch_lightning.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_fp8.trainer import TrainerPrecision


class FP8Precision(TrainerPrecision, MixedPrecision):
    """`lightning_fp8.FP8Precision` for ``pytorch_lightning``."""

    info = staticmethod(rank_zero_info)
    warn = staticmethod(rank_zero_warn)
