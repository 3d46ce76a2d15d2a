"""`FP8Kwargs`: an explicit `FP8Config` for one Accelerator."""

from dataclasses import dataclass

from accelerate.utils import KwargsHandler

from torch_fp8 import FP8Config


@dataclass
class FP8Kwargs(KwargsHandler):
    """Chooses this engine, with this configuration, whatever the environment says.

    ``Accelerator(mixed_precision="fp8", kwargs_handlers=[FP8Kwargs(FP8Config(recipe="rowwise"))])``

    Raises:
        TypeError: `config` is not an FP8Config.
    """

    config: FP8Config | None = None
    """None: as without a handler, from ``TORCH_FP8_CONFIG`` and the launcher's flags."""

    def __post_init__(self) -> None:
        if self.config is not None and not isinstance(self.config, FP8Config):
            raise TypeError(f"FP8Kwargs takes an FP8Config, got {self.config!r}")
