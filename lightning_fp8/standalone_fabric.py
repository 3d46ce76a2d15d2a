"""The precision plugin and the FSDP2 strategy of ``lightning_fabric``'s Fabric.

The classes are in a separate module under fixed names, because ``ddp_spawn`` pickles the plugin.
"""

from lightning_fp8.fabric import FabricPrecision
from lightning_fp8.fsdp import FabricStrategy, host_classes

bases = FabricPrecision, FabricStrategy
FP8Precision, FP8FSDPStrategy = host_classes(__name__, "lightning_fabric", *bases)
