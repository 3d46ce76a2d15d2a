"""The precision plugin and the FSDP2 strategy of ``lightning.pytorch``'s Trainer.

The classes are in a separate module under fixed names, because ``ddp_spawn`` pickles the plugin.
"""

from lightning_fp8.fsdp import host_classes

FP8Precision, FP8FSDPStrategy = host_classes(__name__, "lightning.pytorch")
