"""`FP8Kwargs`: an explicit `FP8Config` for one Accelerator."""

from dataclasses import dataclass
from typing import Any

from accelerate.utils import KwargsHandler

from torch_fp8 import FP8Config
from torch_fp8.config import given_config


@dataclass(init=False)
class FP8Kwargs(KwargsHandler):
    """The kwargs handler that selects this engine and its configuration for one Accelerator.

    ``Accelerator(mixed_precision="fp8", kwargs_handlers=[FP8Kwargs(FP8Config(opt_level="O3"))])``

    ``FP8Kwargs(opt_level="O3")`` is a short form of the same handler. It overrides
    ``TORCH_FP8_CONFIG`` and the launcher's flags.

    Args:
        config: the configuration, or None for that of ``TORCH_FP8_CONFIG`` and the launcher's
            flags, as without a handler.
        options: fields of FP8Config instead of `config`.
    Raises:
        TypeError: `config` is not an FP8Config.
        ValueError: an option or value is not valid; both `config` and options are given.
    """

    config: FP8Config | None = None
    """The configuration, or None for that of ``TORCH_FP8_CONFIG`` and the launcher's flags."""

    def __init__(self, config: FP8Config | None = None, **options: Any) -> None:
        self.config = given_config(config, options, "FP8Kwargs")
