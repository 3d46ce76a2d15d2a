"""`FabricPrecision`: what Fabric's plugins do beyond those of the Trainer."""

from torch import nn

from lightning_fp8.precision import HostPrecision


class FabricPrecision(HostPrecision):
    """The part of Fabric's plugins: models are set up one by one, optimizers come later."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert `module`, one more."""
        super().convert_module(module)
        for converted in self._live():
            self._announce(converted)
        return module
